"""Does today's path compute on this device what transformers computes, and do its attention backends what they should?

Six families of small random models: in float32 the greedy tokens are those of transformers on the same device; in
bfloat16 the logits are as near to float64 as those of transformers. Attention is held against a dense computation in
float64, on shuffled pages amid NaN.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ops.bench.gpu.pages import largest_error, make_case
from ops.bench.gpu.phase import Report, Scale, Skip, attempt
from pipeline.events import SamplingParams
from stages.generate.attention import ATTENTION, AttentionShape
from stages.generate.attention.flashinfer import why_not
from stages.generate.forward.engine import Engine
from stages.generate.kvcache import make_cache
from stages.generate.model.checkpoint import check_folder
from stages.generate.schedule.plan import BatchPlan, PlanRow, Sample
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Identity, Schedule, ScheduleLimits

if TYPE_CHECKING:
    from support.checkpoints import Family

# V = vocabulary, N = tokens of a prompt, R = rows that sample

PAGE_SIZE: Final = 16
NUM_PAGES: Final = 64
CONTEXT: Final = 160
PROMPT_LENGTHS: Final = (61, 23, 1)
NUM_TOKENS: Final = {"toy": 6, "small": 12, "full": 24}
NUM_FAMILIES: Final = {"toy": 1, "small": 6, "full": 6}
LEAST_GAP: Final = 1e-3
"""Where the two best logits are nearer to each other, rounding may choose between them."""
PREFIX_LENGTHS: Final = (5, 17, 24, 33, 40, 49, 56, 60)
"""Of a prompt: where logits in bfloat16 are compared."""
FI_HEAD_DIM: Final = 64
"""The families have a smaller head_dim, which FlashInfer does not know."""
PLANS: Final = 3
"""From the third one on, FlashInfer's short plan is used for decode rows."""
WORST_RATIO: Final = 2.0
"""Our error in bfloat16 may be so many times that of transformers."""
TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Of attention, whose values are normally distributed."""
MIXED_ROWS: Final = ((70, 1), (3, 1), (0, 1), (1, 1), (300, 1), (0, 9), (16, 5), (15, 17), (64, 64), (40, 270))
"""(start, number of new tokens): decode rows and chunks."""
GREEDY: Final = SamplingParams(temperature=0)


@dataclass(frozen=True, slots=True)
class _Attended:
    """What an attention backend is tried on."""

    shape: AttentionShape
    rows: tuple[tuple[int, int], ...]


def run(scale: Scale, report: Report) -> None:
    """Report parity of attention, then of each family."""
    device = torch.device(scale.device)
    if device.type == "cuda":
        report(
            "float32 products", ok=not torch.backends.cuda.matmul.allow_tf32, tf32=torch.backends.cuda.matmul.allow_tf32
        )
    for name in _backends(device):
        for dtype in (torch.float32, torch.bfloat16):
            for page_size in (16, 64):
                item = f"attention {name} {_short(dtype)} pages of {page_size}"
                with attempt(report, item):
                    _require(name, AttentionShape(4, 2, FI_HEAD_DIM, page_size, 0, dtype, device))
                    check_attention(report, item, name, dtype, page_size, device, scale.size)
    with attempt(report, "checkpoints"), tempfile.TemporaryDirectory() as parent:
        from support.checkpoints import FAMILIES
        from transformers.utils import logging

        logging.disable_progress_bar()
        for family in FAMILIES[-NUM_FAMILIES[scale.size] :]:
            with attempt(report, f"{family} checkpoint"):
                folder = _make(Path(parent), family)
                for name in _backends(device):
                    item = f"{family} bfloat16 {name}"
                    if name == "fi":
                        with attempt(report, item):
                            _require(name, AttentionShape(4, 2, FI_HEAD_DIM, PAGE_SIZE, 0, torch.bfloat16, device))
                            _check_logits(report, item, _make(Path(parent), family, FI_HEAD_DIM), name, device)
                        continue
                    with attempt(report, f"{family} float32 {name}"):
                        _check_tokens(report, f"{family} float32 {name}", folder, name, device, NUM_TOKENS[scale.size])
                    with attempt(report, item):
                        _check_logits(report, item, folder, name, device)


def _backends(device: torch.device) -> list[str]:
    """Return the attention backends of this device, but for fa,fi: its kernels would have to be compiled, too."""
    return [name for name in ATTENTION if name != "fa,fi" and (device.type != "cpu" or name != "fi")]


def _require(name: str, shape: AttentionShape) -> None:
    """Raise Skip where the backend cannot compute *shape* here."""
    if name == "fi" and (reason := why_not(shape)):
        raise Skip(reason)


def _make(parent: Path, family: Family, head_dim: int | None = None) -> Path:
    from support.checkpoints import make_checkpoint

    folder = parent / f"{family}-{head_dim or 'own'}"
    return make_checkpoint(folder, family, seed=2 if family == "qwen2" else 0, head_dim=head_dim)


# attention


def _cases(page_size: int, size: str) -> list[_Attended]:
    """Grouped queries, one head for all, odd sizes; windows shorter than a page, than a row, and longer than all."""
    rows = MIXED_ROWS if size != "toy" else MIXED_ROWS[:8]
    shapes = [(8, 2, 64, 0), (16, 8, 128, 0), (6, 3, 24, 7), (4, 1, 128, 100), (8, 8, 64, 1000)]
    cases = [_Attended(AttentionShape(*shape[:3], page_size, shape[3]), rows) for shape in shapes]
    only_decode = tuple(row for row in MIXED_ROWS if row[1] == 1)
    return [*cases, _Attended(AttentionShape(16, 8, 128, page_size, 24), only_decode)]


def check_attention(
    report: Report, item: str, name: str, dtype: torch.dtype, page_size: int, device: torch.device, size: str
) -> None:
    worst, stored = 0.0, True
    for number, attended in enumerate(_cases(page_size, size)):
        shape = replace(attended.shape, dtype=dtype, device=device)
        if name == "fi" and why_not(shape):
            continue  # a head_dim that it does not know
        case = make_case(shape, attended.rows, dtype, device, seed=100 * number)
        attention = ATTENTION[name](case.shape)
        for _ in range(PLANS if name == "fi" else 1):
            with torch.inference_mode():
                output = attention.plan(case.batch)(case.q_THD, case.k_TKD, case.v_TKD, case.kv_2PKSD)
            error = largest_error(output, case.expected())
            worst = error if error != error else max(worst, error)
        stored = stored and bool(torch.equal(case.kv_2PKSD.nan_to_num(-99), case.filled_pages().nan_to_num(-99)))
        if worst != worst:
            break
    report(
        item,
        ok=worst <= TOLERANCE[dtype] and stored,
        largest_error=None if worst != worst else worst,
        is_nan=worst != worst,
        pages_as_expected=stored,
    )


# greedy tokens in float32


def _check_tokens(report: Report, item: str, folder: Path, name: str, device: torch.device, num_tokens: int) -> None:
    """Compare the tokens of three prompts: each alone and whole, each alone in chunks of 7, and all in one batch."""
    began_s = time.perf_counter()
    prompts = _prompts(folder)
    theirs, smallest_gap = _greedy_of_transformers(folder, prompts, num_tokens, device)
    theirs_s = time.perf_counter() - began_s
    ours = {
        "whole": [_greedy(folder, name, device, [prompt], num_tokens, 64)[0] for prompt in prompts],
        "in chunks": [_greedy(folder, name, device, [prompt], num_tokens, 7)[0] for prompt in prompts],
        "in a batch": _greedy(folder, name, device, prompts, num_tokens, 32),
    }
    differ = {way: _first_difference(tokens, theirs) for way, tokens in ours.items()}
    report(
        item,
        ok=not any(differ.values()),
        differs=", ".join(f"{way}: {where}" for way, where in differ.items() if where) or "nowhere",
        smallest_gap=smallest_gap,
        clear=smallest_gap > LEAST_GAP,
        tokens=sum(map(len, theirs)),
        distinct_tokens=len({token for row in theirs for token in row}),
        seconds=time.perf_counter() - began_s,
        transformers_s=theirs_s,
    )


def _prompts(folder: Path) -> list[list[int]]:
    vocab_size = check_folder(folder).vocab_size
    return [random.Random(length).choices(range(4, vocab_size), k=length) for length in PROMPT_LENGTHS]


def _first_difference(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> str:
    for row, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        for place, pair in enumerate(zip(one, other, strict=True)):
            if pair[0] != pair[1]:
                return f"prompt {row} token {place}: {pair[0]} instead of {pair[1]}"
    return ""


def _greedy(
    folder: Path, name: str, device: torch.device, prompts: Sequence[Sequence[int]], num_tokens: int, budget: int
) -> list[list[int]]:
    """Return what the engine's own schedule and forward pass make of *prompts*, prefilled *budget* tokens at a time."""
    engine = _engine(folder, name, torch.float32, device)
    limits = ScheduleLimits(CONTEXT, budget, min(budget, 16), 8, vocab_size=check_folder(folder).vocab_size)
    schedule = Schedule(make_cache("radix", NUM_PAGES, PAGE_SIZE), limits, [], Identity("generate-0", 1, "f"))
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        refused = schedule.add(NewRequest(str(number), tuple(prompt), (), params))
        assert refused is None, refused
    tokens: list[list[int]] = [[] for _ in prompts]
    while (planned := schedule.plan()) is not None:
        for row in schedule.complete(engine.forward(planned[0]).token_ids):
            tokens[int(row.uid)].append(row.token)
    return tokens


def _engine(folder: Path, name: str, dtype: torch.dtype, device: torch.device) -> Engine:
    """Return an engine whose unused memory is NaN, so that a read of it shows."""
    engine = Engine(
        check_folder(folder),
        folder,
        device=device,
        dtype=dtype,
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_running_requests=8,
        max_seq_len=CONTEXT,
        attention=name,
    )
    engine.kv_L2PKSD.fill_(float("nan"))
    return engine


def _greedy_of_transformers(
    folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int, device: torch.device
) -> tuple[list[list[int]], float]:
    """Return its greedy tokens, and the smallest gap between the two best logits."""
    model = _model(folder, torch.float32, device)
    rows, smallest_gap = [], float("inf")
    for prompt in prompts:
        tokens: list[int] = []
        for _ in range(num_tokens):
            best = _logits_of(model, [*prompt, *tokens], device)[-1].topk(2)
            smallest_gap = min(smallest_gap, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
        rows.append(tokens)
    return rows, smallest_gap


def _model(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the default one multiplies in some dtypes alone
    return model.to(device).eval()


def _logits_of(model: Any, tokens: Sequence[int], device: torch.device) -> Tensor:
    with torch.inference_mode():
        logits_NV: Tensor = model(torch.tensor([list(tokens)], device=device)).logits[0]
    return logits_NV


# logits in bfloat16


def _check_logits(report: Report, item: str, folder: Path, name: str, device: torch.device) -> None:
    """Compare the distance from float64, of weights in bfloat16, with that of transformers in bfloat16.

    The median over the positions counts: a router of experts that is undecided may turn with any rounding.
    """
    prompt = _prompts(folder)[0]
    places = [length - 1 for length in PREFIX_LENGTHS] + list(PREFIX_LENGTHS)
    exact_RV = _logits_of(_model(folder, torch.bfloat16, device).double(), prompt, device)[places]
    theirs_RV = _logits_of(_model(folder, torch.bfloat16, device), prompt, device)[places]
    ours_RV = _prefill_and_decode(_engine(folder, name, torch.bfloat16, device), prompt)
    ours, theirs = (_distance(logits_RV, exact_RV) for logits_RV in (ours_RV, theirs_RV))
    prefill, decode = slice(0, len(PREFIX_LENGTHS)), slice(len(PREFIX_LENGTHS), None)
    worst = max(float(ours[part].median()) / float(theirs[part].median()) for part in (prefill, decode))
    report(
        item,
        ok=worst <= WORST_RATIO and bool(ours.isfinite().all()),
        ratio=worst if worst == worst else None,
        ours_prefill=_number(ours[prefill]),
        ours_decode=_number(ours[decode]),
        transformers=_number(theirs),
    )


def _prefill_and_decode(engine: Engine, prompt: Sequence[int]) -> Tensor:
    """Return the logits after each prefix, in one step of prefill, and after one token more, in one step of decode."""
    rows, first_page = [], 0
    for table, length in enumerate(PREFIX_LENGTHS):
        pages = tuple(range(first_page, first_page + length // PAGE_SIZE + 1))
        first_page += len(pages)
        sample = Sample(GREEDY, length, ())
        rows.append(PlanRow(table, 0, tuple(prompt[:length]), pages, 0, sample))
    prefill_RV = engine.logits(BatchPlan(0, tuple(rows), 0))
    following = tuple(
        PlanRow(table, length, (prompt[length],), (), 0, Sample(GREEDY, length + 1, ()))
        for table, length in enumerate(PREFIX_LENGTHS)
    )
    return torch.cat((prefill_RV, engine.logits(BatchPlan(1, following, len(following)))))


def _distance(logits_RV: Tensor, exact_RV: Tensor) -> Tensor:
    """Return, for each row, ||logits - exact|| / ||exact||."""
    exact_RV = exact_RV.double()
    distance_R: Tensor = (logits_RV.double() - exact_RV).norm(dim=-1) / exact_RV.norm(dim=-1)
    return distance_R


def _number(errors_R: Tensor) -> float | None:
    median = float(errors_R.median())
    return median if median == median else None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
