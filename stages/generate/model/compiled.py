"""The decoder of `kernels.h` for Python: weights that are packed once, and one call for all layers of a step."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from array import array
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

from stages.generate.batch import PageTables
from stages.generate.collectives import ALONE, Collectives
from stages.generate.kernels.library import Format, Library, Matrix, library
from stages.generate.model.checkpoint import EMBEDDING, HEAD
from stages.generate.model.gguf import BLOCKS
from stages.generate.model.layers.rope import dynamic_frequencies, make_rope
from stages.generate.model.spec import LayerKind, ModelSpec, mlp_norm_of
from stages.generate.sampling.compiled import addresses
from stages.generate.sampling.draws import make_draws
from stages.generate.sampling.sampler import best as best_of
from stages.generate.schedule.plan import BatchPlan, PlanRow, Sample, Words

HUGE: Final = 2**21
"""Bytes of a huge page on x86-64, and on aarch64 where small pages have 4 KiB."""
AT_ONCE: Final = 32 * HUGE
"""Address space that is mapped at a time. It becomes memory when it is written to, a huge page at a time."""
ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A matrix of blocks that lies in GGUF files, which are mapped while this lives, or in memory."""

    type: str
    """A type of `gguf.BLOCKS` that has more than one weight in a block."""
    addresses_O: npt.NDArray[np.uint64]
    """Where each output's first block lies; 0: all its weights are zero."""
    inputs: int
    files: tuple[npt.NDArray[np.uint8], ...]
    order_I: npt.NDArray[np.int32] | None = None
    """Input of each weight of a row; None: they lie in order."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs, as of a tensor."""
        return len(self.addresses_O), self.inputs


class Arena:
    """Hands out pieces of memory, which live as long as any of them is used."""

    def __init__(self) -> None:
        self._rest = np.empty(0, np.uint8)

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """Return *size* bytes that begin at a cache line."""
        if size > len(self._rest):
            self._rest = _mapped(max(size, AT_ONCE))
        taken, self._rest = self._rest[:size], self._rest[-(-size // ALIGNMENT) * ALIGNMENT :]
        return taken


def give_back() -> None:
    """Return freed memory to the system. The C library keeps free memory between other pieces, such as packed matrices;
    only glibc has a function that returns it.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _mapped(size: int) -> npt.NDArray[np.uint8]:
    """Return new memory that begins at the border of a huge page."""
    area = mmap.mmap(-1, -(-size // HUGE) * HUGE + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel or a system without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(area, np.uint8)
    first = -array.ctypes.data % HUGE
    return array[first : len(array) - HUGE + first]


# T = packed tokens, B = rows of the batch, R = rows that sample, E = hidden size, V = vocabulary, O = outputs,
# I = inputs, D = head dim, F = D / 2 frequencies, N = pages of a row, M = parts of a page

FORMATS: Final = {torch.float32: Format.FLOAT32, torch.bfloat16: Format.BFLOAT16, torch.float16: Format.FLOAT16}
TYPES: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
FORMAT_OF: Final = {kind: Format["Q8_0" if kind == "Q5_0" else kind] for kind in BLOCKS if kind not in TYPES.values()}
"""Format of the panels of each type of GGUF files that has blocks."""
ROUNDED_AS: Final = {"int8": (Format.Q8_0, Format.Q8_0), "int4": (Format.INT4_32, Format.Q8_0)}
"""`--quantization` -> formats of the matrices of layers, and of the head, of weights that are floats."""
PANEL: Final = 16
"""Outputs of a panel, as in kernels.h."""


class _Mlp(ctypes.Structure):
    _fields_: ClassVar = [("gate_up", Matrix), ("down", Matrix)]


class _Kind(ctypes.Structure):
    _fields_: ClassVar = [("window", c_int64), ("frequencies", c_void_p), ("rope_factor", c_float)]


class _Layer(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, c_void_p) for name in ("input_norm", "mlp_norm", "norm_after_attention", "norm_after_mlp")),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", Matrix * 3),
        ("output", Matrix),
        ("mlp", _Mlp),
        ("router", Matrix),
        ("experts", POINTER(_Mlp)),
        *((name, c_int64) for name in ("kind", "part", "place")),
    ]


class _Model(ctypes.Structure):
    _fields_: ClassVar = [
        ("variant", c_void_p),
        *((name, c_int64) for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("rotary_dim", "vocabulary", "num_experts", "experts_per_token")),
        ("first_token", c_int64),
        ("num_embeddings", c_int64),
        ("normalize", c_int32),
        ("gelu", c_int32),
        *((name, c_float) for name in ("eps", "attention_scale", "attention_cap", "logits_cap", "embedding_scale")),
        ("embedding_type", c_int),
        ("embedding", c_void_p),
        ("layers", POINTER(_Layer)),
        ("norm", c_void_p),
        ("head", Matrix),
        ("kinds", POINTER(_Kind)),
        *((name, c_int64) for name in ("num_kinds", "num_parts", "window")),
        ("threads", c_int32),
    ]


class _Step(ctypes.Structure):
    _fields_: ClassVar = [
        ("num_tokens", c_int64),
        ("num_rows", c_int64),
        *((name, c_void_p) for name in ("token_ids", "starts", "lengths", "tables")),
        ("table_width", c_int64),
        ("frequencies", c_void_p),
        ("pages", c_void_p),
        ("num_pages", c_int64),
        ("page_size", c_int64),
        ("format", c_int),
        ("x", c_void_p),
        ("wrong", c_int64),
    ]


_DONE, _NO_MEMORY, _WRONG_TOKEN, _WRONG_ROW, _WRONG_PAGE = range(5)  # Outcome of step.h


class _Several(ctypes.Structure):
    _fields_: ClassVar = [
        ("num_steps", c_int64),
        *((name, c_void_p) for name in ("ends", "end_starts", "best", "logits_rows", "logits", "drawn")),
        ("num_drawn", c_int64),
        *((name, c_void_p) for name in ("divisors", "numbers", "tokens")),
        ("num_done", c_int64),
    ]


class _Inputs(NamedTuple):
    """What the kernels get for a step."""

    step: _Step
    starts: tuple[int, ...]
    """Where each row of the plan begins, and their end."""
    rows: tuple[PlanRow, ...]
    """The last row of the plan in each row of the kernels."""
    kept: tuple[Any, ...]
    """Arrays that *step* points to; the tokens come first."""


class KernelDecoder:
    """A spec and its packed weights. A row gets the same numbers in any batch, chunking and number of threads."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: dict[str, Any],
        *,
        variant: str,
        quantization: str,
        threads: int,
        collectives: Collectives = ALONE,
        parts: Sequence[Sequence[int]] = (),
    ) -> None:
        """Move the weights, under their fused names (`forward/weights.py`), out of *weights*, which is then empty.

        Each matrix is freed as soon as it is packed. With several ranks, *weights* are the part of this rank.

        *parts*: the layers of each part of a page (`ModelSpec.page_parts`); empty: one part has all layers.
        """
        found = library()
        assert isinstance(found, Library), found
        self._spec, self._functions, self._collectives = spec, found.functions, collectives
        self._variant = ctypes.addressof(found.variant(variant))
        self._rounded_as = ROUNDED_AS.get(quantization)
        self._threads = threads
        parts = parts or (range(spec.num_layers),)
        self._place_of = {layer: (at, place) for at, part in enumerate(parts) for place, layer in enumerate(part)}
        self._kept: list[object] = []
        self._arena = Arena()
        self._declare()
        embedding_VE = weights.pop(EMBEDDING)
        is_tied = HEAD not in weights
        head_VE = weights.pop(HEAD, embedding_VE)
        kinds = (_Kind * len(spec.kinds))(*map(self._kind, spec.kinds))
        layers = (_Layer * spec.num_layers)(*(self._layer(index, weights) for index in range(spec.num_layers)))
        self._kept += [layers, kinds]
        self._model = _Model(
            variant=self._variant,
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=spec.rotary_dim,
            vocabulary=spec.vocab_size,
            num_experts=spec.experts.num_experts,
            experts_per_token=spec.experts.experts_per_token,
            first_token=spec.rank * spec.vocab_rows,
            num_embeddings=spec.vocab_rows,
            normalize=int(spec.experts.normalize),
            gelu=int(spec.activation != "silu"),
            eps=spec.norm_eps,
            attention_scale=spec.attention_scale,
            attention_cap=spec.attention_cap,
            logits_cap=spec.logits_cap,
            embedding_scale=_rounded(spec.embedding_scale, embedding_VE),
            **({} if is_tied and isinstance(embedding_VE, BlockMatrix) else self._embedding(embedding_VE)),
            layers=layers,
            norm=self._norm(weights, "model.norm"),
            head=self._pack(head_VE, is_head=True),
            kinds=kinds,
            num_kinds=len(kinds),
            num_parts=len(parts),
            window=spec.window if len(parts) > 1 else 0,
            threads=threads,
        )
        self._no_logits_0V = torch.empty(0, spec.vocab_rows)
        assert not weights, f"unused weights: {', '.join(weights)}"

    def forward(
        self, plan: BatchPlan, tables: PageTables, kv_L2PKSD: Tensor, last_R: Tensor | None = None
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Compute one step and write the keys and values of its tokens. *last_R*: see `Computer`.

        Returns:
            x_TE in float32, the last layer's output for each token; and B + 1 numbers, where each row begins in T.

        Raises:
            ValueError: A token is not in the vocabulary, or a row or its pages are impossible.
            OverflowError: A token id does not fit into 32 bits.
            MemoryError: There is no memory for a step of so many tokens.
        """
        x_TE = torch.empty(sum(len(row.token_ids) for row in plan.rows), self._spec.hidden_size)
        inputs = self._inputs(plan, tables, kv_L2PKSD, x_TE.data_ptr(), last_R)
        self._raise_for(self._compute(inputs.step, x_TE), inputs, tables)
        return x_TE, inputs.starts

    @property
    def computes_several(self) -> bool:
        """Whether `several` can be called: not with several ranks, nor where the rope depends on a row's length."""
        return self._collectives.size == 1 and not self._spec.has_dynamic_rope

    def several(
        self,
        plan: BatchPlan,
        tables: PageTables,
        kv_L2PKSD: Tensor,
        most: int,
        ends_B: Sequence[Sequence[int]],
        samples_B: Sequence[Sample],
    ) -> list[list[int]]:
        """Compute up to *most* steps of the same rows, each with what the one before drew; return the tokens of each.

        No step follows one in which a row draws one of its *ends_B*, or NOT_A_NUMBER. Every row of *plan* has one
        token, samples, and has pages for *most* tokens. No sample looks at other tokens.

        Raises:
            As `forward`.
        """
        # No tensor is made here: after a step little of torch is in the caches, and a call of it takes 0.1 ms and more.
        num_rows = len(plan.rows)
        x = array("f", bytes(4 * num_rows * self._spec.hidden_size))
        inputs = self._inputs(plan, tables, kv_L2PKSD, x.buffer_info()[0], num_steps=most)
        drawn_D = [row for row, how in enumerate(samples_B) if how.params.temperature > 0]
        kept = (
            array("i", chain.from_iterable(ends_B)),
            array("i", accumulate((len(ends) for ends in ends_B), initial=0)),
            array("i", [0] * num_rows),
            array("i", [row if how.params.temperature > 0 else -1 for row, how in enumerate(samples_B)]),
            array("q", drawn_D),
            array("q", [0] * (most * num_rows)),
        )
        ends, end_starts, best, logits_rows, drawn, tokens = map(_address, kept)
        several = _Several(most, ends, end_starts, best, logits_rows, None, drawn, len(drawn_D), tokens=tokens)
        if drawn_D:
            hows = [(samples_B[row], step) for step in range(most) for row in drawn_D]
            draws = make_draws([Sample(how.params, how.position + step, ()) for how, step in hows])
            numbers_NFD = np.ascontiguousarray(draws.numbers_FR.reshape(6, most, -1).swapaxes(0, 1))
            logits_BV = np.empty((num_rows, self._spec.vocab_size), np.float32)
            several.logits, several.numbers = logits_BV.ctypes.data, numbers_NFD.ctypes.data
            several.divisors = draws.divisors_R.ctypes.data
        model, step = ctypes.byref(self._model), ctypes.byref(inputs.step)
        outcome = self._functions.kernels_steps(
            model, step, inputs.step.token_ids, inputs.step.lengths, ctypes.byref(several)
        )
        self._raise_for(outcome, inputs, tables)
        return [kept[-1][step * num_rows : (step + 1) * num_rows].tolist() for step in range(several.num_done)]

    def _inputs(
        self,
        plan: BatchPlan,
        tables: PageTables,
        kv_L2PKSD: Tensor,
        x_address: int,
        last_R: Tensor | None = None,
        *,
        num_steps: int = 1,
    ) -> _Inputs:
        rows = plan.rows
        starts = (0, *accumulate(len(row.token_ids) for row in rows))
        lengths = [row.start + len(row.token_ids) for row in rows]
        starts_of_rows = starts
        if plan.num_drafts:  # a row and its drafts are a chunk: it reads its pages once
            last = [at for at in range(len(rows)) if at + 1 == len(rows) or not rows[at + 1].is_draft]
            starts = (0, *(starts[at + 1] for at in last))
            rows, lengths = tuple(rows[at] for at in last), [lengths[at] for at in last]
        token_ids_T = array("i", chain.from_iterable(row.token_ids for row in plan.rows))
        if last_R is not None:
            known_T = np.frombuffer(token_ids_T, np.int32)
            unknown_T = known_T < 0
            known_T[unknown_T] = last_R.clamp(min=0).numpy()[-1 - known_T[unknown_T]]
        width = -(-(max(lengths) + num_steps - 1) // tables.page_size)
        if len(rows) == 1:  # its pages are read where they are
            pages_BMN = None
            pages, table_width = tables.address(rows[0].table), tables.pages_AMN.shape[2]
        else:
            pages_BMN = np.ascontiguousarray(tables.pages_AMN[[row.table for row in rows], :, :width])
            pages, table_width = pages_BMN.ctypes.data, width
        frequencies_TF = self._frequencies(starts, lengths)
        starts_B, lengths_B = array("i", starts), array("i", lengths)
        step = _Step(
            num_tokens=starts[-1],
            num_rows=len(rows),
            token_ids=_address(token_ids_T),
            starts=_address(starts_B),
            lengths=_address(lengths_B),
            tables=pages,
            table_width=table_width,
            frequencies=None if frequencies_TF is None else frequencies_TF.ctypes.data,
            pages=kv_L2PKSD.data_ptr(),
            num_pages=kv_L2PKSD.shape[2],
            page_size=tables.page_size,
            format=FORMATS[kv_L2PKSD.dtype],
            x=x_address,
        )
        kept = token_ids_T, starts_B, lengths_B, frequencies_TF, pages_BMN
        return _Inputs(step, starts_of_rows, rows, kept)

    def _raise_for(self, outcome: int, inputs: _Inputs, tables: PageTables) -> None:
        """Raise the error of an outcome that is not DONE."""
        step, rows = inputs.step, inputs.rows
        if outcome == _NO_MEMORY:
            raise MemoryError(f"there is no memory for a step of {step.num_tokens} tokens")
        if outcome == _WRONG_TOKEN:
            raise ValueError(
                f"token id {inputs.kept[0][step.wrong]}: the vocabulary has {self._spec.vocab_size} tokens"
            )
        if outcome == _WRONG_ROW:
            raise ValueError(f"row {step.wrong} of the step cannot be: its tokens and its length do not fit together")
        if outcome == _WRONG_PAGE:
            row = rows[step.wrong]
            wrong = tables.pages_AMN[row.table, :, : -(-(row.start + len(row.token_ids)) // tables.page_size)].tolist()
            raise ValueError(f"row {step.wrong} of the step has pages {wrong}; there are {step.num_pages}")

    @property
    def takes_masks(self) -> bool:
        """See `Computer`. Several ranks take none: only rank 0 has masks, and no rank knows its own part of them."""
        return self._collectives.size == 1

    def head(
        self, x_TE: Tensor, rows_R: Sequence[int], wanted_R: Sequence[bool], masks_R: Sequence[Words | None] = ()
    ) -> tuple[Tensor, Tensor]:
        """See `Computer`. Of several largest logits the first one is chosen; only wanted rows of logits are filled in.

        Several ranks compute all rows, because a rank knows only the largest logit of its own part.
        """
        together = self._collectives.size > 1
        if together:
            wanted_R = [True] * len(rows_R)
        places_R = array("i", [row if wanted else -1 for row, wanted in enumerate(wanted_R)])
        logits_RV = torch.empty(len(places_R), self._spec.vocab_rows) if any(wanted_R) else self._no_logits_0V
        rows, best_R = array("i", rows_R), array("i", places_R)
        assert not masks_R or (len(masks_R) == len(rows) and self.takes_masks)
        masks = addresses(masks_R, self._spec.vocab_size)
        outcome = self._functions.kernels_head(
            ctypes.byref(self._model),
            x_TE.data_ptr(),
            len(x_TE),
            _address(rows),
            len(rows),
            _address(places_R),
            logits_RV.data_ptr(),
            masks.ctypes.data if masks_R else None,
            _address(best_R),
        )
        if outcome == _WRONG_TOKEN:
            raise ValueError(f"rows {rows.tolist()}: the step has {len(x_TE)} tokens")
        if outcome:
            raise MemoryError(f"there is no memory for the logits of {len(rows)} rows")
        if together:
            logits_RV = self._collectives.gather_to_0(logits_RV)[:, : self._spec.vocab_size].contiguous()
            return best_of(logits_RV), logits_RV
        if not best_R:
            return torch.empty(0, dtype=torch.int64), logits_RV
        return torch.frombuffer(array("q", best_R), dtype=torch.int64), logits_RV

    def logits(self, x_NE: Tensor) -> Tensor:
        """Return logits_NV, float32, of some tokens that `forward` returned."""
        return self.head(x_NE.contiguous(), range(len(x_NE)), [True] * len(x_NE))[1]

    def _compute(self, step: _Step, x_TE: Tensor) -> int:
        """Compute the layers of *step* into its x_TE; return the outcome.

        Several ranks compute one part after the other, and sum what each of them adds to x_TE.
        """
        model = ctypes.byref(self._model)
        if self._collectives.size == 1:
            return int(self._functions.kernels_forward(model, ctypes.byref(step)))
        x_TE.zero_()
        for part in range(1 + 2 * self._spec.num_layers):
            added_TE = torch.zeros_like(x_TE)
            if outcome := self._functions.kernels_part(model, ctypes.byref(step), part, added_TE.data_ptr(), 0):
                return int(outcome)
            added_TE = self._collectives.all_reduce(added_TE)
            if not self._spec.norms_after or part == 0:
                x_TE += added_TE
            elif outcome := self._functions.kernels_part(model, ctypes.byref(step), part, added_TE.data_ptr(), 1):
                return int(outcome)
        return _DONE

    def _frequencies(self, starts: Sequence[int], lengths: Sequence[int]) -> np.ndarray | None:
        """Return freq_TF where a token has its own frequencies: a dynamic rope beyond the context of the training."""
        rope = self._spec.kinds[0].rope
        if rope is None or rope.kind != "dynamic" or max(lengths) <= rope.original_max_positions:
            return None
        ends_T = np.repeat(np.subtract(lengths, starts[1:]), np.diff(starts))
        made = make_rope(rope, self._spec.rotary_dim, torch.device("cpu"))
        return dynamic_frequencies(made, torch.from_numpy(np.arange(starts[-1]) + ends_T)).numpy()

    def _layer(self, index: int, weights: dict[str, Any]) -> _Layer:
        spec, prefix = self._spec, f"model.layers.{index}"

        def linear(name: str) -> Matrix:
            return self._pack(weights.pop(f"{name}.weight"), weights.pop(f"{name}.bias", None))

        def mlp(name: str) -> _Mlp:
            return _Mlp(
                self._pack(
                    weights.pop(f"{name}.gate_up_proj.weight"),
                    weights.pop(f"{name}.gate_up_proj.bias", None),
                    pair=True,
                ),
                linear(f"{name}.down_proj"),
            )

        is_fused = f"{prefix}.self_attn.qkv_proj.weight" in weights
        apart = ("qkv_proj",) if is_fused else ("q_proj", "k_proj", "v_proj")
        layer = _Layer(
            input_norm=self._norm(weights, f"{prefix}.input_layernorm"),
            mlp_norm=self._norm(weights, f"{prefix}.{mlp_norm_of(spec)}"),
            kind=spec.kind_of[index],
            part=self._place_of[index][0],
            place=self._place_of[index][1],
            qkv=(Matrix * 3)(*(linear(f"{prefix}.self_attn.{name}") for name in apart)),
            output=linear(f"{prefix}.self_attn.o_proj"),
        )
        if spec.norms_after:
            layer.norm_after_attention = self._norm(weights, f"{prefix}.post_attention_layernorm")
            layer.norm_after_mlp = self._norm(weights, f"{prefix}.post_feedforward_layernorm")
        if spec.qk_norm:
            layer.q_norm = self._norm(weights, f"{prefix}.self_attn.q_norm")
            layer.k_norm = self._norm(weights, f"{prefix}.self_attn.k_norm")
        if index in spec.experts.layers:
            layer.router = self._pack(weights.pop(f"{prefix}.mlp.gate.weight"), quantized=False)
            experts = [mlp(f"{prefix}.mlp.experts.{expert}") for expert in range(spec.experts.num_experts)]
            together = (_Mlp * len(experts))(*experts)
            self._kept.append(together)
            layer.experts = together
        else:
            layer.mlp = mlp(f"{prefix}.mlp")
        give_back()
        return layer

    def _pack(
        self,
        weight: Tensor | BlockMatrix,
        bias_O: Tensor | None = None,
        *,
        pair: bool = False,
        quantized: bool = True,
        is_head: bool = False,
    ) -> Matrix:
        """Return a packed matrix; a *pair* is two matrices, one on the other, with alternating panels."""
        outputs, inputs = weight.shape
        each = outputs // 2 if pair else outputs
        padded = -(-each // PANEL) * PANEL
        if isinstance(weight, BlockMatrix):
            target = FORMAT_OF[weight.type]
        else:
            weight = weight.contiguous()
            rounded = self._rounded_as if quantized else None
            target = FORMATS[weight.dtype] if rounded is None else rounded[is_head]
        panels = self._arena.take(self._functions.kernels_packed_bytes(self._variant, target, each, inputs, int(pair)))
        place = inputs, self._threads, panels.ctypes.data
        if isinstance(weight, BlockMatrix):
            halves = [np.pad(half_O, (0, padded - each)) for half_O in np.split(weight.addresses_O, outputs // each)]
            rows = np.stack([half_O.reshape(-1, PANEL) for half_O in halves], axis=1)
            number = BLOCKS[weight.type][0]
            self._functions.kernels_pack_blocks(number, rows.ctypes.data, rows.size // PANEL, *place)
        else:
            first, source = weight.data_ptr(), FORMATS[weight.dtype]
            second = first + each * inputs * weight.itemsize if pair else None
            self._functions.kernels_pack(self._variant, target, source, first, second, each, *place)
        bias = None
        if bias_O is not None:
            parts = [F.pad(part_O, (0, padded - each)) for part_O in torch.split(bias_O.float(), each)]
            bias = self._keep(torch.stack([part.view(-1, PANEL) for part in parts], dim=1))
        self._kept.append(panels)
        order = None
        if isinstance(weight, BlockMatrix) and weight.order_I is not None:
            self._kept.append(weight.order_I)
            order = weight.order_I.ctypes.data
        return Matrix(panels.ctypes.data, bias, 2 * padded if pair else outputs, inputs, target, order)

    def _embedding(self, embedding: Tensor | BlockMatrix) -> dict[str, int]:
        """Return the fields of `_Model` about the embedding. Blocks are copied out of the files as they are."""
        if isinstance(embedding, Tensor):
            kind, address = TYPES[embedding.dtype], self._keep(embedding.contiguous())
            return {"embedding_type": BLOCKS[kind][0], "embedding": address}
        number, weights, size = BLOCKS[embedding.type]
        row_bytes = embedding.inputs // weights * size
        rows = self._arena.take(len(embedding.addresses_O) * row_bytes)
        for place, address in enumerate(embedding.addresses_O.tolist()):
            if address:
                ctypes.memmove(rows.ctypes.data + place * row_bytes, address, row_bytes)
        self._kept.append(rows)
        return {"embedding_type": number, "embedding": rows.ctypes.data}

    def _kind(self, kind: LayerKind) -> _Kind:
        if kind.rope is None:
            return _Kind(window=kind.window)
        frequencies_F = make_rope(kind.rope, self._spec.rotary_dim, torch.device("cpu")).freq_F
        return _Kind(kind.window, self._keep(frequencies_F.contiguous()), kind.rope.attention_factor)

    def _norm(self, weights: dict[str, Any], name: str) -> int:
        return self._keep(weights.pop(f"{name}.weight").float().contiguous() + self._spec.norm_offset)

    def _keep(self, tensor: Tensor) -> int:
        """Return the address of *tensor*, which the decoder keeps alive."""
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _declare(self) -> None:
        """Declare the arguments of the library's functions to ctypes."""
        functions = self._functions
        functions.kernels_forward.argtypes = [POINTER(_Model), POINTER(_Step)]
        functions.kernels_steps.argtypes = [*(POINTER(_Model), POINTER(_Step), c_void_p, c_void_p, POINTER(_Several))]
        functions.kernels_part.argtypes = [POINTER(_Model), POINTER(_Step), c_int64, c_void_p, c_int]
        functions.kernels_head.argtypes = [POINTER(_Model), c_void_p, c_int64, c_void_p, c_int64, *[c_void_p] * 4]
        functions.kernels_packed_bytes.argtypes = [c_void_p, c_int, c_int64, c_int64, c_int]
        functions.kernels_packed_bytes.restype = c_int64
        functions.kernels_pack.argtypes = [
            c_void_p,
            c_int,
            c_int,
            c_void_p,
            c_void_p,
            c_int64,
            c_int64,
            c_int,
            c_void_p,
        ]
        functions.kernels_pack.restype = None
        functions.kernels_pack_blocks.argtypes = [c_int, c_void_p, c_int64, c_int64, c_int, c_void_p]
        functions.kernels_pack_blocks.restype = None


def _rounded(scale: float, embedding: Tensor | BlockMatrix) -> float:
    """Return the scale of embeddings as transformers has it: in their dtype."""
    return float(torch.tensor(scale, dtype=embedding.dtype)) if isinstance(embedding, Tensor) else scale


def _address(numbers: array[int]) -> int:
    """Return the address of *numbers*. NumPy takes many times as long to make an array and return its address, above
    all after the weights were read: then nothing else is left in the caches."""
    return numbers.buffer_info()[0]
