"""The modules of FlashInfer that compute what is beside a layer's matrices and attention, in torch on a CPU.

Each call is checked as the C++ of these modules checks it, and where that does not and a kernel would read or write
something else. Numbers are summed and multiplied in float32 and rounded where they are stored, as the kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from torch import Tensor

if TYPE_CHECKING:
    from support.flashinfer_double import Double

HND = 1
FUNCTIONS = {
    "norm": ("rmsnorm", "fused_add_rmsnorm"),
    "page": ("append_paged_kv_cache",),
    "rope": ("apply_rope_pos_ids_cos_sin_cache",),
    "silu_and_mul": ("silu_and_mul",),
}


def here(tensor: Tensor) -> Tensor:
    """Return *tensor*, or what holds it where it is of a pretended device."""
    held: Tensor = getattr(tensor, "held", tensor)
    return held


class Modules:
    """Describes the modules of a library, and computes."""

    def __init__(self, library: Double) -> None:
        self._library = library
        self.calls: list[str] = []
        """The functions that were called."""
        self.broken: dict[str, str] = {}
        """By the name of a module that does not compile: what the compiler says."""
        self.changes: dict[str, Callable[[SimpleNamespace], None]] = {}
        """By the name of a function: what changes its arguments, so that it computes something else."""

    def described(self, generator: str, name: str) -> Callable[..., SimpleNamespace]:
        """Return the function of FlashInfer that describes the module *name*."""

        def generate(*arguments: Any) -> SimpleNamespace:
            given = self._library.bound(generator, *arguments)
            assert vars(given) in ({}, {"act_func_name": "silu"})
            return SimpleNamespace(
                name=name,
                is_compiled=self._library.compiled,
                get_object_paths=list,
                build_and_load=lambda: self._load(name),
            )

        return generate

    def _load(self, name: str) -> SimpleNamespace:
        if name in self.broken:
            raise RuntimeError(self.broken[name])
        return SimpleNamespace(**{function: self._function(function) for function in FUNCTIONS[name]})

    def _function(self, name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            given = self._library.bound(name, *arguments)
            for each in filter(lambda value: isinstance(value, Tensor), vars(given).values()):
                assert each.numel() and each.stride(-1) == 1, f"{name}: an empty grid, or numbers that lie apart"
            self.calls.append(name)
            compute = getattr(self, f"_{name}")(given)
            if name in self.changes:
                self.changes[name](given)
            on_host = SimpleNamespace(
                **{key: here(value) if isinstance(value, Tensor) else value for key, value in vars(given).items()}
            )
            self._library.stream.launch(lambda: compute(on_host))

        return call

    def _rmsnorm(self, given: SimpleNamespace) -> Callable[[SimpleNamespace], object]:
        assert given.input.dim() in (2, 3) and given.out.shape == given.input.shape
        assert given.weight.shape == given.input.shape[-1:] and given.enable_pdl is False
        assert given.input.dtype == given.weight.dtype == given.out.dtype
        return lambda at: at.out.copy_(normed(at.input.float(), at.weight, at.eps))

    def _fused_add_rmsnorm(self, given: SimpleNamespace) -> Callable[[SimpleNamespace], object]:
        assert given.input.dim() == 2 and given.residual.shape == given.input.shape
        assert given.weight.shape == given.input.shape[-1:] and given.enable_pdl is False
        assert given.input.dtype == given.weight.dtype == given.residual.dtype
        assert here(given.input).data_ptr() != here(given.residual).data_ptr()

        def compute(at: SimpleNamespace) -> None:
            total = at.input.float() + at.residual.float()
            at.residual.copy_(total)
            at.input.copy_(normed(total, at.weight, at.eps))

        return compute

    def _apply_rope_pos_ids_cos_sin_cache(self, given: SimpleNamespace) -> Callable[[SimpleNamespace], object]:
        assert given.q.dim() == given.k.dim() == given.q_rope.dim() == given.k_rope.dim() == 3
        assert given.q.shape == given.q_rope.shape and given.k.shape == given.k_rope.shape
        assert given.cos_sin_cache.is_contiguous() and given.cos_sin_cache.dtype == torch.float32
        assert given.pos_ids.is_contiguous() and given.pos_ids.dtype in (torch.int32, torch.int64)
        assert given.pos_ids.shape == given.q.shape[:1] == given.k.shape[:1]
        assert given.q.dtype == given.k.dtype == given.q_rope.dtype == given.k_rope.dtype
        assert given.cos_sin_cache.shape[1] == given.q.shape[2] and given.interleave is False

        def compute(at: SimpleNamespace) -> None:
            cos, sin = at.cos_sin_cache[at.pos_ids.long()][:, None].chunk(2, dim=-1)
            for before, after in ((at.q, at.q_rope), (at.k, at.k_rope)):
                one, other = before.float().chunk(2, dim=-1)
                after.copy_(torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1))

        return compute

    def _append_paged_kv_cache(self, given: SimpleNamespace) -> Callable[[SimpleNamespace], object]:
        arrays = (given.batch_indices, given.positions, given.kv_indices, given.kv_indptr, given.kv_last_page_len)
        assert all(each.dtype == torch.int32 and each.is_contiguous() and each.dim() == 1 for each in arrays)
        assert given.append_key.dim() == given.append_value.dim() == 3
        assert given.paged_k_cache.stride() == given.paged_v_cache.stride() and given.layout == HND
        num_tokens, num_heads, head_dim = given.append_key.shape
        assert given.append_value.shape == given.append_key.shape
        assert given.paged_k_cache.shape[1:] == (num_heads, given.paged_k_cache.shape[2], head_dim)
        assert num_heads * head_dim // 8 <= 1024, "a block has at most 1024 threads"
        assert len(given.batch_indices) == len(given.positions) == num_tokens
        assert len(given.kv_indptr) == len(given.kv_last_page_len) + 1
        assert given.append_key.dtype == given.append_value.dtype == given.paged_k_cache.dtype

        def compute(at: SimpleNamespace) -> None:
            page_size = at.paged_k_cache.shape[2]
            places = at.kv_indptr[at.batch_indices.long()].long() * page_size + at.positions
            pages, offsets = at.kv_indices[places // page_size].long(), places % page_size
            for cache, new in ((at.paged_k_cache, at.append_key), (at.paged_v_cache, at.append_value)):
                cache[pages, :, offsets] = new

        return compute

    def _silu_and_mul(self, given: SimpleNamespace) -> Callable[[SimpleNamespace], object]:
        assert given.input.is_contiguous() and given.out.is_contiguous() and given.enable_pdl is False
        assert given.input.shape == (*given.out.shape[:-1], 2 * given.out.shape[-1])
        assert given.out.shape[-1] % 8 == 0, "a thread of 0.6.13 would load from an address that is not aligned"
        assert given.input.dtype == given.out.dtype

        def compute(at: SimpleNamespace) -> None:
            gate, up = at.input.float().chunk(2, dim=-1)
            at.out.copy_(F.silu(gate) * up)

        return compute


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return *x*, in float32, normalised over its last dimension and multiplied."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
