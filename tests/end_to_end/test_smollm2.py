"""A real model in a GGUF file, SmolLM2: what it answers is what its weights say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import reference_model
from support.gguf_files import dequantized
from support.plans import Request, generate
from transformers import AutoTokenizer

from stages.generate.forward.engine import Engine
from stages.generate.model.checkpoint import check_folder, read_tensors
from stages.generate.model.folder import model_folder
from stages.generate.model.gguf import BLOCKS

pytestmark = [pytest.mark.night, pytest.mark.slow, pytest.mark.timeout(1200)]

CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Count from one to ten.",
    "Explain gravity to a child.",
    "Translate 'good morning' into Spanish.",
    "What is 12 plus 30?",
    "Name three colours.",
    "Who wrote Hamlet?",
    "Give me a recipe for pancakes.",
    "What does HTTP stand for?",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue?",
    "List the planets of the solar system.",
    "Tell me a short story about a cat.",
    "What is the opposite of hot?",
    "Summarize: the quick brown fox jumps over the lazy dog.",
    "How many days has a leap year?",
    "Suggest a name for a dog.",
    "What is photosynthesis?",
    "Say hello in German.",
]
LENGTH = 48
PAGE_SIZE, NUM_PAGES = 16, 64


def widened_by_llama_cpps_package(folder: Path, target: Path) -> Path:
    """Write the weights of a folder of GGUF files as a checkpoint that transformers reads."""
    weights = {}
    for name, entry in read_tensors(folder).items():
        kind = gguf.GGMLQuantizationType[entry.dtype]
        assert BLOCKS[entry.dtype][0] == kind
        raw = np.fromfile(entry.file, np.uint8, entry.end - entry.begin, offset=entry.begin)
        wide = dequantized(entry.dtype, raw.reshape(entry.shape[0], -1)).reshape(entry.shape)
        if entry.rotated_heads:
            wide = wide.reshape(entry.rotated_heads, -1, 2, wide.shape[1]).swapaxes(1, 2).reshape(wide.shape)
        weights[name] = torch.from_numpy(wide.copy())
    target.mkdir()
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "llama", "dtype": "float32"}
    (target / "config.json").write_text(json.dumps(config))
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def test_widened_to_float32_it_gives_the_answers_of_transformers(tmp_path: Path) -> None:
    folder = model_folder("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = reference_model(widened_by_llama_cpps_package(folder, tmp_path / "wide"))
    sizes: dict[str, Any] = {"num_pages": NUM_PAGES, "page_size": PAGE_SIZE}
    engine = Engine(
        check_folder(folder),
        folder,
        device=torch.device("cpu"),
        dtype=torch.float32,
        attention="torch",
        kernels="torch",
        max_running_requests=4,
        max_seq_len=512,
        **sizes,
    )
    ended = 0
    for chat in CHATS:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": chat}], add_generation_prompt=True)
        ids = ids["input_ids"] if not isinstance(ids, list) else ids
        with torch.inference_mode():
            whole = theirs.generate(torch.tensor([ids]), max_new_tokens=LENGTH, do_sample=False)[0].tolist()
        expected = whole[len(ids) :]
        pool = list(range(NUM_PAGES))
        found = generate(engine, Request(0, list(ids), pool, page_size=PAGE_SIZE), len(expected), 512)
        assert found == expected, chat
        if expected[-1] in check_folder(folder).eos_ids:
            ended += tokenizer.convert_ids_to_tokens(expected[-1]) == "<|im_end|>"
    assert ended >= 5, "some answers end with the token that ends a turn"
