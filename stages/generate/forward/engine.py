"""From a `BatchPlan` to token ids. Holds the weights, KV pages and page tables of one rank; no Redis, no schedule."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from stages.generate.attention import ATTENTION, AttentionShape
from stages.generate.forward.batch import ForwardBatch, PageTables, build_batch
from stages.generate.forward.packing import pack_weights, packs
from stages.generate.forward.sampler import sample
from stages.generate.forward.scores import score
from stages.generate.forward.weights import Progress, dummy_weights, load_weights
from stages.generate.kvcache.pool import allocate
from stages.generate.model.decoder import Decoder
from stages.generate.model.spec import ModelSpec
from stages.generate.schedule.plan import BatchPlan, Computed


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
        attention: str = "reference",
        threads: int = 0,
        dummy: bool = False,
        progress: Progress = lambda done_bytes, total_bytes: None,
    ) -> None:
        """Load the weights of the checked *folder* and allocate the pages. *threads* 0 leaves torch's number.

        With *dummy* the weights are random, and only config.json of the folder is read.
        """
        if threads:
            torch.set_num_threads(threads)
        self.device, self.dtype = device, dtype
        self._attention = ATTENTION[attention](
            AttentionShape(
                spec.num_heads, spec.num_kv_heads, spec.head_dim, page_size, spec.window, self.dtype, self.device
            )
        )
        packed = packs(device, dtype)
        load = dummy_weights if dummy else partial(load_weights, folder=folder, map_tied=packed)
        weights = load(spec, dtype=self.dtype, device=self.device, progress=progress)
        if packed:
            pack_weights(weights)
        self._decoder = Decoder(spec, weights)
        self._tables = PageTables(max_running_requests, max_seq_len, page_size)
        self.kv_L2PKSD = allocate(spec, num_pages, page_size, self.dtype, self.device)

    @torch.inference_mode()
    def logits(self, plan: BatchPlan) -> torch.Tensor:
        """Compute one step; return logits_RV, float32, for the rows that sample, in row order."""
        batch, x_TE = self._hidden(plan)
        return self._decoder.logits(x_TE[batch.logits_rows_R])

    @torch.inference_mode()
    def forward(self, plan: BatchPlan) -> Computed:
        """Compute one step."""
        batch, x_TE = self._hidden(plan)
        logits_RV = self._decoder.logits(x_TE[batch.logits_rows_R])
        token_ids = sample(logits_RV, [row.sample for row in plan.rows if row.sample])
        return Computed(token_ids, score(plan, batch, x_TE, self._decoder.logits, logits_RV, token_ids))

    def _hidden(self, plan: BatchPlan) -> tuple[ForwardBatch, torch.Tensor]:
        """Return the step as tensors, and the last layer's output for each of its tokens."""
        self._tables.update(plan.rows)
        batch = build_batch(plan, self._tables, self.device)
        return batch, self._decoder.forward(batch, self._attention.plan(batch), self.kv_L2PKSD)
