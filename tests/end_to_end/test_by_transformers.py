"""A model that transformers computes: its engine is killed, and no client notices."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
import torch
from support.servers import serve
from support.streams import Stream
from transformers import AutoModelForCausalLM, Olmo2Config

from ops.bench.models import nonsense
from pipeline.names import GENERATE

pytestmark = pytest.mark.slow

PROMPTS = ("alpha", "beta and more", "gamma")
LONG = {"max_tokens": 150, "ignore_eos": True}


def olmo(folder: Path) -> Path:
    """Write a small random OLMo 2 with the tokenizer of the model of other tests."""
    other = nonsense(folder / "models")
    made = folder / "olmo"
    made.mkdir()
    for file in other.iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            (made / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(1)
    vocab_size = json.loads((other / "config.json").read_text())["vocab_size"]
    sizes = {"vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    config = Olmo2Config(**sizes, **heads, initializer_range=0.2, eos_token_id=1, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(made)
    return made


def test_streams_go_on_after_kill_9_of_an_engine_that_transformers_computes(tmp_path: Path) -> None:
    with serve(tmp_path, "--model", str(olmo(tmp_path))) as server:
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
