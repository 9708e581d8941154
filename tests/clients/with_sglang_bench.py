"""SGLang's `bench_serving` over /generate, completions and chat, streamed and whole, with a cache report.

Its package is installed alone. What it imports of SGLang's server needs packages for GPUs, so that is replaced.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

URL, MODEL = sys.argv[1:]
ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "stages" / "generate" / "model" / "demo"
NUM_PROMPTS = 6

os.environ["HF_HUB_OFFLINE"] = "1"
BARE = ("sglang", "sglang.srt", "sglang.srt.utils", "sglang.srt.disaggregation")
"""Packages whose `__init__` imports the server."""
ABSENT = {"sglang.srt.disaggregation.utils": "FAKE_BOOTSTRAP_HOST", "datasets": "load_dataset"}
"""Modules of which the benchmark imports one name, and calls it only for other datasets and servers."""


def stand_in(name: str, folders: list[str] | None) -> ModuleType:
    """Make a module *name* that has run nothing; a package if it has *folders*."""
    spec = ModuleSpec(name, None)
    spec.submodule_search_locations = folders
    sys.modules[name] = module = module_from_spec(spec)
    return module


installed = importlib.metadata.distribution("sglang")
for name in BARE:
    stand_in(name, [str(installed.locate_file(name.replace(".", "/")))])
for name, imported in ABSENT.items():
    setattr(stand_in(name, None), imported, None)

from sglang.benchmark import serving  # noqa: E402  # needs the modules above


def bench(folder: Path, backend: str, *flags: str) -> dict[str, Any]:
    """Run the benchmark as its command line does; return the line of results that it writes."""
    results = folder / f"{backend}{len(flags)}.jsonl"
    sys.argv = ["bench_serving", "--backend", backend, "--base-url", URL.removesuffix("/v1")]
    sys.argv += ["--model", str(TOKENIZER), "--served-model-name", MODEL, "--num-prompts", str(NUM_PROMPTS)]
    sys.argv += ["--random-input-len", "48", "--random-output-len", "24", "--random-range-ratio", "0.5"]
    sys.argv += ["--output-file", str(results), "--output-details", "--disable-tqdm", *flags]
    serving.cli_main()
    result: dict[str, Any] = json.loads(results.read_text())
    assert result["completed"] == NUM_PROMPTS, result["errors"]
    assert result["server_info"], "no answer from /server_info"
    return result


with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    os.environ["HOME"] = name  # the benchmark keeps the data that it made below it
    conversation = {"conversations": [{"value": "How does a log remember? " * 4}, {"value": "It never forgets."}]}
    (folder / "dataset.json").write_text(json.dumps([conversation] * NUM_PROMPTS))
    random = ("--dataset-name", "random", "--dataset-path", str(folder / "dataset.json"))
    for backend in ("sglang", "sglang-oai", "sglang-oai-chat"):
        streamed = bench(folder, backend, *random)
        assert streamed["total_output_tokens"] == sum(streamed["output_lens"]) > 0, streamed
        assert all(streamed["ttfts"]) and all(streamed["itls"]) and all(streamed["generated_texts"]), streamed
    sizes = {"num-groups": "2", "prompts-per-group": "3", "system-prompt-len": "64", "question-len": "16"}
    groups = [part for name, value in sizes.items() for part in (f"--gsp-{name}", value)]
    shared = ("--dataset-name", "generated-shared-prefix", "--gsp-output-len", "16", *groups)
    for backend in ("sglang", "sglang-oai", "sglang-oai-chat"):
        cached = bench(folder, backend, *shared, "--cache-report")
        assert cached["cache_report"]["total_cached_tokens"] > 0, cached["cache_report"]
    bench(folder, "sglang", *random, "--tokenize-prompt", "--return-logprob", "--flush-cache")
    bench(folder, "sglang-oai-chat", *random, "--disable-stream", "--apply-chat-template")
