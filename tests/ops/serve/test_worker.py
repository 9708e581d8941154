"""One worker of a stage: who says what is wrong where several are told the same."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from ops.serve import worker
from ops.serve.config import parse_command
from pipeline.errors import ConfigError
from stages.generate.config import GenerateConfig


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
    monkeypatch.setattr("pipeline.process.parent.die_with_supervisor", lambda environment: None)
    monkeypatch.setattr("pipeline.process.observe.configure_logging", lambda **about: None)
    with pytest.raises(ConfigError):
        worker.run_worker(config, "generate")
    assert slept == ([worker.SAME_S] if waits else [])
