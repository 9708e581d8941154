"""FlashInfer's paged wrappers, computed in torch from the same arguments: those of 0.6.13, by name and in order."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

__version__ = "0.6.13+double"


def gen_batch_prefill_module(*arguments: Any) -> SimpleNamespace:
    assert len(arguments) == 11 and arguments[0] == "fa2"
    return SimpleNamespace(name=f"kernels {arguments[1:]}", is_compiled=True, build_and_load=lambda: None)


jit = SimpleNamespace(gen_batch_prefill_module=gen_batch_prefill_module)


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        assert kv_layout == "HND" and backend == "fa2" and use_tensor_cores and jit_args is None
        assert not float_workspace_buffer.any(), "the workspace must be zero before its first use"
        self.buffers = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None and paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self.buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        *,
        sm_scale: float | None = None,
    ) -> None:
        for tensor in (indptr, indices, last_page_len):
            assert tensor.dtype == torch.int32 and tensor.device.type == "cpu"
        if self.buffers is not None:
            assert len(last_page_len) == len(self.buffers[2]) and len(indices) <= len(self.buffers[1])
            for buffer, value in zip(self.buffers, (indptr, indices, last_page_len), strict=True):
                buffer[: len(value)] = value
            indptr, indices, last_page_len = self.buffers
        self.planned = (None, indptr, indices, last_page_len, page_size, sm_scale, window_left)
        self.shape = (num_qo_heads, num_kv_heads, head_dim, q_data_type, kv_data_type)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
        assert (*q.shape[1:], q.dtype) == (self.shape[0], self.shape[2], self.shape[3])
        assert paged_kv_cache[0].dtype == self.shape[4] and paged_kv_cache[0].shape[1] == self.shape[1]
        result = _attend(q, paged_kv_cache, *self.planned)
        return result if out is None else out.copy_(result)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert kv_layout == "HND" and backend == "fa2"

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        max_token_per_sequence: int | None = None,
    ) -> None:
        assert causal and q_data_type == kv_data_type
        assert max_token_per_sequence in (None, int(qo_indptr.diff().max()))
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert tensor.dtype == torch.int32 and tensor.device.type == "cpu"
        self.shape = (num_qo_heads, num_kv_heads, head_dim_qk)
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.planned = (qo_indptr, *pages, page_size, sm_scale, window_left)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        return _attend(q, paged_kv_cache, *self.planned)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: torch.dtype | None = None,
    kv_data_type: torch.dtype | None = None,
    *,
    sm_scale: float | None = None,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    assert self.buffers is not None and global_override_indptr_cpu is indptr
    assert self.shape == (num_qo_heads, num_kv_heads, head_dim, q_data_type, kv_data_type)


def _attend(
    q_THD: Tensor,
    kv: tuple[Tensor, Tensor],
    qo_indptr: Tensor | None,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    page_size: int,
    sm_scale: float | None,
    window_left: int,
) -> Tensor:
    assert isinstance(kv, tuple) and q_THD.is_contiguous() and kv[0].shape[2] == page_size
    starts = list(range(len(q_THD) + 1)) if qo_indptr is None else qo_indptr.tolist()
    rows = []
    for row, (begin, end) in enumerate(pairwise(starts)):
        pages = indices[indptr[row] : indptr[row + 1]].long()
        length = (len(pages) - 1) * page_size + int(last_page_len[row])
        k_KCD, v_KCD = (side[pages].transpose(0, 1).flatten(1, 2)[:, :length].float() for side in kv)
        distance = torch.arange(length - (end - begin), length)[:, None] - torch.arange(length)
        seen = distance >= 0
        if window_left >= 0:
            seen &= distance <= window_left
        groups = q_THD.shape[1] // len(k_KCD)
        q_HQD = q_THD[begin:end].transpose(0, 1).float()
        o_HQD = torch.nn.functional.scaled_dot_product_attention(
            q_HQD,
            k_KCD.repeat_interleave(groups, 0),
            v_KCD.repeat_interleave(groups, 0),
            attn_mask=seen,
            scale=sm_scale,
        )
        rows.append(o_HQD.transpose(0, 1))
    return torch.cat(rows).to(q_THD.dtype)
