"""What each of several engines gets of a machine."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest

from ops.serve import shares
from ops.serve.config import parse_command
from ops.serve.shares import Share, shares_of, visible_gpus
from pipeline.errors import ConfigError
from pipeline.flags import flags_for
from stages.generate.setup.config import EngineConfig, GenerateConfig, ShareConfig

AUTO = EngineConfig()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The GPUs of this machine, to which a test may add some."""
    found: list[str] = []
    monkeypatch.setattr(shares, "visible_gpus", lambda device: [] if device == "cpu" else found)
    return found


def test_a_single_engine_has_all(gpus: list[str]) -> None:
    gpus += ["0", "1"]
    assert shares_of(AUTO, 1, "--dp") == [Share()]
    assert flags_for([Share().config]) == []


def test_on_a_cpu_engines_divide_what_is_free_before_the_first_one_starts(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "free_memory_bytes", lambda: 900)
    found = shares_of(AUTO, 3, "--dp")
    assert [share.config for share in found] == [ShareConfig(index, 3, 900) for index in range(3)]
    assert all(not share.variables for share in found)
    for share in found:
        config = parse_command(["stage", "generate", "--slot", "7", *flags_for([share.config])], {})
        assert isinstance(config, GenerateConfig) and config.share == share.config


@pytest.mark.parametrize(("num_ranks", "seen"), [(1, ["a", "b"]), (2, ["a,b", "1,2"])])
def test_each_rank_of_each_engine_has_a_gpu_of_its_own(gpus: list[str], num_ranks: int, seen: list[str]) -> None:
    gpus += ["a", "b", "1", "2", "left over"]
    found = shares_of(replace(AUTO, tp=num_ranks), 2, "--dp")
    assert found == [Share(variables={"CUDA_VISIBLE_DEVICES": names}) for names in seen]
    assert shares_of(replace(AUTO, device="cpu"), 2, "--dp")[0].variables == {}


@pytest.mark.parametrize(
    ("options", "num_gpus", "message"),
    [
        ({}, 1, "--dp 2: 2 engines need 2 GPUs, but torch sees 1 here; pass a smaller number, or --device cpu"),
        ({"device": "cuda"}, 0, "--dp 2: 2 engines need 2 GPUs, but torch sees 0 here; "),
        ({"tp": 2}, 3, "--dp 2: 2 engines with 2 ranks each need 4 GPUs, but torch sees 3 here; "),
    ],
)
def test_more_engines_than_gpus_are_refused_in_one_line(
    gpus: list[str], options: dict[str, Any], num_gpus: int, message: str
) -> None:
    gpus += [str(number) for number in range(num_gpus)]
    with pytest.raises(ConfigError) as caught:
        shares_of(replace(AUTO, **options), 2, "--dp")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "names"), [("", ["0", "1"]), ("3, GPU-5b2c", ["3", "GPU-5b2c"]), ("3,1,0", ["3", "1"])]
)
def test_gpus_keep_the_names_by_which_this_process_sees_them(
    given: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "_has_driver", lambda: True)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "2\n"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_gpus("auto") == names
    assert visible_gpus("cpu") == []
    monkeypatch.setattr(shares, "_has_driver", lambda: False)
    assert visible_gpus("auto") == []
