"""What a model's generation_config.json recommends is how it is sampled, where a client does not say otherwise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.servers import Server, serve
from support.streams import events_of

from pipeline.events import Submitted, TokensProduced

# By day tests/stages/generate/loop/test_worker.py and tests/web/live/test_ready.py have what it recommends.
pytestmark = [pytest.mark.slow, pytest.mark.night]

BODY = {"messages": [{"role": "user", "content": "Tell me how a log remembers."}], "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(llama3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose author wants it greedy, in an odd way, and has made a mistake beside it."""
    folder = tmp_path_factory.mktemp("model") / "odd"
    shutil.copytree(llama3, folder)
    path = folder / "generation_config.json"
    odd = {"do_sample": False, "top_k": 1, "temperature": 2.5, "top_p": None}
    path.write_text(json.dumps(json.loads(path.read_text()) | odd))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("server"), "--model", str(folder), "--dtype", "float32") as server:
        yield server


def ask(server: Server, **fields: Any) -> tuple[Submitted, list[int]]:
    """Return what was submitted for a request, and the tokens of its answer."""
    response = server.post(BODY | fields)
    assert response.status_code == 200, response.text
    with server.log() as log:
        events = events_of(log, response.headers["x-minisgl-uid"])
    submitted = events[0]
    assert isinstance(submitted, Submitted)
    return submitted, [token for event in events if isinstance(event, TokensProduced) for token in event.tokens]


def test_the_answer_is_as_the_model_recommends_and_the_client_wins(server: Server) -> None:
    _, greedy = ask(server, temperature=0, top_k=0)
    for fields in ({}, {"seed": 5}, {"temperature": 2, "seed": 5}, {"top_k": None}):
        submitted, tokens = ask(server, **fields)
        assert submitted.sampling.top_k == 1 and submitted.sampling.temperature == fields.get("temperature", 1)
        assert tokens == greedy
    submitted, tokens = ask(server, temperature=2, seed=5, top_k=0)
    assert submitted.sampling.top_k == 0 and tokens != greedy
    assert ask(server, temperature=2, seed=5, top_k=0)[1] == tokens


def test_a_value_that_cannot_be_is_said_and_keeps_no_server_from_starting(server: Server, folder: Path) -> None:
    (line,) = server.command.log_lines("recommendation_ignored")
    assert line["level"] == "warning" and line["file"] == str(folder / "generation_config.json")
    assert line["reason"] == "temperature is 2.5: Input should be less than or equal to 2"


def test_who_switches_it_off_gets_the_defaults_of_openai(folder: Path, tmp_path: Path) -> None:
    with serve(tmp_path, "--model", str(folder), "--dtype", "float32", "--generation-config", "none") as server:
        submitted, tokens = ask(server, temperature=2, seed=5)
        assert submitted.sampling.top_k == 0
        assert tokens == ask(server, temperature=2, seed=5, top_k=0)[1] != ask(server, temperature=0)[1]
        assert server.command.log_lines("recommendation_ignored") == []
