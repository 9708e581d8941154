"""What a CUDA graph does for a decode step of our decoder: is a replay the eager step, and how much time does it save?

Three kinds of attention are tried. Today's reference takes its lengths from the host, so a graph of it serves the
lengths that it was recorded with. The one written here takes them from a tensor, and so does FlashInfer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from ops.bench.gpu import flashinfer as fi
from ops.bench.gpu.capture import capture
from ops.bench.gpu.pages import make_plan
from ops.bench.gpu.phase import Report, Scale, Skip, attempt, error_text
from ops.bench.gpu.timing import median_s, wait
from ops.bench.models import SHAPES, Shape, write_config
from pipeline.events import SamplingParams
from stages.generate.attention import Attend, AttentionShape, fused
from stages.generate.attention.flashinfer import indices_of, kernels_of, plan_decode, tools, why_not
from stages.generate.attention.reference import ReferenceAttention
from stages.generate.batch import ForwardBatch, build_batch
from stages.generate.forward.engine import Engine
from stages.generate.forward.pool import allocate
from stages.generate.forward.weights import dummy_weights
from stages.generate.kvcache import make_cache
from stages.generate.model.attention import places_of, write_pages
from stages.generate.model.decoder import Decoder
from stages.generate.model.spec import ModelSpec, read_spec
from stages.generate.schedule.request import NewRequest
from stages.generate.schedule.schedule import Identity, Schedule, ScheduleLimits

# B = decode rows, H = query heads, K = kv heads, D = head dim, P = pages, S = slots of a page, N = pages of a row,
# C = slots of them, E = hidden size

PAGE_SIZE: Final = 16
TINY: Final = Shape(64, 2, 4, 2, 16, 96, 512, 10_000.0, 4096)
TIMED: Final = {"toy": TINY, "small": Shape(256, 4, 8, 2, 64, 512, 2000, 10_000.0, 4096), "full": SHAPES["0.6b"]}
NUM_ROWS: Final = {"toy": (1, 3), "small": (1, 8), "full": (1, 32, 256)}
MOST_REFERENCE_ROWS: Final = 32
"""Today's reference launches its kernels row by row: a graph of more rows has more than 100,000."""
CONTEXT: Final = {"toy": 40, "small": 256, "full": 512}
COMPARED_ROWS: Final = 8
"""So many rows of a step are computed in float32 too."""
WORST_RATIO: Final = 2.0
"""The distance from float32 may be so many times that of the reference attention in the model's own dtype."""
FLOAT32_ERROR: Final = 1e-4
"""It may be as much in any case: where that dtype is float32, the reference has none."""
ROUNDS: Final = 5
ENGINE: Final = Shape(256, 2, 4, 2, 64, 512, 512, 10_000.0, 4096)
ENGINE_DISTANCE: Final = 2e-2
"""Of the logits in bfloat16: a padded step may be multiplied by another kernel."""


class Steps(Protocol):
    """An attention whose lengths may change after it was captured."""

    decoder: Decoder

    def load(self, batch: ForwardBatch) -> Attend:
        """Take in the pages and lengths of *batch*, and return the function that the layers call."""
        ...


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder with random weights, the same in float32, random pages; and how many rows decode at which length."""

    spec: ModelSpec
    weights: Mapping[str, Tensor]
    decoder: Decoder
    exact: Decoder
    kv_L2PKSD: Tensor
    shape: AttentionShape
    num_rows: int
    context: int

    @property
    def device(self) -> torch.device:
        """Where."""
        return self.shape.device


def run(scale: Scale, report: Report) -> None:
    """Report equality in float32 with a small model, then times."""
    device = torch.device(scale.device)
    timed_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with attempt(report, "float32"):
        model = _model(TINY, torch.float32, device, 3, CONTEXT["toy"])
        _try_reference("float32 reference attention", model, report)
        _try("float32 static attention", model, StaticAttention, report)
    with attempt(report, "decode"):
        largest = _model(TIMED[scale.size], timed_dtype, device, max(NUM_ROWS[scale.size]), CONTEXT[scale.size])
        for num_rows in NUM_ROWS[scale.size]:
            model = replace(largest, num_rows=num_rows)
            if num_rows <= MOST_REFERENCE_ROWS:
                _try_reference(f"reference attention, {num_rows} rows", model, report)
            _try(f"static attention, {num_rows} rows", model, StaticAttention, report)
            _try(f"FlashInfer, {num_rows} rows", model, FlashInferSteps, report)
            _try(f"FlashInfer in all of a layer, {num_rows} rows", model, FusedSteps, report)
    with attempt(report, "engine"):
        _try_engine("engine", device, report)


class StaticAttention:
    """Decode rows on a table of one width, in torch's own operations; whatever is beyond a length is hidden."""

    def __init__(self, model: Model) -> None:
        self._shape, self.decoder, device = model.shape, model.decoder, model.device
        num_pages = -(-model.context // model.shape.page_size)
        self._table_BN = torch.zeros(model.num_rows, num_pages, dtype=torch.long, device=device)
        self._slots_B = torch.zeros(model.num_rows, dtype=torch.long, device=device)
        self._lengths_B = torch.ones(model.num_rows, dtype=torch.long, device=device)
        self._position_C = torch.arange(num_pages * model.shape.page_size, device=device)

    def load(self, batch: ForwardBatch) -> Attend:
        """See `Steps`."""
        self._table_BN.zero_()
        self._table_BN[:, : batch.page_table_BN.shape[1]] = batch.page_table_BN
        self._slots_B.copy_(batch.slots_T)
        self._lengths_B.copy_(torch.tensor(batch.seq_lens))
        return self._attend

    def _attend(self, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor, kv_2PKSD: Tensor) -> Tensor:
        shape = self._shape
        write_pages(kv_2PKSD, k_BKD, v_BKD, places_of(self._slots_B, self._shape.page_size))
        seen_B11C = (self._position_C < self._lengths_B[:, None])[:, None, None]
        k_BKCD, v_BKCD = (self._gather(pages_PKSD) for pages_PKSD in kv_2PKSD)
        q_BKGD = q_BHD.reshape(len(q_BHD), shape.num_kv_heads, -1, shape.head_dim)
        scores_BKGC = (q_BKGD @ k_BKCD.transpose(2, 3)).float() * shape.head_dim**-0.5
        p_BKGC = scores_BKGC.masked_fill(~seen_B11C, float("-inf")).softmax(-1).to(q_BHD.dtype)
        o_BKGD: Tensor = p_BKGC @ v_BKCD
        return o_BKGD.view(q_BHD.shape)

    def _gather(self, pages_PKSD: Tensor) -> Tensor:
        """Return a row's slots one after the other; what nobody wrote is 0 instead of, perhaps, NaN."""
        return pages_PKSD[self._table_BN].transpose(1, 2).flatten(2, 3).nan_to_num()


class FlashInferSteps:
    """Decode rows by FlashInfer's wrapper in fixed buffers."""

    def __init__(self, model: Model) -> None:
        self._library, self._shape, self.decoder = _library(model.shape), model.shape, model.decoder
        workspace = torch.zeros(fi.WORKSPACE_BYTES["full"], dtype=torch.uint8, device=model.device)
        most_pages = model.num_rows * -(-model.context // model.shape.page_size)
        self._wrapper = fi.graph_wrapper(self._library, workspace, model.num_rows, most_pages)
        self._slots_B = torch.zeros(model.num_rows, dtype=torch.long, device=model.device)

    def load(self, batch: ForwardBatch) -> Attend:
        """See `Steps`."""
        self._slots_B.copy_(batch.slots_T)
        plan_decode(self._wrapper, self._shape, indices_of(batch, self._shape.page_size))
        return self._attend

    def _attend(self, q_BHD: Tensor, k_BKD: Tensor, v_BKD: Tensor, kv_2PKSD: Tensor) -> Tensor:
        self._write(k_BKD, v_BKD, kv_2PKSD)
        o_BHD: Tensor = self._wrapper.run(q_BHD.contiguous(), (kv_2PKSD[0], kv_2PKSD[1]))
        return o_BHD

    def _write(self, k_BKD: Tensor, v_BKD: Tensor, kv_2PKSD: Tensor) -> None:
        write_pages(kv_2PKSD, k_BKD, v_BKD, places_of(self._slots_B, self._shape.page_size))


class FusedSteps(FlashInferSteps):
    """The same, with FlashInfer's operations beside the attention. Each layer finds the places on the pages anew, which
    the engine does once in a step.
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._beside = fused.load(fused.descriptions(self._library), model.shape)
        if missing := [name for name in fused.MODULES if name not in self._beside.modules]:
            raise Skip(f"FlashInfer's modules {', '.join(missing)} cannot be used")
        self.decoder = Decoder(model.spec, dict(model.weights), operations=self._beside.operations)
        self._slots_B = self._slots_B.int()

    def _write(self, k_BKD: Tensor, v_BKD: Tensor, kv_2PKSD: Tensor) -> None:
        self._beside.writing(self._slots_B, self._shape.page_size)(kv_2PKSD, k_BKD, v_BKD)


def _try_engine(item: str, device: torch.device, report: Report) -> None:
    """Compute the steps of some requests with an engine that records its decode steps, and with one that does not."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(ENGINE, Path(folder))
        spec = read_spec(Path(folder))
        if reason := why_not(AttentionShape(4, 2, spec.head_dim, PAGE_SIZE, 0, torch.bfloat16, device)):
            raise Skip(reason)
        sizes = {"num_pages": 64, "page_size": PAGE_SIZE, "max_running_requests": 3, "max_seq_len": 160}
        how: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "attention": "fi", "dummy": True, **sizes}
        eager, recorded = (Engine(spec, Path(folder), graph=graph, **how) for graph in (0, 3))
    limits = ScheduleLimits(160, 40, 8, 3, vocab_size=spec.vocab_size)
    schedule = Schedule(make_cache("radix", 64, PAGE_SIZE), limits, [], Identity("generate-0", 1, "f"))
    for number, length in enumerate((5, 61, 17, 33)):
        prompt = tuple((7 * number + 3 * place) % spec.vocab_size for place in range(length))
        params = SamplingParams(temperature=0, max_tokens=6 + number, ignore_eos=True)
        assert schedule.add(NewRequest(str(number), prompt, (), params)) is None
    farthest, steps, mixed = 0.0, 0, 0
    while (planned := schedule.plan()) is not None:
        plan = planned[0]
        ours_RV, eager_RV = recorded.logits(plan), eager.logits(plan)
        if len(eager_RV):
            distance = float((ours_RV - eager_RV).norm() / eager_RV.norm())
            farthest = distance if distance != distance else max(farthest, distance)
        schedule.complete(eager_RV.argmax(-1).tolist())
        steps, mixed = steps + 1, mixed + (0 < plan.num_decode_rows < len(plan.rows))
        if farthest != farthest:
            break
    figures = {"steps": steps, "mixed_steps": mixed, "distance": farthest if farthest == farthest else None}
    report(item, ok=farthest <= ENGINE_DISTANCE, **figures)


def _library(shape: AttentionShape) -> Any:
    """Return FlashInfer, if its module for *shape* is compiled.

    Raises:
        Skip: It is not, or cannot be imported.
    """
    if reason := why_not(shape):
        raise Skip(reason)
    tools()
    library = fi.import_library()
    if not kernels_of(library, shape).is_compiled:
        raise Skip(f"the module for head_dim {shape.head_dim} is not compiled; the phase flashinfer compiles it")
    return library


def _model(shape: Shape, dtype: torch.dtype, device: torch.device, num_rows: int, context: int) -> Model:
    """Return a model with random weights, and enough random pages."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(shape, Path(folder))
        spec = read_spec(Path(folder))
    num_pages = make_plan(((context - 1, 1),) * num_rows, PAGE_SIZE)[2]
    kv_L2PKSD = allocate(spec, num_pages, PAGE_SIZE, dtype, device).normal_()
    weights = dummy_weights(spec, dtype=dtype, device=device)
    exact = Decoder(spec, {name: weight.float() for name, weight in weights.items()})
    attention = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, PAGE_SIZE, 0, dtype, device)
    return Model(spec, weights, Decoder(spec, dict(weights)), exact, kv_L2PKSD, attention, num_rows, context)


def _batches(model: Model) -> list[ForwardBatch]:
    """Return the step that is captured, and another one of as many rows."""
    context, rows = model.context, range(model.num_rows)
    lengths = [context - 1 for _ in rows], [(7 * row + context // 2) % context for row in rows]
    return [_batch(model, starts, seed) for seed, starts in enumerate(lengths)]


def _batch(model: Model, starts: Sequence[int], seed: int = 0) -> ForwardBatch:
    """Return decode rows of these lengths before the step."""
    rows = [(start, 1) for start in starts]
    plan, tables, _ = make_plan(rows, PAGE_SIZE, seed=seed, vocab_size=model.spec.vocab_size)
    tables.update(plan.rows)
    return build_batch(plan, tables, model.device)


@torch.inference_mode()
def _try_reference(item: str, model: Model, report: Report) -> None:
    """Capture a step with today's reference attention; that it cannot be captured would be no fault."""
    batch = _batches(model)[0]
    attend = ReferenceAttention(model.shape).plan(batch)
    held: dict[str, Tensor] = {}

    def step() -> None:
        held["x_BE"] = model.decoder.forward(batch, attend, model.kv_L2PKSD)

    with attempt(report, item):
        step()
        eager_BE = held["x_BE"].clone()
        eager_s = median_s(step, model.device, rounds=ROUNDS)
        try:
            captured = capture(step, model.device)
        except Skip as why:
            report(item, captured=False, skipped=str(why), eager_ms=1e3 * eager_s)
            return
        except Exception as error:  # whatever a capture does not allow
            report(item, captured=False, why=error_text(error), eager_ms=1e3 * eager_s)
            return
        captured.replay()
        wait(model.device)
        same = bool(torch.equal(held["x_BE"], eager_BE))
        replay_s = median_s(captured.replay, model.device, rounds=ROUNDS)
        report(item, ok=same, captured=True, replay_is_eager=same, eager_ms=1e3 * eager_s, replay_ms=1e3 * replay_s)


def _restorer(kv_L2PKSD: Tensor, slots_X: Tensor) -> Callable[[], None]:
    """Return what gives some slots the values back that they have now."""
    pages_X, offsets_X = places_of(slots_X, PAGE_SIZE)
    saved = kv_L2PKSD[:, :, pages_X, :, offsets_X].clone()

    def restore() -> None:
        kv_L2PKSD[:, :, pages_X, :, offsets_X] = saved

    return restore


def _distances(model: Model, batch: ForwardBatch, eager_BE: Tensor) -> tuple[float, float]:
    """Return how far *eager_BE*, and a step with the reference attention, are from float32: of COMPARED_ROWS rows."""
    num = min(COMPARED_ROWS, len(batch.seq_lens))
    pages_X: Tensor = batch.page_table_BN[:num].unique().long()  # type: ignore[no-untyped-call]
    pages_B, offsets_B = places_of(batch.slots_T[:num].long(), PAGE_SIZE)
    few = replace(
        batch,
        token_ids_T=batch.token_ids_T[:num],
        positions_T=batch.positions_T[:num],
        slots_T=torch.searchsorted(pages_X, pages_B) * PAGE_SIZE + offsets_B,
        query_starts=batch.query_starts[: num + 1],
        seq_lens=batch.seq_lens[:num],
        page_table_BN=torch.searchsorted(pages_X, batch.page_table_BN[:num].long()).int(),
        num_decode_rows=num,
    )
    kv_L2XKSD = model.kv_L2PKSD[:, :, pages_X]
    exact_BE = model.exact.forward(few, ReferenceAttention(model.shape).plan(few), kv_L2XKSD.float())
    reference_BE = model.decoder.forward(few, ReferenceAttention(model.shape).plan(few), kv_L2XKSD)
    ours, reference = (float((x_BE - exact_BE).norm() / exact_BE.norm()) for x_BE in (eager_BE[:num], reference_BE))
    return ours, reference


def _try(item: str, model: Model, make: Callable[[Model], Steps], report: Report) -> None:
    with attempt(report, item), torch.inference_mode():
        _try_steps(item, model, make(model), report)


def _try_steps(item: str, model: Model, steps: Steps, report: Report) -> None:
    """Capture a step, replay it on its lengths and on others; compare with eager steps, and with float32."""
    batches, device = _batches(model), model.device
    static = batches[0]
    token_ids_B, positions_B = static.token_ids_T.clone(), static.positions_T.clone()
    attend = steps.load(static)
    held: dict[str, Tensor] = {}
    batch = replace(static, token_ids_T=token_ids_B, positions_T=positions_B)  # what a graph reads

    def step() -> None:
        held["x_BE"] = steps.decoder.forward(batch, attend, model.kv_L2PKSD)

    restore = _restorer(model.kv_L2PKSD, torch.cat([which.slots_T for which in batches]))

    def load(which: ForwardBatch) -> None:
        restore()  # what another batch wrote is what this one reads
        token_ids_B.copy_(which.token_ids_T)
        positions_B.copy_(which.positions_T)
        steps.load(which)

    eager, errors, right = [], [], True
    for which in batches:
        load(which)
        step()
        eager.append(held["x_BE"].clone())
        restore()
        ours, reference = _distances(model, which, eager[-1])
        errors.append((ours, reference))
        right = right and ours <= max(WORST_RATIO * reference, FLOAT32_ERROR)
    ours, reference = max(errors)
    figures: dict[str, object] = {"distance": ours if ours == ours else None, "distance_of_reference": reference}
    load(static)
    eager_s = median_s(step, device, rounds=ROUNDS)
    eager_figures = {"eager_ms": 1e3 * eager_s, "eager_tokens_per_s": model.num_rows / eager_s}
    try:
        captured = capture(step, device)
    except Skip as why:
        report(item, ok=right, captured=False, why=str(why), **figures, **eager_figures)
        return
    same, apart = [], 0.0
    for which, eager_BE in zip(batches, eager, strict=True):
        load(which)
        captured.replay()
        wait(device)
        same.append(bool(torch.equal(held["x_BE"], eager_BE)))
        apart = max(apart, float((held["x_BE"] - eager_BE).abs().nan_to_num(1e9).max()))
    load(static)
    replay_s = median_s(captured.replay, device, rounds=ROUNDS)
    report(
        item,
        ok=right and all(same),
        captured=True,
        replay_is_eager=same[0],
        replay_is_eager_at_other_lengths=same[1],
        replay_minus_eager=apart,
        replay_ms=1e3 * replay_s,
        replay_tokens_per_s=model.num_rows / replay_s,
        **eager_figures,
        **figures,
    )
