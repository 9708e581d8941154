"""FlashInfer's paged attention on a CPU. Each call is bound to the signature that a version has (`tests/signatures`).
It is computed in torch from the same arrays. A copy to the device happens when the device gets there.

As in FlashInfer the rounding of a row depends on its batch: with few rows its tokens are split into parts, whose
results are merged, unless a plan disables that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from support.flashinfer_signatures import VERSIONS, signatures
from support.fused_double import Modules, here
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
        self._pinned = torch.empty_like(self._ints)

    def _bound(self, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> SimpleNamespace:
        return self.library.bound(f"{self._name}.{method}", self, *arguments, **named)

    def need_kernels(self) -> None:
        given = self.given
        dtypes = (given.q_data_type, given.kv_data_type, given.q_data_type, torch.int32)
        kernels = (self.options.backend, *dtypes, *(self.head_dim,) * 2, 0, given.window_left >= 0, False, False)
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
        pinned, ints = (each[: lengths_B.nbytes].view(torch.int32) for each in (self._pinned, self._ints))
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
            how = (scale, causal, plan.window_left, parts)
            here(out_THD).copy_(_attend(here(q_THD), (k, v), qo_indptr, *pages, *how))

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
        unwritten = "blocks of the grid beyond the rows would read indices that nobody wrote"
        assert not given.disable_split_kv and given.fixed_split_size in (None, -1), unwritten
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
        scores_HQC = (q_HQD @ k_KCD.repeat_interleave(groups, 0).transpose(1, 2)).masked_fill(~seen, float("-inf"))
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
    return lambda: result.copy_(call()), result, pool
