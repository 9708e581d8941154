"""Wherever a model comes from, and in however many files: it is served, under the name that its user expects."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.checkpoints import make_checkpoint, reference_tokens
from support.servers import serve
from transformers import AutoTokenizer

from pipeline.events import Admitted, TokensProduced, decode

# By day tests/stages/generate/model/test_hub.py finds models, and tests/ops/serve/test_command.py has their names.
pytestmark = [pytest.mark.slow, pytest.mark.night]

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GREEDY = {"prompt": "The log is the memory", "temperature": 0, "max_tokens": 24, "ignore_eos": True}


def in_cache(home: Path, name: str, checkpoint: Path) -> None:
    """Put a model into the cache of the hub's library, as a download would have."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    shutil.copytree(checkpoint, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)


def served(url: str) -> list[str]:
    return [model["id"] for model in httpx.get(f"{url}/v1/models", timeout=30).json()["data"]]


def answer(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


@pytest.fixture
def hub_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """HF_HOME of the servers of a test, without a network."""
    home = tmp_path / "hf"
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return home


def test_a_model_of_the_hub_is_served_under_its_name_there(tmp_path: Path, hub_home: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", shard_size="200KB")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokens, smallest_gap = reference_tokens(folder, tokenizer.encode(GREEDY["prompt"]), 24)
    assert smallest_gap > 1e-3
    in_cache(hub_home, "someone/small-model", folder)
    with serve(tmp_path, "--model", "someone/small-model@main") as server:
        assert served(server.url) == ["someone/small-model"]
        one = httpx.get(f"{server.url}/v1/models/someone/small-model", timeout=30).json()
        assert one["id"] == "someone/small-model"
        said = answer(server.post({"model": "someone/small-model", **GREEDY}))
        assert said == tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_given_name_wins_over_that_of_the_hub(tmp_path: Path, hub_home: Path) -> None:
    in_cache(hub_home, "someone/small-model", make_checkpoint(tmp_path / "model", "qwen3moe"))
    with serve(tmp_path, "--model", "someone/small-model", "--served-model-name", "mine", "ours") as server:
        assert served(server.url) == ["mine", "ours"]
        assert answer(server.post({"model": "ours", **GREEDY}))


def test_dummy_weights_answer_without_a_checkpoint_and_say_what_they_are(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3moe", dtype="bfloat16")
    (folder / "model.safetensors").unlink()
    with serve(tmp_path, "--model", str(folder), "--dummy-weight") as server:
        first, again = (server.post(GREEDY) for _ in range(2))
        other = server.post({**GREEDY, "prompt": "She sells sea shells"})
        assert answer(first) == answer(again) != answer(other)
        with server.log() as log:
            history = [decode(entry.fields) for entry in log.histories([first.headers["x-minisgl-uid"]])[0]]
    admitted = [event for event in history if isinstance(event, Admitted)]
    assert len(admitted) == 1 and admitted[0].fingerprint.startswith("dummy-")
    tokens = [token for event in history if isinstance(event, TokensProduced) for token in event.tokens]
    assert len(tokens) == 24 and len(set(tokens)) > 6, "a model that repeats itself measures nothing"
