"""Phase `fa`: `--attn fa,fi`, FlashInfer's kernels for Hopper, on chunks: compiled here, held against float64, and
timed beside those of `fi`.
"""

from __future__ import annotations

import time
from typing import Final

import torch

from ops.bench.gpu.pages import largest_error, make_case
from ops.bench.gpu.parity import MIXED_ROWS, PLANS, TOLERANCE
from ops.bench.gpu.phase import Report, Scale, Skip, attempt
from ops.bench.gpu.timing import median_s
from stages.generate.attention import ATTENTION, AttentionShape
from stages.generate.attention.flashinfer import why_not

HEADS: Final = (16, 8, 128)
"""Query heads, kv heads, head dim: one module, because each takes a minute to compile."""
PAGE_SIZE: Final = 16
CHUNKS: Final = {"toy": (0, 32), "small": (0, 256), "full": (0, 4096)}


def run(scale: Scale, report: Report) -> None:
    """Report compilation, correctness and time.

    Raises:
        Skip: This machine cannot use them.
    """
    device = torch.device(scale.device)
    shape = AttentionShape(*HEADS, PAGE_SIZE, 0, torch.bfloat16, device)
    if reason := why_not(shape, "fa3"):
        raise Skip(reason)
    began_s = time.perf_counter()
    attention = ATTENTION["fa,fi"](shape)
    report("kernels", seconds=time.perf_counter() - began_s)
    with attempt(report, "chunks and decode rows"), torch.inference_mode():
        worst = 0.0
        for seed in range(PLANS):
            case = make_case(shape, MIXED_ROWS, torch.bfloat16, device, seed=1000 * seed)
            output = attention.plan(case.batch)(case.q_THD, case.k_TKD, case.v_TKD, case.kv_2PKSD)
            error = largest_error(output, case.expected())
            worst = error if error != error else max(worst, error)
        found = None if worst != worst else worst
        report("chunks and decode rows", ok=worst <= TOLERANCE[torch.bfloat16], largest_error=found)
    case = make_case(shape, (CHUNKS[scale.size],), torch.bfloat16, device)
    times = {}
    for name in ("fa,fi", "fi"):
        with attempt(report, name), torch.inference_mode():
            attend = ATTENTION[name](shape).plan(case.batch)
            times[name] = median_s(lambda: attend(case.q_THD, case.k_TKD, case.v_TKD, case.kv_2PKSD), device)  # noqa: B023
            report(f"{name}: chunk of {CHUNKS[scale.size][1]} tokens", us=1e6 * times[name])
