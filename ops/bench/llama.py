"""llama.cpp as a side of a comparison: `python ops/bench/llama.py FILE.gguf THREADS` answers as `compare.py` asks, and
`python ops/bench/llama.py CHECKPOINT OUT.gguf bf16|q8_0|q4_0|q4_k_m` makes such a file of a Qwen3.

It runs in an environment with numpy, llama-cpp-python and gguf, and imports nothing of ours. Requests are computed
greedily with llama.cpp's C functions. Those that are asked at once are batched continuously, as by llama.cpp's own
server: each step has the last token of every request whose prompt is done, and prompts up to MOST_TOKENS.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

MOST_TOKENS = 2048
"""Of a step: llama.cpp's own default."""
LOG_LEVEL_ERROR = 4  # GGML_LOG_LEVEL_ERROR of ggml.h


@dataclass
class Request:
    """A request that runs."""

    sequence: int
    ids: list[int]
    """Of the prompt, then also of the answer."""
    length: int
    """Of both together at the end."""
    computed: int = 0


class Model:
    """A model with the contexts (KV caches) that were needed so far."""

    def __init__(self, file: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), options)
        if not self._model:
            sys.exit(f"llama.cpp cannot load {file}")
        self._threads = threads
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(MOST_TOKENS, 0, 1)
        self._contexts: dict[tuple[int, int], Any] = {}

    def about(self) -> str:
        """Return what llama.cpp says of the model: architecture, size and kind of weights."""
        text = ctypes.create_string_buffer(200)
        llama_cpp.llama_model_desc(self._model, text, len(text))
        return text.value.decode()

    def generate(self, asked: Sequence[tuple[Sequence[int], int]]) -> list[list[int]]:
        """Return the answer to each (prompt, number of tokens), all of them in one batch."""
        requests = [Request(index, list(ids), len(ids) + count) for index, (ids, count) in enumerate(asked)]
        context = self._context(len(requests), max(request.length for request in requests))
        memory = llama_cpp.llama_get_memory(context)
        llama_cpp.llama_memory_clear(memory, True)
        running = requests
        while running:
            for request, index in self._step(context, running):
                logits = llama_cpp.llama_get_logits_ith(context, index)
                request.ids.append(int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax()))
                if len(request.ids) == request.length:
                    llama_cpp.llama_memory_seq_rm(memory, request.sequence, -1, -1)
            running = [request for request in running if len(request.ids) < request.length]
        return [request.ids[len(ids) :] for request, (ids, _) in zip(requests, asked, strict=True)]

    def _step(self, context: Any, running: Iterable[Request]) -> list[tuple[Request, int]]:
        """Compute a step; return the requests that get a token of it, and where their logits are."""
        count = 0
        sampled = []
        for request in running:
            part = request.ids[request.computed : request.computed + MOST_TOKENS - count]
            for token in part:
                self._batch.token[count] = token
                self._batch.pos[count] = request.computed
                self._batch.n_seq_id[count] = 1
                self._batch.seq_id[count][0] = request.sequence
                request.computed += 1
                self._batch.logits[count] = request.computed == len(request.ids)
                count += 1
            if part and request.computed == len(request.ids):
                sampled.append((request, count - 1))
        self._batch.n_tokens = count
        if code := llama_cpp.llama_decode(context, self._batch):
            sys.exit(f"llama.cpp could not compute {count} tokens (llama_decode returned {code})")
        return sampled

    def _context(self, sequences: int, length: int) -> Any:
        if (sequences, length) not in self._contexts:
            options = llama_cpp.llama_context_default_params()
            options.n_ctx = sequences * -(-length // 256) * 256
            options.n_batch = MOST_TOKENS
            options.n_seq_max = sequences  # each has a cache of its own, as by default: one for all was slower
            options.n_threads = options.n_threads_batch = self._threads
            context = llama_cpp.llama_init_from_model(self._model, options)
            if not context:
                sys.exit(f"llama.cpp could not make a context for {sequences} requests of {length} tokens")
            self._contexts[sequences, length] = context
        return self._contexts[sequences, length]


def show_error(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Take what llama.cpp logs, thousands of lines, and print errors alone."""
    if level == LOG_LEVEL_ERROR:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


def answer(file: str, threads: str) -> None:
    """Load a GGUF file, then answer questions until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints is no answer
    callback = llama_cpp.llama_log_callback(show_error)  # has to stay while llama.cpp may call it
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    model = Model(file, int(threads))
    about = {"llama-cpp-python": llama_cpp.__version__, "dtype": model.about()}
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        requests = list(zip(question["ids"], question["output_tokens"], strict=True))
        began_s = time.perf_counter()
        batches = [requests] if question["batch"] else [[request] for request in requests]
        ids = [answer for batch in batches for answer in model.generate(batch)]
        answered = {"duration_s": time.perf_counter() - began_s, "ids": ids}
        print(json.dumps(answered), file=answers, flush=True)


KINDS = ("bf16", "q8_0")
"""Of weights of matrices; others are float32."""
QUANTIZED = {"q4_0": 2, "q4_k_m": 15}
"""Kinds that llama.cpp makes itself: `llama_ftype` of llama.h."""


ARCHITECTURES = {"qwen3": "qwen3", "gemma3_text": "gemma3", "phi3": "phi3"}
"""`model_type` of a config, and the architecture of the file."""


def write_parameters(config: Mapping[str, Any], writer: Any) -> None:
    """Write what the config says about the model."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] not in ARCHITECTURES or rope.get("rope_type", "default") != "default":
        known = ", ".join(ARCHITECTURES)
        sys.exit(f"llama.py converts {known} with the default rope, not {config['model_type']} with {rope}")
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "phi3":
        writer.add_rope_dimension_count(int(config["head_dim"] * config.get("partial_rotary_factor", 1.0)))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the values, float32, of each tensor of the checkpoint."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        content = np.memmap(path, np.uint8, "r", offset=8 + size)
        for name, entry in header.items():
            if name != "__metadata__":
                raw = content[slice(*entry["data_offsets"])]
                yield name, _floats(raw, entry["dtype"]).reshape(entry["shape"])


def _floats(raw: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view({"F32": np.float32, "F16": np.float16}[dtype]).astype(np.float32)


def convert(folder: Path, file: str, kind: str) -> None:
    """Convert a checkpoint; end with a line if that cannot be.

    There is no vocabulary in the file: it is for token ids alone.
    """
    import gguf

    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES.get(config["model_type"], "qwen3")
    writer = gguf.GGUFWriter(file, architecture)
    write_parameters(config, writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    gates = {}
    for name, values in tensors(folder):
        if architecture == "phi3" and "mlp.gate_proj" in name:
            gates[name.replace("gate_proj", "up_proj")] = values
            continue
        if name in gates:  # gate and up are one matrix there
            values = np.concatenate((gates.pop(name), values))
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + np.float32(1)
        named = names.get_name(name, try_suffixes=(".weight",)) or sys.exit(
            f"llama.cpp has no tensor {name} in a {architecture}"
        )
        stored = gguf.GGMLQuantizationType[kind.upper() if values.ndim == 2 else "F32"]
        writer.add_tensor(named, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(folder: Path, file: str, kind: str) -> None:
    """Convert a checkpoint, and let llama.cpp quantize it; end with a line if that cannot be."""
    whole = f"{file}.bf16"
    convert(folder, whole, "bf16")
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = QUANTIZED[kind]
    if llama_cpp.llama_model_quantize(whole.encode(), file.encode(), options):
        sys.exit(f"llama.cpp cannot make {kind} of {folder}")
    Path(whole).unlink()


if __name__ == "__main__":
    match sys.argv[1:]:
        case [file, threads]:
            answer(file, threads)
        case [folder, file, kind] if kind in KINDS:
            convert(Path(folder), file, kind)
        case [folder, file, kind] if kind in QUANTIZED:
            quantize(Path(folder), file, kind)
        case _:
            sys.exit("usage: llama.py FILE.gguf THREADS | llama.py CHECKPOINT OUT.gguf bf16|q8_0|q4_0|q4_k_m")
