"""FlashInfer's operations for the parts of a layer beside its matrices and its attention, each in one kernel.

Calls the functions of its compiled modules, not its Python: where nvidia-cutlass-dsl is installed, that chooses other
norms, which compile at their first call. If a module is missing, torch computes its part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeAlias

import structlog
import torch
from torch import Tensor

from stages.generate.model.attention import AttentionShape, places_of, write_pages
from stages.generate.model.layers.operations import TORCH, Operations
from stages.generate.model.layers.rope import Rope, angles, make_rope
from stages.generate.model.spec import RopeSpec

# T = packed tokens, E = hidden size, H = query heads, K = kv heads, N = H + K, D = head dim, I = intermediate size,
# O = 2 I, F = D / 2 frequencies, P = pages, S = slots of a page, X = T + 1

VERSION: Final = 1
"""Increase this with every change that may change a bit. It is part of an engine's numerics."""
VECTOR: Final = 8
"""Numbers of 16 bits that a thread loads at once. The kernel of `silu_and_mul` needs rows of whole vectors."""
MOST_THREADS: Final = 1024
"""Largest number of threads of a block. The kernel that writes pages has one for a token."""
HND: Final = 1
"""FlashInfer's number for pages that have one kv head after the other."""
TOLERANCE: Final = 2e-2
"""Largest relative distance of a result from torch's."""
ERROR_CHARS: Final = 300

logger = structlog.get_logger()

Write: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]
"""(kv_2PKSD of one layer, k_TKD, v_TKD)"""


def writing(slots_T: Tensor, page_size: int) -> Write:
    """Return a function that stores keys and values at *slots_T*, in torch."""
    places = places_of(slots_T, page_size)
    return lambda kv_2PKSD, k_TKD, v_TKD: write_pages(kv_2PKSD, k_TKD, v_TKD, places)


@dataclass(frozen=True, slots=True)
class Beside:
    """Functions for the parts of a layer beside the matrices and the attention."""

    operations: Operations = TORCH
    writing: Callable[[Tensor, int], Write] = writing
    modules: tuple[str, ...] = ()
    """FlashInfer's modules among them."""


IN_TORCH: Final = Beside()


class Part(Protocol):
    """The functions of one module."""

    def into(self, beside: Beside) -> Beside:
        """Return *beside* with its functions in place of torch's."""
        ...


class Norms:
    """See `Part`; module `norm`. The last argument of its functions is whether a kernel may begin early."""

    def __init__(self, module: Any, early: bool) -> None:
        self._module, self._early = module, early  # its functions live as long as it
        self._rmsnorm, self._fused_add_rmsnorm = module.rmsnorm, module.fused_add_rmsnorm

    def norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """See `Operations`."""
        y_TE = torch.empty_like(x_TE)
        if len(x_TE):  # a step in which no row samples has none, and a kernel cannot have an empty grid
            self._rmsnorm(y_TE, x_TE, weight_E, eps, self._early)
        return y_TE

    def add_norm(self, x_TE: Tensor, added_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Operations`. Both results replace the arguments."""
        self._fused_add_rmsnorm(added_TE, x_TE, weight_E, eps, self._early)
        return x_TE, added_TE

    def norm_heads(self, qk_TND: Tensor, weight_ND: Tensor, num_heads: int, eps: float) -> Tensor:
        """See `Operations`. The kernel takes the weights of one head, so query heads and kv heads need one each."""
        out_TND = torch.empty(qk_TND.shape, dtype=qk_TND.dtype, device=qk_TND.device)
        for heads in (slice(num_heads), slice(num_heads, None)):
            self._rmsnorm(out_TND[:, heads], qk_TND[:, heads], weight_ND[heads.start or 0], eps, self._early)
        return out_TND

    def into(self, beside: Beside) -> Beside:
        """See `Part`."""
        mine = replace(beside.operations, norm=self.norm, add_norm=self.add_norm, norm_heads=self.norm_heads)
        return replace(beside, operations=mine)


class Rotation:
    """See `Part`; module `rope`. It reads cosines and sines from a table with one row for each token of a step. So it
    is right for every kind of rope, also if frequencies depend on the position.
    """

    def __init__(self, module: Any) -> None:
        self._module, self._apply = module, module.apply_rope_pos_ids_cos_sin_cache

    def tables(self, rope: Rope, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """See `Operations`: cosines, then sines, [T, D], float32, and the number of each row."""
        angle_TF = angles(rope, positions_T)
        cos_sin_TD = torch.cat((angle_TF.cos(), angle_TF.sin()), dim=-1)
        if rope.spec.attention_factor != 1.0:
            cos_sin_TD = cos_sin_TD * rope.spec.attention_factor
        return cos_sin_TD, torch.arange(len(positions_T), dtype=torch.int32, device=positions_T.device)

    def rotate(self, qk_TND: Tensor, num_heads: int, cos_sin_TD: Tensor, rows_T: Tensor) -> tuple[Tensor, Tensor]:
        """See `Operations`. The query heads are stored together, as attention reads them."""
        q_THD, k_TKD = qk_TND[:, :num_heads], qk_TND[:, num_heads:]
        q_out, k_out = (torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (q_THD, k_TKD))
        self._apply(q_THD, k_TKD, q_out, k_out, cos_sin_TD, rows_T, False)
        return q_out, k_out

    def into(self, beside: Beside) -> Beside:
        """See `Part`."""
        operations = replace(beside.operations, rope_tables=self.tables, rotate=self.rotate)
        return replace(beside, operations=operations)


class Gate:
    """See `Part`; module `silu_and_mul`. The last argument of its function is that of `Norms`."""

    def __init__(self, module: Any, early: bool) -> None:
        self._module, self._early, self._silu_and_mul = module, early, module.silu_and_mul

    def gated(self, gate_up_TO: Tensor) -> Tensor:
        """See `Operations`."""
        num_gates = gate_up_TO.shape[-1] // 2
        if num_gates % VECTOR:
            return TORCH.gated(gate_up_TO)
        y_TI = torch.empty((len(gate_up_TO), num_gates), dtype=gate_up_TO.dtype, device=gate_up_TO.device)
        self._silu_and_mul(y_TI, gate_up_TO.contiguous(), self._early)
        return y_TI

    def into(self, beside: Beside) -> Beside:
        """See `Part`."""
        return replace(beside, operations=replace(beside.operations, gated=self.gated))


class Pages:
    """See `Part`; module `page`. Each token is passed as a request of one page, the page of its slot."""

    def __init__(self, module: Any) -> None:
        self._module, self._append = module, module.append_paged_kv_cache

    def writing(self, slots_T: Tensor, page_size: int) -> Write:
        """Return a function that stores keys and values at *slots_T*."""
        pages_T, offsets_T = places_of(slots_T, page_size)
        numbers_X = torch.arange(len(slots_T) + 1, dtype=torch.int32, device=slots_T.device)
        tokens_T = numbers_X[:-1]
        arrays = (pages_T, numbers_X, tokens_T)  # the last one stands for lengths, which the kernel does not read

        def write(kv_2PKSD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
            if k_TKD.shape[1] * k_TKD.shape[2] > MOST_THREADS * VECTOR:
                write_pages(kv_2PKSD, k_TKD, v_TKD, (pages_T, offsets_T))
                return
            self._append(k_TKD, v_TKD, tokens_T, offsets_T, kv_2PKSD[0], kv_2PKSD[1], *arrays, HND)

        return write

    def into(self, beside: Beside) -> Beside:
        """See `Part`."""
        return replace(beside, writing=self.writing)


MODULES: Final[Mapping[str, Callable[[Any, bool], Part]]] = {
    "norm": Norms,
    "page": lambda module, _: Pages(module),
    "rope": lambda module, _: Rotation(module),
    "silu_and_mul": Gate,
}
EARLY_CAPABILITY: Final = (9, 0)
"""Older GPUs begin no kernel early, and FlashInfer's code for them does not wait."""


def descriptions(library: Any) -> dict[str, Any]:
    """Return FlashInfer's descriptions of the modules, with which it compiles and finds them; {}: it has others."""
    try:
        return {
            "norm": library.jit.norm.gen_norm_module(),
            "page": library.jit.page.gen_page_module(),
            "rope": library.jit.rope.gen_rope_module(),
            "silu_and_mul": library.jit.gen_act_and_mul_module("silu"),
        }
    except Exception as error:  # of a later version
        _warn(f"{type(error).__name__}: {error}")
        return {}


def load(described: Mapping[str, Any], shape: AttentionShape) -> Beside:
    """Load the modules, compile those that are not compiled yet, and try each on a few tokens of a model of *shape*.

    A module that does not compile, raises or computes something else is left out, and one log line says so.
    """
    beside, reasons = IN_TORCH, []
    can_begin_early = shape.device.type == "cuda" and torch.cuda.get_device_capability(shape.device) >= EARLY_CAPABILITY
    sample = make_sample(shape, num_tokens=3, hidden_size=shape.num_heads * shape.head_dim, num_gates=8 * VECTOR)
    for name, description in described.items():
        try:
            with_it = extended(beside, name, description, shape.new and can_begin_early)
            for operation in (each for each in TRIES if TRIES[each].module == name):
                ours, theirs = (TRIES[operation].prepared(each, sample)() for each in (with_it, IN_TORCH))
                if not (error := distance(ours, theirs)) <= TOLERANCE:
                    raise ArithmeticError(f"{operation} is {error:.2g} away from torch")
        except Exception as error:  # a compiler, a driver or another version of FlashInfer may refuse it in many ways
            reasons.append(f"{name}: {' '.join(str(error).split())[-ERROR_CHARS:]}")
        else:
            beside = with_it
    if reasons:
        _warn("; ".join(reasons))
    return beside


def _warn(reason: str) -> None:
    """Log that torch computes what FlashInfer cannot."""
    effect = "torch computes these parts of a layer, which is slower"
    logger.warning("operations_are_slow", reason=reason, effect=effect)


# trials


@dataclass(frozen=True, slots=True)
class Sample:
    """Tensors on which an operation is tried."""

    shape: AttentionShape
    rope: Rope
    positions_T: Tensor
    slots_T: Tensor
    x_TE: Tensor
    added_TE: Tensor
    weight_E: Tensor
    heads_TMD: Tensor
    """M = H + 2 K."""
    weight_ND: Tensor
    gate_up_TO: Tensor
    kv_2PKSD: Tensor

    @property
    def qk_TND(self) -> Tensor:  # noqa: N802  (its shape)
        """A part of `heads_TMD`, as in the decoder."""
        return self.heads_TMD[:, : len(self.weight_ND)]


def make_sample(shape: AttentionShape, *, num_tokens: int, hidden_size: int, num_gates: int) -> Sample:
    """Return tensors that look random and are the same on every device."""
    device, num_qk = shape.device, shape.num_heads + shape.num_kv_heads

    def numbers(*sizes: int) -> Tensor:
        count = torch.arange(torch.Size(sizes).numel(), dtype=torch.float32, device=device)
        return (count * 12.9898).sin().view(sizes).to(shape.dtype)

    def weights(*sizes: int) -> Tensor:
        return numbers(*sizes) + 1

    head_weights = weights(2, shape.head_dim)
    positions_T = torch.arange(num_tokens, dtype=torch.int32, device=device)
    num_pages = -(-num_tokens // shape.page_size) + 1
    return Sample(
        shape=shape,
        rope=make_rope(RopeSpec("default", 10_000.0), shape.head_dim, device),
        positions_T=positions_T * 7,
        slots_T=positions_T + 1,
        x_TE=numbers(num_tokens, hidden_size),
        added_TE=numbers(num_tokens, hidden_size) * 0.5 + 0.25,
        weight_E=weights(hidden_size),
        heads_TMD=numbers(num_tokens, num_qk + shape.num_kv_heads, shape.head_dim),
        weight_ND=torch.cat(
            (head_weights[:1].expand(shape.num_heads, -1), head_weights[1:].expand(shape.num_kv_heads, -1) * 0.5)
        ),
        gate_up_TO=numbers(num_tokens, 2 * num_gates),
        kv_2PKSD=torch.zeros(
            (2, num_pages, shape.num_kv_heads, shape.page_size, shape.head_dim), dtype=shape.dtype, device=device
        ),
    )


Call: TypeAlias = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Try:
    """An operation: its module, and a function that prepares a call of it on a sample."""

    module: str
    prepared: Callable[[Beside, Sample], Call]


EPS: Final = 1e-6


def _norm(beside: Beside, of: Sample) -> Call:
    return lambda: (beside.operations.norm(of.x_TE, of.weight_E, EPS),)


def _add_norm(beside: Beside, of: Sample) -> Call:
    x_TE, added_TE = of.x_TE.clone(), of.added_TE.clone()
    return lambda: beside.operations.add_norm(x_TE, added_TE, of.weight_E, EPS)


def _norm_heads(beside: Beside, of: Sample) -> Call:
    return lambda: (beside.operations.norm_heads(of.qk_TND, of.weight_ND, of.shape.num_heads, EPS),)


def _append(beside: Beside, of: Sample) -> Call:
    kv_2PKSD, num_qk = of.kv_2PKSD.clone(), len(of.weight_ND)
    k_TKD, v_TKD = of.heads_TMD[:, of.shape.num_heads : num_qk], of.heads_TMD[:, num_qk:]
    write = beside.writing(of.slots_T, of.shape.page_size)

    def call() -> tuple[Tensor]:
        write(kv_2PKSD, k_TKD, v_TKD)
        return (kv_2PKSD,)

    return call


def _rotate(beside: Beside, of: Sample) -> Call:
    tables = beside.operations.rope_tables(of.rope, of.positions_T, of.shape.dtype)
    return lambda: beside.operations.rotate(of.qk_TND, of.shape.num_heads, *tables)


def _gate(beside: Beside, of: Sample) -> Call:
    return lambda: (beside.operations.gated(of.gate_up_TO),)


TRIES: Final[Mapping[str, Try]] = {
    "rmsnorm": Try("norm", _norm),
    "fused_add_rmsnorm": Try("norm", _add_norm),
    "rmsnorm of heads": Try("norm", _norm_heads),
    "append_paged_kv_cache": Try("page", _append),
    "apply_rope_with_cos_sin_cache": Try("rope", _rotate),
    "silu_and_mul": Try("silu_and_mul", _gate),
}


def extended(beside: Beside, name: str, description: Any, early: bool = False) -> Beside:
    """Return *beside* with the functions of the module *name*; compile the module if necessary, and load it."""
    beside = MODULES[name](description.build_and_load(), early).into(beside)
    return replace(beside, modules=(*beside.modules, name))


def distance(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float:
    """Return the largest relative distance of a tensor of *ours* from that of *theirs*. Wait for them."""
    pairs = [(mine.float(), other.float()) for mine, other in zip(ours, theirs, strict=True)]
    return float(torch.stack([(mine - other).norm() / other.norm() for mine, other in pairs]).max())  # NaN stays
