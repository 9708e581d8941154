"""Phase `server`: `minisgl serve` on the device, from its start to 32 streams at once, as a client sees it; and what
many clients at once get, beside the same engine without a server.

The engine's own time is the sum of its forward passes, as the server's /metrics has it. The rest of the wall time is
the pipeline's share: HTTP, tokenizers, the log, the schedule.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ops.bench import models, report
from ops.bench.gpu.phase import Report, Scale, attempt
from ops.bench.models import Prompts, Shape, Workload
from ops.bench.peers import Served, our_server
from pipeline.events import SamplingParams

NUM_REQUESTS: Final = 32
NUM_CLIENTS: Final = {"toy": 4, "small": 16, "full": 256}
SHAPES: Final = {
    "toy": Shape(64, 2, 4, 2, 16, 192, 2000, 10_000.0, 1024),
    "5m": Shape(256, 4, 4, 2, 64, 768, 4000, 10_000.0, 1024),
    "0.6b": models.SHAPES["0.6b"],
}
WARM_TOKENS: Final = 16
"""Most output tokens of a request that only warms up."""
METRICS_TIMEOUT_S: Final = 15.0
STEP_SECONDS: Final = "minisgl:step_time_seconds_sum"
STEPS: Final = "minisgl:step_time_seconds_count"
TOKENS: Final = "minisgl:generation_tokens_total"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is served, and how long prompts and answers are."""

    model: str
    input_tokens: int
    output_tokens: int


SIZES: Final = {
    "toy": Sizes("toy", 8, 4),
    "small": Sizes("5m", 32, 16),
    "full": Sizes("0.6b", 256, 128),
}


def run(scale: Scale, report: Report) -> None:
    """Start a server, load it, and end it."""
    sizes = SIZES[scale.size]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        began_s = time.perf_counter()
        folder, data = Path(scratch) / "model", Path(scratch) / "data"
        folder.mkdir()
        data.mkdir()
        models.write_all_but_weights(SHAPES[sizes.model], folder)
        prompts = Prompts(folder)
        report("model", shape=sizes.model, written_s=time.perf_counter() - began_s)
        flags = ["--model", str(folder), "--dummy-weight", "--device", scale.device]
        if scale.size == "toy":
            flags += ["--threads", "1"]  # a test shares its cores, and threads that wait for each other would spin
        with our_server(data, flags) as (served, ready_s):
            report("ready", s=ready_s, attention=attention_of(data / "minisgl.log"))
            engine_counts(served.url, 1.0)  # the token that showed that it is ready
            for name, concurrency in (("one request", 1), (f"{NUM_REQUESTS} requests at once", NUM_REQUESTS)):
                with attempt(report, name):
                    _measure(report, served, prompts, sizes, name, concurrency)
            num_clients = NUM_CLIENTS[scale.size]
            through_http = _measure(report, served, prompts, sizes, f"{num_clients} clients", num_clients)
        offline = _offline(scale, folder, sizes, num_clients)
        share = through_http / offline
        report(f"{num_clients} clients, offline", output_tokens_per_s=offline, share_through_http=share)


def attention_of(said: Path) -> str | None:
    """Return the attention backend that the engine names in the server's output."""
    found = re.search(r"attention[=\": ]+(\w+)", said.read_text()) if said.is_file() else None
    return found[1] if found else None


def _offline(scale: Scale, folder: Path, sizes: Sizes, num_requests: int) -> float:
    """Return the output tokens/s of as many requests of the same lengths without server, after as many short ones that
    warm up.
    """
    from ops.offline import LLM

    more: dict[str, Any] = {"threads": 1} if scale.size == "toy" else {}
    with LLM(folder, dummy_weight="yes", device=scale.device, **more) as llm:
        seconds = 0.0
        for seed, num_tokens in enumerate((min(WARM_TOKENS, sizes.output_tokens), sizes.output_tokens)):
            draw = random.Random(seed)
            vocab_size = llm.settings.limits.vocab_size
            prompts = [draw.choices(range(vocab_size), k=sizes.input_tokens) for _ in range(num_requests)]
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            began_s = time.perf_counter()
            llm.generate(prompts, params, progress=False)
            seconds = time.perf_counter() - began_s
    return num_requests * sizes.output_tokens / seconds


def _measure(tell: Report, served: Served, prompts: Prompts, sizes: Sizes, name: str, concurrency: int) -> float:
    """Send *concurrency* requests at once, after as many short ones that warm up; report what a client sees, and return
    the output tokens/s.
    """
    output_tokens = min(WARM_TOKENS, sizes.output_tokens), sizes.output_tokens
    warmup, load = (
        Workload(prompts.drawn(random.Random(seed), [(sizes.input_tokens, most)] * concurrency), concurrency)
        for seed, most in enumerate(output_tokens)
    )
    began = engine_counts(served.url, 0.0)
    served.measure(warmup)
    before = engine_counts(served.url, began[TOKENS] + warmup.output_tokens)
    summary = report.summarize(served.measure(load))
    after = engine_counts(served.url, before[TOKENS] + load.output_tokens)
    steps, step_s = (after[key] - before[key] for key in (STEPS, STEP_SECONDS))
    tell(
        name,
        ok=summary.output_tokens == load.output_tokens,
        output_tokens_per_s=summary.output_tokens_per_s,
        duration_s=summary.duration_s,
        ttft_ms=summary.ttft_ms.p50,
        itl_ms=summary.itl_ms.p50,
        itl_p99_ms=summary.itl_ms.p99,
        steps=int(steps),
        step_ms=step_s / steps * 1000 if steps else None,
        pipeline_share=1 - step_s / summary.duration_s,
    )
    return summary.output_tokens_per_s


def engine_counts(url: str, least_tokens: float) -> dict[str, float]:
    """Return what the engine has counted once that is *least_tokens*: its counts reach /metrics a second later.

    Raises:
        RuntimeError: They did not come.
    """
    deadline_s = time.monotonic() + METRICS_TIMEOUT_S
    while time.monotonic() < deadline_s:
        counts = dict.fromkeys((STEP_SECONDS, STEPS, TOKENS), 0.0)
        with urllib.request.urlopen(f"{url}/metrics", timeout=METRICS_TIMEOUT_S) as answer:
            for line in answer.read().decode().splitlines():
                name, _, value = line.partition("{")
                if name in counts:
                    counts[name] += float(value.rpartition(" ")[2])
        if counts[TOKENS] >= least_tokens:
            return counts
        time.sleep(0.1)
    raise RuntimeError(f"/metrics counts {counts[TOKENS]:.0f} tokens where the engine made {least_tokens:.0f}")
