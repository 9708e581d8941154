"""Other engines on nano-vllm's benchmark, beside this one: `make gpu-check ARGS='--only peers'` runs what is installed.

    python -m ops.bench.peers NAME CHECKPOINT OUT.json

times one of them. Only that process imports it. All engines read the same checkpoint and get the same token ids. Each
runs with its defaults; only the longest request is set, as in nano-vllm's benchmark.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from ops.bench.offline import PRESETS, TEMPERATURE, Workload, draw
from ops.bench.report import aligned

OURS: Final[Mapping[str, tuple[str, ...]]] = {"MiniSGL": (), "MiniSGL --gpu-new yes": ("--gpu-new", "yes")}
"""Flags of this engine. All others are compared with the first."""
LONGEST: Final = 4096  # tokens of a prompt and its answer that a peer makes room for
SAMPLED: Final[Mapping[str, Any]] = {"temperature": TEMPERATURE, "ignore_eos": True}


def nano_vllm(folder: str) -> Callable[[Workload], int]:
    """Start https://github.com/GeeeekExplorer/nano-vllm; return what generates and counts the tokens."""
    library = import_module("nanovllm")
    llm = library.LLM(folder, max_model_len=LONGEST)

    def generate(workload: Workload) -> int:
        parameters = [library.SamplingParams(max_tokens=tokens, **SAMPLED) for tokens in workload.output_lengths]
        answers = llm.generate(workload.prompts, parameters, use_tqdm=False)
        return sum(len(answer["token_ids"]) for answer in answers)

    return generate


def vllm(folder: str) -> Callable[[Workload], int]:
    """Do the same with https://github.com/vllm-project/vllm."""
    library = import_module("vllm")
    llm = library.LLM(folder, max_model_len=LONGEST)

    def generate(workload: Workload) -> int:
        parameters = [library.SamplingParams(max_tokens=tokens, **SAMPLED) for tokens in workload.output_lengths]
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        answers = llm.generate(prompts, parameters, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)

    return generate


def sglang(folder: str) -> Callable[[Workload], int]:
    """Do the same with https://github.com/sgl-project/sglang."""
    engine = import_module("sglang").Engine(model_path=folder, context_length=LONGEST)

    def generate(workload: Workload) -> int:
        parameters = [{"max_new_tokens": tokens, **SAMPLED} for tokens in workload.output_lengths]
        answers = engine.generate(input_ids=workload.prompts, sampling_params=parameters)
        return sum(answer["meta_info"]["completion_tokens"] for answer in answers)

    return generate


PEERS: Final = {"nano-vllm": ("nanovllm", nano_vllm), "vLLM": ("vllm", vllm), "SGLang": ("sglang", sglang)}
"""The module of each, and what starts it. Its package has its name in lower case."""


def command(name: str, root: Path, folder: Path, output: Path) -> list[str]:
    """Return Python's arguments to time an engine with the checkpoint in *folder*."""
    if name in PEERS:  # as a module: beside a script, `import datasets` would find ours
        return ["-m", "ops.bench.peers", name, str(folder), str(output)]
    flags = ["--device", "cuda", "--preset", "nano", "--seed", "0", "--runs", "1", *OURS[name]]
    return [str(root / "minisgl.py"), "bench", "offline", *flags, "--model", str(folder), "--output", str(output)]


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the output tokens/s of each engine, their ratio to ours, and why a peer has none."""
    rates = {one["name"]: one["figures"].get("output_tokens_per_s") for one in found}
    ours = rates.get(next(iter(OURS)))
    rows = [("nano-vllm's benchmark", "version", "output tokens/s", "of MiniSGL's")]
    for one in found:
        rate = rates[one["name"]]
        ratio = f"{rate / ours:.2f}" if rate and ours else "-"
        rows.append((one["name"], one["version"] or "-", f"{rate:,.0f}" if rate else one["status"], ratio))
    without = [one for one in found if one["name"] in PEERS and one["reason"]]
    return "\n".join([aligned(rows), *(f"{one['name']}, {one['status']}: {one['reason']}" for one in without)])


def main(name: str, folder: str, output: str) -> None:
    """Time a peer. One run warms it up with other prompts: those of the run that counts must not be in its cache."""
    generate = PEERS[name][1](folder)
    vocab_size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    for seed in (1, 0):
        workload = draw(PRESETS["nano"], seed, vocab_size)
        began_s = time.perf_counter()
        output_tokens = generate(workload)
        seconds = time.perf_counter() - began_s
        if output_tokens != workload.output_tokens:
            sys.exit(f"{name} wrote {output_tokens} tokens, expected {workload.output_tokens}")
    Path(output).write_text(json.dumps({"seconds": seconds, "output_tokens_per_s": output_tokens / seconds}))
    os._exit(0)  # its figures are there: an engine that hangs as it ends must not cost the others their time


if __name__ == "__main__":
    main(*sys.argv[1:])
