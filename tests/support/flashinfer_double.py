"""FlashInfer on a CPU: its paged attention, and the modules for what is beside a layer's matrices and attention. Each
call is bound to the signature that a version has (`tests/signatures`), and computed in torch from the same arrays. A
copy to the device happens when the device gets there.

As in FlashInfer the rounding of a row depends on its batch: with few rows its tokens are split into parts, whose
results are merged, unless a plan disables that. Each call of a module is checked as its C++ checks it, and where that
does not and a kernel would read or write something else. Numbers are summed and multiplied in float32 and rounded where
they are stored, as the kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from support.flashinfer_signatures import VERSIONS, signatures
from torch import Tensor

# T = packed tokens, B = rows, H = query heads, K = kv heads, D = head dim, Q = queries of a row, C = its tokens

MULTIPROCESSORS = 4
"""With fewer rows than that, they are split."""
TOO_SMALL = "Buffer overflow when allocating memory for batch_prefill_tmp_v. Increase the workspace buffer size."


class Stream:
    """What the device does: at once, or when the test lets it."""

    def __init__(self) -> None:
        self.is_held = False
        self._launched: list[Callable[[], object]] = []

    def launch(self, work: Callable[[], object]) -> None:
        self._launched.append(work)
        if not self.is_held:
            self.release()

    def release(self) -> None:
        self.is_held = False
        launched, self._launched = self._launched, []
        for work in launched:
            work()


class Double:
    """The module `flashinfer` of *version*."""

    def __init__(self, version: str = VERSIONS[0]) -> None:
        self.__version__ = f"{version}+double"
        self.signatures = signatures(version)
        self.stream = Stream()
        self.needed_bytes = 0
        """How large the workspace for floats must be."""
        self.error = ""
        """What every plan raises."""
        self.parts: list[int] = []
        """Into how many parts each computation splits the tokens of a row."""
        self.plans: list[str] = []
        """The calls that planned, in their order."""
        self.built: list[str] = []
        """The kernels that were compiled."""
        self.loaded: set[tuple[Any, ...]] = set()
        self.late: list[tuple[Any, ...]] = []
        """Those that a plan needed and that were not loaded: FlashInfer would compile them then."""
        self.compiled = True
        """Whether the kernels are in the cache."""
        self.modules = modules = Modules(self)
        """Those of the operations beside attention."""
        described = {
            name: SimpleNamespace(**{f"gen_{name}_module": modules.described(f"gen_{name}_module", name)})
            for name in ("norm", "page", "rope")
        }
        self.jit = SimpleNamespace(
            gen_batch_prefill_module=self._generate,
            build_jit_specs=self._build,
            gen_act_and_mul_module=modules.described("gen_act_and_mul_module", "silu_and_mul"),
            **described,
        )

    def bound(self, name: str, *arguments: Any, **named: Any) -> SimpleNamespace:
        """Return what each parameter of a function gets, or raise TypeError, as the call of that version would."""
        found = self.signatures[name].bind(*arguments, **named)
        found.apply_defaults()
        return SimpleNamespace(**found.arguments)

    def BatchDecodeWithPagedKVCacheWrapper(self, *arguments: Any, **named: Any) -> Wrapper:  # noqa: N802
        return Decode(self, "BatchDecodeWithPagedKVCacheWrapper", arguments, named)

    def BatchPrefillWithPagedKVCacheWrapper(self, *arguments: Any, **named: Any) -> Wrapper:  # noqa: N802
        return Prefill(self, "BatchPrefillWithPagedKVCacheWrapper", arguments, named)

    def fast_decode_plan(self, *arguments: Any, **named: Any) -> None:
        given = self.bound("fast_decode_plan", *arguments, **named)
        wrapper = given.self
        assert wrapper.given is not None, "the short plan needs a long one before it"
        assert wrapper.options.use_cuda_graph, "without fixed buffers the kernels would read these of the host"
        lengths = given.last_page_len
        assert lengths.data_ptr() != here(wrapper.buffers[2]).data_ptr(), "it would wait for the device"
        indptr = given.indptr if given.global_override_indptr_cpu is None else given.global_override_indptr_cpu
        assert [given.q_data_type, given.kv_data_type] == [wrapper.given.q_data_type, wrapper.given.kv_data_type]
        wrapper.check_sizes(given)
        wrapper.given = given
        wrapper.schedule(indptr, lengths, given.page_size)
        self.plans.append("fast_decode_plan")

    def _generate(self, *arguments: Any, **named: Any) -> SimpleNamespace:
        given = self.bound("gen_batch_prefill_module", *arguments, **named)
        kernels = tuple(vars(given).values())
        assert given.backend in ("fa2", "fa3")
        return SimpleNamespace(
            name=f"kernels {kernels}",
            is_compiled=self.compiled,
            get_object_paths=list,
            build_and_load=lambda: self.loaded.add(kernels),
        )

    def _build(self, *arguments: Any, **named: Any) -> None:
        names = [each.name for each in self.bound("build_jit_specs", *arguments, **named).specs]
        if broken := [name for name in names if name in self.modules.broken]:
            raise RuntimeError(self.modules.broken[broken[0]])
        self.built += names


class Wrapper:
    """What both wrappers have."""

    def __init__(self, library: Double, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.library, self._name = library, name
        self.options = self._bound("__init__", arguments, named)
        assert self.options.kv_layout in ("HND", "NHD") and self.options.jit_args is None
        assert not here(self.options.float_workspace_buffer).any(), "the workspace must be zero before its first use"
        self.given: Any = None
        """What was planned."""
        self._set_workspaces(self.options.float_workspace_buffer, torch.empty(2**16, dtype=torch.uint8))

    def reset_workspace_buffer(self, *arguments: Any, **named: Any) -> None:
        given = self._bound("reset_workspace_buffer", arguments, named)
        self._set_workspaces(given.float_workspace_buffer, given.int_workspace_buffer)

    def _set_workspaces(self, floats: Tensor, ints: Tensor) -> None:
        self._floats, self._ints = floats, here(ints)
        self._pin_memory_int_workspace_buffer = torch.full_like(self._ints, 170)

    def _bound(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> SimpleNamespace:
        return self.library.bound(f"{self._name}.{method}", self, *arguments, **named)

    def need_kernels(self) -> None:
        given = self.given
        dtypes = (given.q_data_type, given.kv_data_type, given.q_data_type, torch.int32)
        kinds = (0, given.window_left >= 0, bool(given.logits_soft_cap), False)
        kernels = (self.options.backend, *dtypes, *(self.head_dim,) * 2, *kinds)
        if kernels not in self.library.loaded:
            self.library.late.append(kernels)

    @property
    def head_dim(self) -> int:
        planned: int = self.given.head_dim if hasattr(self.given, "head_dim") else self.given.head_dim_qk
        return planned

    def schedule(self, indptr: Tensor, last_page_len: Tensor, page_size: int) -> None:
        """Divide the work, in memory of the host from which the device copies it."""
        if self.library.error:
            raise RuntimeError(self.library.error)
        if self._floats.nbytes < self.library.needed_bytes:
            raise RuntimeError(TOO_SMALL)
        lengths_B = (indptr.diff() - 1) * page_size + last_page_len
        places = (self._pin_memory_int_workspace_buffer, self._ints)
        pinned, ints = (each[: lengths_B.nbytes].view(torch.int32) for each in places)
        pinned.copy_(lengths_B)
        self.library.stream.launch(lambda: ints.copy_(pinned))

    def computed(self, given: SimpleNamespace, arrays: list[Tensor], *, causal: bool) -> Tensor:
        """Return what the device has computed once it gets there: of *arrays*, qo_indptr and those of the pages."""
        assert not given.args and not given.return_lse
        plan, layout = self.given, self.options.kv_layout
        q_THD, kv = given.q, given.paged_kv_cache
        assert q_THD.is_contiguous()
        k, v = map(here, kv if isinstance(kv, tuple) else (kv[:, 0], kv[:, 1]))
        k, v = (side if layout == "HND" else side.transpose(1, 2) for side in (k, v))
        head_dim = self.head_dim
        for name, seen in (("q", q_THD.dtype), ("kv", k.dtype)):
            planned = getattr(plan, f"{name}_data_type") or plan.q_data_type
            planned = getattr(torch, planned) if isinstance(planned, str) else planned
            if planned != seen:
                raise ValueError(f"The dtype of {name} {seen} does not match the {planned} that plan was told")
        assert q_THD.shape[1:] == (plan.num_qo_heads, head_dim)
        assert k.shape[1:] == (plan.num_kv_heads, plan.page_size, head_dim)
        out_THD = torch.empty_like(q_THD) if given.out is None else given.out
        ints, scale = self._ints, plan.sm_scale or 1 / math.sqrt(head_dim)

        def compute() -> None:
            qo_indptr, indptr, indices, last_page_len = arrays
            lengths_B = (indptr.diff() - 1) * plan.page_size + last_page_len
            assert torch.equal(ints[: lengths_B.nbytes].view(torch.int32), lengths_B), "the schedule of another step"
            parts = 1 if plan.disable_split_kv else max(1, MULTIPROCESSORS // len(lengths_B))
            self.library.parts.append(parts)
            pages = (indptr, indices, last_page_len, plan.page_size)
            how = scale, causal, plan.window_left, plan.logits_soft_cap or 0.0
            here(out_THD).copy_(_attend(here(q_THD), (k, v), qo_indptr, *pages, *how, parts=parts))

        self.library.stream.launch(compute)
        return out_THD


class Decode(Wrapper):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        given = self.options
        assert given.use_tensor_cores and given.backend == "fa2", "these kernels are not compiled"
        named = (given.paged_kv_indptr_buffer, given.paged_kv_indices_buffer, given.paged_kv_last_page_len_buffer)
        self.buffers: tuple[Tensor, ...] = ()
        if given.use_cuda_graph:
            assert len(named[0]) == len(named[2]) + 1
            self.buffers = tuple(map(here, named))

    def check_sizes(self, given: SimpleNamespace) -> None:
        beyond = self._pin_memory_int_workspace_buffer[4 * len(given.last_page_len) :]
        unwritten = "blocks of the grid beyond the rows would read indices that nobody wrote"
        assert given.fixed_split_size in (None, -1) and not (given.disable_split_kv and beyond.any()), unwritten
        if len(given.last_page_len) != len(self.buffers[2]):
            raise ValueError("The batch size should be fixed in cudagraph mode")
        if len(given.indices) > len(self.buffers[1]):
            raise ValueError("The size of indices should be less than or equal to the allocated buffer")

    def plan(self, *arguments: Any, **named: Any) -> None:
        self.given = given = self._bound("plan", arguments, named)
        values = (given.indptr, given.indices, given.last_page_len)
        assert all(each.dtype == torch.int32 for each in values)
        self._arrays = self.buffers
        if self.buffers:
            self.check_sizes(given)
            pairs = list(zip(self.buffers, values, strict=True))
            self.library.stream.launch(lambda: [buffer[: len(value)].copy_(value) for buffer, value in pairs])
        else:
            self._arrays = tuple(map(torch.empty_like, values))
            pairs = list(zip(self._arrays, values, strict=True))
            self.library.stream.launch(lambda: [place.copy_(value) for place, value in pairs])
        self.need_kernels()
        self.schedule(given.indptr, given.last_page_len, given.page_size)
        self.library.plans.append("decode")

    def run(self, *arguments: Any, **named: Any) -> Tensor:
        given = self._bound("run", arguments, named)
        num_rows = len(self._arrays[2])
        assert len(given.q) == num_rows, "it would write beyond its output"
        return self.computed(given, [torch.arange(num_rows + 1), *self._arrays], causal=False)


class Prefill(Wrapper):
    def plan(self, *arguments: Any, **named: Any) -> None:
        self.given = given = self._bound("plan", arguments, named)
        values = [given.qo_indptr, given.paged_kv_indptr, given.paged_kv_indices, given.paged_kv_last_page_len]
        assert all(each.dtype == torch.int32 for each in values) and given.max_sequence_kv is None
        assert given.max_token_per_sequence in (None, int(given.qo_indptr.diff().max()))
        self._arrays = arrays = list(map(torch.empty_like, values))
        self.library.stream.launch(lambda: [place.copy_(value) for place, value in zip(arrays, values, strict=True)])
        self.need_kernels()
        self.schedule(given.paged_kv_indptr, given.paged_kv_last_page_len, given.page_size)
        self.library.plans.append("prefill")

    def run(self, *arguments: Any, **named: Any) -> Tensor:
        return self.computed(self._bound("run", arguments, named), self._arrays, causal=self.given.causal)


def _attend(
    q_THD: Tensor,
    kv: tuple[Tensor, Tensor],
    qo_indptr: Tensor,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    page_size: int,
    sm_scale: float,
    causal: bool,
    window_left: int,
    cap: float,
    parts: int,
) -> Tensor:
    rows = []
    for row, (begin, end) in enumerate(pairwise(qo_indptr.tolist())):
        pages = indices[indptr[row] : indptr[row + 1]].long()
        length = (len(pages) - 1) * page_size + int(last_page_len[row])
        k_KCD, v_KCD = (side[pages].transpose(0, 1).flatten(1, 2)[:, :length].float() for side in kv)
        distance = torch.arange(length - (end - begin), length)[:, None] - torch.arange(length)
        seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if window_left >= 0:
            seen &= distance <= window_left
        groups = q_THD.shape[1] // len(k_KCD)
        q_HQD = q_THD[begin:end].transpose(0, 1).float() * sm_scale
        scores_HQC = q_HQD @ k_KCD.repeat_interleave(groups, 0).transpose(1, 2)
        scores_HQC = (cap * (scores_HQC / cap).tanh() if cap else scores_HQC).masked_fill(~seen, float("-inf"))
        most_HQ1 = scores_HQC.amax(-1, keepdim=True)
        p_HQC = (scores_HQC - most_HQ1).exp()
        o_HQD, sum_HQ1 = torch.zeros_like(q_HQD), torch.zeros_like(most_HQ1)
        size = -(-length // parts)
        for part in (slice(first, first + size) for first in range(0, length, size)):
            o_HQD += p_HQC[..., part] @ v_KCD.repeat_interleave(groups, 0)[:, part]
            sum_HQ1 += p_HQC[..., part].sum(-1, keepdim=True)
        rows.append((o_HQD / sum_HQ1).transpose(0, 1))
    return torch.cat(rows).to(q_THD.dtype)


def fake_record(call: Callable[[], Tensor], device: torch.device, pool: object) -> tuple[object, Tensor, object]:
    """As `graphs.record`, on a CPU: the call is made again, and its result goes to where it went first."""
    result = call()

    def replay() -> None:
        again = call()
        if result is not None:
            result.copy_(again)

    return replay, result, pool


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
        self.early: bool | None = None
        """What kernels must be told of whether they may begin early; None: anything."""
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
        assert given.weight.shape == given.input.shape[-1:] and self.early in (None, given.enable_pdl)
        assert given.input.dtype == given.weight.dtype == given.out.dtype
        return lambda at: at.out.copy_(normed(at.input.float(), at.weight, at.eps))

    def _fused_add_rmsnorm(self, given: SimpleNamespace) -> Callable[[SimpleNamespace], object]:
        assert given.input.dim() == 2 and given.residual.shape == given.input.shape
        assert given.weight.shape == given.input.shape[-1:] and self.early in (None, given.enable_pdl)
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
        assert given.input.is_contiguous() and given.out.is_contiguous() and self.early in (None, given.enable_pdl)
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
