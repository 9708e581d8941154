"""From a `BatchPlan` to token ids. Holds the weights, KV pages and page tables of one rank; no Redis, no schedule.

A step begins with `launch` and ends with `wait`. Its tokens are drawn at the launch of the next step, or at `wait`:
only then are all tokens before them known, which penalties and bad words need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice, product
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import structlog
import torch
from torch import Tensor

from pipeline.errors import ConfigError, DeviceFull
from pipeline.events import SamplingParams
from stages.generate.attention import ATTENTION, WITH_SINKS, Attention
from stages.generate.attention.flashinfer import FlashInferAttention
from stages.generate.attention.fused import IN_TORCH, Beside
from stages.generate.batch import HostBatch, PageTables, build_batch, copied, fill_in, host_batch, on_device, parted
from stages.generate.collectives import ALONE, Collectives
from stages.generate.forward.gguf_weights import load_blocks, load_gguf
from stages.generate.forward.gpu_memory import bytes_of_a_step, fitting_pages, largest_decode, largest_prefill
from stages.generate.forward.graphs import DecodeGraphs
from stages.generate.forward.pool import allocate, page_bytes
from stages.generate.forward.step_graphs import StepGraphs, prompt_sizes
from stages.generate.forward.weights import Progress, dummy_weights, load_weights
from stages.generate.model.attention import attention_shape, plan_all
from stages.generate.model.by_transformers import ForeignDecoder, tried_tokens
from stages.generate.model.checkpoint import EMBEDDING, HEAD, USUAL
from stages.generate.model.compiled import KernelDecoder
from stages.generate.model.decoder import Decoder
from stages.generate.model.layers.blocks import BLOCK_ROWS
from stages.generate.model.layers.linear import can_pack, pack
from stages.generate.model.layers.operations import Operations
from stages.generate.model.spec import ROUNDED, Loading, ModelSpec
from stages.generate.sampling.masks import mask_of
from stages.generate.sampling.sampler import AGAIN, best, choose, draw, draw_again, is_drawn_again
from stages.generate.sampling.scores import blocks_of, score
from stages.generate.schedule.plan import BatchPlan, Computed, PlanRow, Sample, Words
from stages.generate.schedule.request import MANY_STREAMS

# T = packed tokens, B = rows of the batch, R = rows that sample, E = hidden size, V = vocabulary

LIMITS: Final[Sequence[dict[str, Any]]] = ({}, {"top_k": 2}, {"top_k": 1000}, {"top_p": 0.5})
"""Parameters for which drawing needs all its kernels."""
ERROR_CHARS: Final = 300
"""Largest length of CUDA's message in an error: it may be a page."""

logger = structlog.get_logger()


class Computer(Protocol):
    """Computes the layers: torch, or the kernels for CPUs."""

    def forward(
        self, plan: BatchPlan, tables: PageTables, kv_L2PKSD: Tensor, last_R: Tensor | None
    ) -> tuple[Tensor, Sequence[int]]:
        """Compute one step; return x_TE, the last layer's output for each token, and B + 1 numbers: where in T each row
        begins.

        *last_R*: the tokens that the step before sampled, for the placeholders of *plan*.
        """
        ...

    @property
    def takes_masks(self) -> bool:
        """Whether `head` accepts masks."""
        ...

    def head(
        self, x_TE: Tensor, rows_R: Sequence[int], wanted_R: Sequence[bool], masks_R: Sequence[Words | None] = ()
    ) -> tuple[Tensor, Tensor]:
        """Return tokens_R, int64: `best` tokens after *rows_R* of x_TE, or NOT_A_NUMBER; logits_RV, float32, unmasked.

        With a mask, a row's token is the best one that the mask allows. It is NOT_A_NUMBER if it is that without the
        mask, or if the mask allows no token. Of the logits, only the wanted rows may be read.
        """
        ...

    def logits(self, x_NE: Tensor) -> Tensor:
        """Return logits_NV, float32, of some tokens that `forward` returned."""
        ...


class TorchComputer:
    """The decoder and the attention in torch."""

    def __init__(
        self,
        decoder: Decoder | ForeignDecoder,
        attentions: Sequence[Attention],
        device: torch.device,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """*attentions*: of each kind of layer; the same object for kinds with equal ones. *graphs*: of decode rows. A
        step's decode rows are then computed before its chunks: a chunk may read a page that a decode row fills in the
        same step.
        """
        self._decoder, self._attentions, self._device, self._graphs = decoder, attentions, device, graphs

    def forward(
        self, plan: BatchPlan, tables: PageTables, kv_L2PKSD: Tensor, last_R: Tensor | None
    ) -> tuple[Tensor, Sequence[int]]:
        """See `Computer`."""
        batch = host_batch(plan, tables)
        if self._graphs is not None and 0 < batch.num_decode_rows < len(batch.seq_lens):
            decode, chunks = parted(batch)
            if self._graphs.records(decode):
                parts = (self._layers(decode, kv_L2PKSD, last_R), self._layers(chunks, kv_L2PKSD, None))
                return torch.cat(parts), batch.query_starts
        return self._layers(batch, kv_L2PKSD, last_R), batch.query_starts

    def _layers(self, of_host: HostBatch, kv_L2PKSD: Tensor, last_R: Tensor | None) -> Tensor:
        if self._graphs is not None and self._graphs.records(of_host):
            return self._graphs.forward(of_host, last_R)
        batch = copied(of_host, self._device)
        if last_R is not None:
            fill_in(batch.token_ids_T, last_R)
        return self._decoder.forward(batch, plan_all(self._attentions, batch), kv_L2PKSD)

    @property
    def takes_masks(self) -> bool:
        """See `Computer`."""
        return False

    def head(
        self, x_TE: Tensor, rows_R: Sequence[int], wanted_R: Sequence[bool], masks_R: Sequence[Words | None] = ()
    ) -> tuple[Tensor, Tensor]:
        """See `Computer`. All rows may be read."""
        assert not masks_R, "`takes_masks` says so"
        logits_RV = self.head_logits(x_TE, rows_R).float()
        return best(logits_RV), logits_RV

    def head_logits(self, x_TE: Tensor, rows_R: Sequence[int]) -> Tensor:
        """Return logits_RV after *rows_R* of x_TE, in the dtype in which the head computes them."""
        are_all = len(rows_R) == len(x_TE)  # as in a step of decode rows
        x_RE = x_TE if are_all else x_TE[on_device(np.array(rows_R, np.int64), self._device)]
        return self._decoder.head_logits(x_RE)

    def logits(self, x_NE: Tensor) -> Tensor:
        """See `Computer`."""
        return self._decoder.logits(x_NE)


class ToHost:
    """Numbers on their way from the device. Reading them waits for nothing that was launched after them."""

    def __init__(self, numbers_R: Tensor) -> None:
        self._numbers_R, self._event = numbers_R, None
        if numbers_R.is_cuda:
            pinned_R = torch.empty(numbers_R.shape, dtype=numbers_R.dtype, pin_memory=True)
            self._numbers_R = pinned_R.copy_(numbers_R, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(numbers_R.device))

    def tolist(self) -> list[int]:
        """Wait for the numbers and return them."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._numbers_R.tolist()
        return numbers


@dataclass(slots=True, eq=False)
class Launched:
    """A step that was launched."""

    plan: BatchPlan
    x_TE: Tensor
    starts: Sequence[int]
    """Where in T each row begins, see `Computer.forward`."""
    tokens_R: Tensor | None = None
    """Drawn tokens on the device, each a token, NOT_A_NUMBER or AGAIN; None: not drawn."""
    logits_RV: Tensor | None = None
    """Logits from which the tokens were drawn; None: not drawn."""
    told_R: ToHost | None = None
    """Drawn tokens, on their way to the host; None: not drawn."""
    token_ids: list[int] | None = None
    """Tokens on the host, none of them AGAIN; None: not read."""
    own_RV: Tensor | None = None
    """The model's own logits, if scores are asked for and tokens were drawn from changed logits."""
    following: Launched | None = None
    """Step that was launched with the tokens of this one."""

    @property
    def is_drawn(self) -> bool:
        """Whether the tokens are drawn."""
        return self.told_R is not None


@contextmanager
def names_a_full_device() -> Iterator[None]:
    """Raise DeviceFull if torch finds no memory on the device."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceFull(str(error).partition(" If reserved but")[0]) from error


class Engine:
    """A loaded model."""

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        num_pages: int,
        page_size: int,
        max_running_requests: int,
        max_seq_len: int,
        max_prefill_length: int = 8192,
        most_drafts: int = 0,
        attention: str = "reference",
        kernels: str = "torch",
        quantization: str = "none",
        threads: int = 0,
        graph: int = 0,
        needs_graph: bool = True,
        deterministic: bool = False,
        fused: bool = True,
        gpu_new: bool = False,
        fixed_products: bool = False,
        has_parts: bool = False,
        memory_ratio: float | None = None,
        loading: Loading = USUAL,
        collectives: Collectives = ALONE,
        progress: Progress = lambda done_bytes, total_bytes: None,
    ) -> None:
        """Load the weights of the checked *folder* and allocate the pages.

        *threads* 0 leaves torch's number. *kernels* is torch, or a variant that this machine can use. With a variant,
        *attention* is ignored, *quantization* may be int8, int4 or the formats of GGUF files, and torch itself gets one
        thread, because its sums depend on the number. *loading* may ask for random weights; they need only config.json.

        *memory_ratio*: on a GPU, compute the largest steps first, and give the pages this share of the memory that is
        left beside them, at most for *num_pages*. `num_pages` has the result. *max_prefill_length*: of these steps, and
        of those that are recorded. *most_drafts*: of a request in a step.

        *graph*: record decode steps of up to this many rows as CUDA graphs; *attention* must be FlashInfer's. If that
        fails, the steps are computed without graphs, unless the engine *needs_graph*. `graph` has the result.

        *deterministic*: torch computes the same bits for a token in any batch.

        *fused*: where FlashInfer computes the attention, its operations also compute the rest of a layer if they can,
        unless the engine is deterministic without *fixed_products*. `fused` has the modules of FlashInfer that compute.

        *gpu_new*: use what no GPU has run yet. *fixed_products*: see `Settings`.

        *has_parts*: pages have the parts of `ModelSpec.page_parts`; only with a variant of the kernels.

        With *collectives* of several ranks, this engine loads and computes a part of the model. When rank 0 calls
        `forward`, or `logits` for a plan that scores no prompt, the others call `follow` with the same plan.

        Raises:
            ConfigError: The model cannot be divided among so many ranks, no page fits, or no graph can be recorded.
        """
        if threads:
            torch.set_num_threads(threads)
        self._threads = threads = torch.get_num_threads()
        self._gpu_new, self._max_prefill_length = gpu_new, max_prefill_length
        self._most_step_rows = max(max_running_requests, MANY_STREAMS * (1 + most_drafts))
        self.device, self.dtype = device, dtype
        self._collectives, self._vocab_size = collectives, spec.vocab_size
        if gpu_new:
            self._try_drawing()
        spec = spec.at(max_seq_len)
        packed = kernels != "torch" or packs(device, dtype)
        shard = spec.sharded(collectives.rank, collectives.size, quantization)
        if spec.by == "transformers":
            weights: dict[str, Any] = {}
        elif quantization not in ("none", *ROUNDED):
            weights = dict(load_blocks(spec, folder, shard=shard, progress=progress))
        else:
            load = _loader(spec, folder, dummy=loading.dummy, map_tied=packed)
            weights = load(spec, dtype=self.dtype, device=self.device, shard=shard, progress=progress)
        parts = shard.page_parts() if has_parts else ()
        self._tables = PageTables(max_running_requests, max_seq_len, page_size, max(len(parts), 1))
        self.num_pages = num_pages
        self.fused: tuple[str, ...] = ()
        """Modules of FlashInfer that compute parts of the layers."""
        self._computer: Computer
        if spec.by == "transformers":
            foreign = ForeignDecoder(spec, folder, loading, dtype, device)
            attentions = self._attentions_of(foreign, attention, page_size)
            self._try(foreign, attentions, page_size)
            self._computer = TorchComputer(foreign, attentions, device)
            if memory_ratio is not None:
                self._measure(spec, memory_ratio, graphs=False)
            progress(1, 1)
        elif kernels != "torch":
            self._computer = KernelDecoder(
                shard,
                weights,
                variant=kernels,
                quantization=quantization,
                threads=threads,
                collectives=collectives,
                parts=parts,
            )
            torch.set_num_threads(1)
        else:
            if packed:
                pack_weights(weights)
            of_window = {}
            for window in dict.fromkeys(kind.window for kind in spec.kinds):
                shape = attention_shape(shard, page_size, dtype, device, window)
                by_modules = fused and (fixed_products or not deterministic)
                shape = replace(shape, deterministic=deterministic, fused=by_modules, new=gpu_new)
                of_window[window] = ATTENTION[attention](shape)
            backends = [of_window[kind.window] for kind in spec.kinds]
            backend = backends[0]
            beside = backend.beside if isinstance(backend, FlashInferAttention) else IN_TORCH
            self.fused = beside.modules
            operations = beside.operations
            if gpu_new:
                operations = _new_operations(beside, dtype, fixed_products=fixed_products)
            decoder = Decoder(shard, weights, collectives, BLOCK_ROWS if deterministic else 0, operations)
            self._computer = TorchComputer(decoder, backends, device)
            if memory_ratio is not None:
                self._measure(shard, memory_ratio, graphs=graph > 0)
        self.kv_L2PKSD = allocate(shard, self.num_pages + (graph > 0), page_size, self.dtype, self.device, parts)
        self.graph = 0
        """Largest number of rows of a recorded decode step; 0: none is recorded."""
        if graph:
            assert isinstance(backend, FlashInferAttention), f"attention {attention} cannot be recorded"
            assert fixed_products or not deterministic, "its plans are not for graphs"
            graphs = self._recorded(decoder, backend, graph, needed=needs_graph)
            if graphs is not None:
                self.graph = graph
                self._computer = TorchComputer(decoder, backends, device, graphs)

    def _attentions_of(self, foreign: ForeignDecoder, name: str, page_size: int) -> list[Attention]:
        """Return the attention of each layer of a model that transformers computes; equal ones are one object."""
        if foreign.has_sinks and name not in WITH_SINKS:
            logger.warning(
                "attention_is_slow", attention="torch", reason=f"{name} knows no sinks, which this model has"
            )
            name = "torch"
        shapes = [replace(shape, page_size=page_size, dtype=self.dtype, device=self.device) for shape in foreign.shapes]
        made = {shape: ATTENTION[name](shape) for shape in dict.fromkeys(shapes)}
        return [made[shape] for shape in shapes]

    @torch.inference_mode()
    def _try(self, foreign: ForeignDecoder, attentions: Sequence[Attention], page_size: int) -> None:
        """Compute the rows of the trial in two steps, the later one on pages of the first, and compare the result."""
        every = tried_tokens(self._vocab_size).values()
        num_pages = [-(-len(tokens) // page_size) for tokens in every]
        firsts = [*accumulate(num_pages, initial=0)]
        tables = PageTables(len(num_pages), max(num_pages) * page_size, page_size)
        kv_L2PKSD = allocate(foreign.spec, firsts[-1], page_size, self.dtype, self.device)
        kv_L2PKSD.fill_(float("nan"))  # whatever reads a slot that was not written is found out
        batches = []
        for step in range(2):
            rows = []
            for table, tokens in enumerate(every):
                half = len(tokens) // 2
                pages = tuple(range(firsts[table], firsts[table + 1])) if step == 0 else ()
                part = tuple(tokens[half:] if step else tokens[:half])
                rows.append(PlanRow(table, half if step else 0, part, pages, 0, None))
            plan = BatchPlan(step, tuple(rows), 0)
            tables.update(plan.rows)
            batches.append(build_batch(plan, tables, self.device))
        foreign.check_against_transformers(attentions, batches, kv_L2PKSD)

    @torch.inference_mode()
    def _try_drawing(self) -> None:
        """Let Triton compile the kernels that draw tokens: later, all streams would wait for that."""
        logits_RV = torch.zeros((1, self._vocab_size), dtype=self.dtype, device=self.device)
        try:
            for limits, forbidden in product(LIMITS, ((), (0,))):
                choose(logits_RV, [Sample(SamplingParams(**limits), 1, forbidden)])
        except Exception as error:  # of a compiler or a driver
            reason = " ".join(f"{type(error).__name__}: {error}".split())[-ERROR_CHARS:]
            raise ConfigError(f"--gpu-new: Triton's kernels do not run here ({reason}); leave it out") from error

    @torch.inference_mode()
    def _recorded(
        self, decoder: Decoder, attention: FlashInferAttention, graph: int, *, needed: bool
    ) -> DecodeGraphs | None:
        """Record steps; if that fails, log a warning and return None, or raise ConfigError if *needed*."""
        try:
            given = (decoder, attention, self.kv_L2PKSD, self._tables, graph, self._most_step_rows)
            if self._gpu_new:
                return StepGraphs(*given, prompt_sizes(self._max_prefill_length))
            return DecodeGraphs(*given)
        except Exception as error:  # a driver, torch or FlashInfer may refuse it in many ways
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARS]
            if needed:
                remedy = "pass --graph 0, or leave out --gpu-new" if self._gpu_new else "pass --graph 0"
                raise ConfigError(f"--graph {graph}: steps cannot be recorded here ({reason}); {remedy}") from error
            logger.warning("graphs_unavailable", reason=reason, effect="steps wait for the host, which is slower")
            return None

    @torch.inference_mode()
    def _measure(self, spec: ModelSpec, memory_ratio: float, *, graphs: bool) -> None:
        """Compute the largest steps, and lower the number of pages to what fits beside them."""
        num_rows, most_pages = self._tables.pages_AN.shape
        page_size = self._tables.page_size
        num_tokens = min(self._max_prefill_length, most_pages * page_size, self.num_pages * page_size)
        steps = [largest_prefill(num_tokens, page_size), largest_decode(num_rows)]
        num_pages = len(steps[0].rows[0].new_pages)
        self.kv_L2PKSD = allocate(spec, num_pages, page_size, self.dtype, self.device)
        prefill_bytes, decode_bytes = (
            bytes_of_a_step(partial(self._computed_and_drawn, plan), self.device) for plan in steps
        )
        del self.kv_L2PKSD
        graph_bytes = decode_bytes if graphs else 0
        if graphs and self._gpu_new:
            graph_bytes += prefill_bytes * prompt_sizes(self._max_prefill_length)[-1] // num_tokens
        fitting = fitting_pages(
            memory_ratio,
            page_bytes(spec, page_size, self.dtype),
            step_bytes=max(prefill_bytes, decode_bytes),
            graph_bytes=graph_bytes,
            device=self.device,
        )
        self.num_pages = min(self.num_pages, fitting)

    def _computed_and_drawn(self, plan: BatchPlan) -> None:
        self._draw(self._begun(plan, None))

    @torch.inference_mode()
    def logits(self, plan: BatchPlan) -> Tensor:
        """Compute one step; return logits_RV, float32, for the rows that sample, in row order."""
        launched = self._begun(plan, None)
        rows_R, samples = _sampling(launched)
        return self._computer.head(launched.x_TE, rows_R, [True] * len(samples))[1]

    def forward(self, plan: BatchPlan) -> Computed:
        """Compute one step, all tokens of which are known.

        Raises:
            ArithmeticError: A logit is not a number, so it is unknown which token should follow.
        """
        return self.wait(self.launch(plan, None)).checked()

    @property
    def computes_several(self) -> bool:
        """See `Several`."""
        return isinstance(self._computer, KernelDecoder) and self._computer.computes_several

    def several(self, plan: BatchPlan, most: int, ends: Sequence[Sequence[int]]) -> list[Computed]:
        """See `Several`."""
        assert isinstance(self._computer, KernelDecoder)
        self._tables.update(plan.rows)
        samples = [row.sample for row in plan.rows if row.sample is not None]
        computed = self._computer.several(plan, self._tables, self.kv_L2PKSD, most, ends, samples)
        return [Computed(token_ids) for token_ids in computed]

    @torch.inference_mode()
    @names_a_full_device()
    def launch(self, plan: BatchPlan, before: Launched | None) -> Launched:
        """Draw the tokens of the step *before*, then begin a step, in which they replace the placeholders.

        Rank 0 of several calls `settle` first, because the others need the tokens, too.

        Raises:
            DeviceFull: The device has no memory left; `wait` may raise it, too.
        """
        if before is None:
            return self._begun(plan, None)
        assert before.is_drawn or self._collectives.size == 1, "the other ranks do not know what replaces placeholders"
        self._draw(before)
        if self._settles_first(before):
            self._settle(before)
        before.following = self._begun(plan, before.tokens_R)
        return before.following

    @torch.inference_mode()
    @names_a_full_device()
    def wait(self, launched: Launched) -> Computed:
        """Return the result of a step. Call it before the step after the following one is launched."""
        token_ids, logits_RV = self._settle(launched)
        own_RV = logits_RV if launched.own_RV is None else launched.own_RV
        plan, starts = launched.plan, launched.starts
        return Computed(token_ids, score(plan, starts, launched.x_TE, self._computer.logits, own_RV, token_ids))

    @torch.inference_mode()
    def settle(self, launched: Launched) -> list[int]:
        """Draw the tokens of a step, unless they are drawn; return them, or NOT_A_NUMBER."""
        return self._settle(launched)[0]

    def follow(self, plan: BatchPlan) -> None:
        """Compute this rank's part of a step of rank 0. Of samples and scorings, only their number and size matter."""
        launched = self.follow_launch(plan)
        self.follow_draw(launched)
        self.follow_scores(launched)

    @torch.inference_mode()
    def follow_launch(self, plan: BatchPlan, token_ids: Sequence[int] = ()) -> Launched:
        """Compute this rank's part of a forward pass. *token_ids* of the step before replace the placeholders."""
        return self._begun(plan, torch.tensor(token_ids, device=self.device) if token_ids else None)

    @torch.inference_mode()
    def follow_draw(self, launched: Launched) -> None:
        """Compute this rank's part of the logits from which rank 0 draws the tokens of a step."""
        rows_R, _ = _sampling(launched)
        self._computer.head(launched.x_TE, rows_R, [False] * len(rows_R))

    @torch.inference_mode()
    def follow_scores(self, launched: Launched, num_done: int = 0) -> None:
        """Compute this rank's part of the scores of a step, after the first *num_done* blocks of them.

        Rank 0 does so, too, if its own `wait` failed among the scores.
        """
        rows = zip(launched.plan.rows, launched.starts, strict=False)
        blocks = (x_NE for row, start in rows for x_NE, _ in blocks_of(row, start, launched.x_TE))
        for x_NE in islice(blocks, num_done, None):
            self._computer.logits(x_NE)

    def _begun(self, plan: BatchPlan, last_R: Tensor | None) -> Launched:
        if isinstance(self._computer, KernelDecoder) and torch.get_num_threads() != 1:
            torch.set_num_threads(1)  # another engine of this process has changed it
        self._tables.update(plan.rows)
        return Launched(plan, *self._computer.forward(plan, self._tables, self.kv_L2PKSD, last_R))

    def _settles_first(self, launched: Launched) -> bool:
        """Return whether to wait for a step's tokens before the next step begins: on a CPU they are here, and if some
        must be AGAIN, waiting costs less than computing the next step twice.
        """
        if self.device.type == "cpu":
            return True
        if self._gpu_new:  # `choose` writes no AGAIN
            return False
        samples = (row.sample for row in launched.plan.rows)
        return any(how is not None and is_drawn_again(how.params, self._vocab_size) for how in samples)

    def _settle(self, launched: Launched) -> tuple[list[int], Tensor]:
        """Wait for the tokens of a step; return them, none of which is AGAIN, and logits_RV."""
        told_R, logits_RV = self._draw(launched)
        if launched.token_ids is None:
            launched.token_ids = told_R.tolist()
            if AGAIN in launched.token_ids:
                launched.token_ids = draw_again(launched.token_ids, logits_RV, _sampling(launched)[1])
                launched.tokens_R = torch.tensor(launched.token_ids, device=self.device)
                if launched.following is not None:  # it was computed with other tokens
                    launched.following.x_TE = self._begun(launched.following.plan, launched.tokens_R).x_TE
        return launched.token_ids, logits_RV

    def _draw(self, launched: Launched) -> tuple[ToHost, Tensor]:
        """Draw the tokens of a step, unless they are drawn; return them, on their way to the host, and logits_RV."""
        if launched.told_R is not None and launched.logits_RV is not None:
            return launched.told_R, launched.logits_RV
        rows_R, samples = _sampling(launched)
        if self._gpu_new and isinstance(self._computer, TorchComputer):
            logits_RV = self._computer.head_logits(launched.x_TE, rows_R)
            tokens_R = choose(logits_RV, samples)
            launched.tokens_R, launched.logits_RV, launched.told_R = tokens_R, logits_RV, ToHost(tokens_R)
            return launched.told_R, logits_RV
        masks_R, samples = self._masks(samples)
        scored_R = [how.params.logprobs is not None for how in samples]
        drawn_R = [how.changes_logits or how.params.temperature > 0 for how in samples]
        wanted_R = [scored or drawn for scored, drawn in zip(scored_R, drawn_R, strict=True)]
        tokens_R, logits_RV = self._computer.head(launched.x_TE, rows_R, wanted_R, masks_R)
        # Scores come from the model's own logits, and drawing changes those of some rows.
        if any(scored_R) and any(how.changes_logits for how in samples):
            launched.own_RV = logits_RV.clone()
        if any(drawn_R):
            draw(tokens_R, logits_RV, samples, threads=self._threads)
        launched.tokens_R, launched.logits_RV, launched.told_R = tokens_R, logits_RV, ToHost(tokens_R)
        return launched.told_R, logits_RV

    def _masks(self, samples: list[Sample]) -> tuple[list[Words | None], list[Sample]]:
        """Return masks for the rows that the head can decide, [] if none, and all samples without what it decides."""
        if not self._computer.takes_masks or not any(how.is_best_of_allowed for how in samples):
            return [], samples
        masks_R = [mask_of(how, self._vocab_size) if how.is_best_of_allowed else None for how in samples]
        rest = [
            how if mask is None else Sample(how.params, how.position, ())
            for how, mask in zip(samples, masks_R, strict=True)
        ]
        return masks_R, rest


def _new_operations(beside: Beside, dtype: torch.dtype, *, fixed_products: bool) -> Operations:
    """Return the operations of *beside*, with Triton's kernels in place of some."""
    from stages.generate.attention.heads import with_heads
    from stages.generate.model.layers.fixed_products import with_products

    operations = with_heads(beside)
    return with_products(operations, dtype) if fixed_products else operations


def _sampling(launched: Launched) -> tuple[list[int], list[Sample]]:
    """Return, for the rows that sample, their last tokens' places in T and their settled samples."""
    rows = zip(launched.plan.rows, launched.starts[1:], strict=True)
    last = [(end - 1, row.sample.settled()) for row, end in rows if row.sample is not None]
    return [index for index, _ in last], [how for _, how in last]


def _loader(spec: ModelSpec, folder: Path, *, dummy: bool, map_tied: bool) -> Callable[..., dict[str, Any]]:
    """Return the function that loads weights as tensors: random ones, those of GGUF files, or those of a checkpoint."""
    if dummy:
        return dummy_weights
    return partial(load_gguf, folder=folder) if spec.blocks else partial(load_weights, folder=folder, map_tied=map_tied)


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether weights are packed on this device."""
    return device.type == "cpu" and can_pack(dtype)


def pack_weights(weights: dict[str, Tensor]) -> None:
    """Replace every matrix of a linear layer by its packed form, one after the other.

    Tied embeddings become two matrices: one to look up rows in, and a packed one for the head.
    """
    weights[HEAD] = pack(weights.pop(HEAD, weights[EMBEDDING]))
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weights[name] = pack(weights.pop(name))
