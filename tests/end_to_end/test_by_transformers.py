"""Models that transformers computes: their engine is killed, and no client notices."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from support.foreign_models import CONFIGS, make_foreign
from support.selection import rest_at_night
from support.servers import serve
from support.streams import Stream

from pipeline.names import GENERATE

pytestmark = pytest.mark.slow

PROMPTS = ("alpha", "beta and more", "gamma")
LONG = {"max_tokens": 150, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("name", rest_at_night(tuple(CONFIGS), first=1))
def test_streams_go_on_after_kill_9_of_an_engine_that_transformers_computes(tmp_path: Path, name: str) -> None:
    with serve(tmp_path, "--model", str(make_foreign(tmp_path / name, name)), "--dtype", "float32") as server:
        [engine] = httpx.get(f"{server.url}/version").json()["engines"]
        assert "/transformers-" in engine["numerics"] and engine["batch_invariant"] is False
        undisturbed = [Stream(server, prompt, **LONG).join().answer for prompt in PROMPTS]
        streams = [Stream(server, prompt, **LONG) for prompt in PROMPTS]
        for stream in streams:
            stream.begun(10)
        (process,) = server.command.workers(GENERATE)
        process.kill()
        assert [stream.join().answer for stream in streams] == undisturbed
        assert len(server.command.log_lines("worker_died")) == 1
