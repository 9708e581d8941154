"""One worker of a stage: who says what is wrong where several are told the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.gguf_files import make_gguf, mixed

from ops.serve import worker
from ops.serve.config import ServerConfig, parse_command
from pipeline.errors import ConfigError
from pipeline.process.observe import EXIT_BROKEN
from stages.detokenize.config import DetokenizeConfig
from stages.generate.model.folder import model_folder
from stages.generate.setup.config import GenerateConfig
from stages.tokenize.config import TokenizeConfig


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker changes nothing here that outlasts its test."""
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # what it was comes back after the test
    monkeypatch.setattr("pipeline.process.parent.die_with_supervisor", lambda environment: None)
    monkeypatch.setattr("pipeline.process.observe.configure_logging", lambda **about: None)


@pytest.mark.parametrize(
    ("flags", "waits"),
    [
        ((), False),
        (("--engines", "2", "--engine", "0"), False),
        (("--engines", "2", "--engine", "1"), True),
        (("--tp", "2", "--rank", "0"), False),
        (("--tp", "2", "--rank", "1"), True),
        (("--tp", "2", "--nnodes", "2", "--group", "g", "--node-rank", "1", "--rank", "1"), False),
    ],
)
def test_an_engine_waits_with_a_refusal_that_the_first_one_says_for_all(
    monkeypatch: pytest.MonkeyPatch, flags: Sequence[str], waits: bool
) -> None:
    config = parse_command(["stage", "generate", "--slot", "0", "--redis-url", "redis://127.0.0.1:1", *flags], {})
    assert isinstance(config, GenerateConfig)
    slept: list[float] = []

    def refuse() -> int:
        raise ConfigError("--attn fi: no")

    monkeypatch.setattr(worker, "_imported", lambda config: refuse)
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(ConfigError):
        worker.run_worker(config, "generate")
    assert slept == ([worker.SAME_S] if waits else [])


@pytest.mark.parametrize("stage", ["tokenize", "generate", "detokenize"])
def test_a_worker_started_by_hand_takes_what_model_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stage: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    original = make_gguf(tmp_path / "m.gguf", "qwen3", mixed)
    for given, folder in ((tmp_path / "m.gguf", model_folder(str(tmp_path / "m.gguf"))), (original, original)):
        flags = ["--slot", "0", "--redis-url", "redis://127.0.0.1:1", "--model", str(given)]
        config = parse_command(["stage", stage, *flags], {})
        assert isinstance(config, TokenizeConfig | GenerateConfig | DetokenizeConfig)
        assert worker._folder(config) == folder


@pytest.mark.parametrize("stage", ["tokenize", "generate", "detokenize", "web"])
def test_any_thread_of_a_worker_that_breaks_ends_the_process(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    config = parse_command(["stage", stage, "--slot", "0", "--redis-url", "redis://127.0.0.1:1"], {})
    assert not isinstance(config, ServerConfig)
    ended: list[int] = []

    def break_a_thread(*_: object) -> int:
        def breaks() -> None:
            raise ZeroDivisionError

        thread = threading.Thread(target=breaks)
        thread.start()
        thread.join()
        return 0

    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr(worker, "_imported", lambda config: break_a_thread)
    monkeypatch.setattr("web.server.run", break_a_thread)
    assert worker.run_worker(config, stage) == 0
    assert ended == [EXIT_BROKEN]
