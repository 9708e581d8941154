"""From a `BatchPlan` to token ids. Holds the weights, KV pages and page tables of one rank; no Redis, no schedule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from stages.generate.attention import ATTENTION, Attention, AttentionShape
from stages.generate.forward.batch import PageTables, build_batch
from stages.generate.forward.packing import pack_weights, packs
from stages.generate.forward.sampler import sample
from stages.generate.forward.scores import score
from stages.generate.forward.weights import Progress, dummy_weights, load_weights
from stages.generate.kernels.decoder import KernelDecoder
from stages.generate.kvcache.pool import allocate
from stages.generate.model.decoder import Decoder
from stages.generate.model.spec import ModelSpec
from stages.generate.schedule.plan import BatchPlan, Computed, Sample

# T = packed tokens, B = rows of the batch, R = rows that sample, E = hidden size, V = vocabulary


class Computer(Protocol):
    """What computes the layers: torch, or the kernels for CPUs."""

    def forward(self, plan: BatchPlan, tables: PageTables, kv_L2PKSD: Tensor) -> tuple[Tensor, Sequence[int]]:
        """Compute one step; return x_TE, the last layer's output for each token, and B + 1 numbers: where in T each
        row begins."""
        ...

    def head(self, x_TE: Tensor, rows_R: Sequence[int], wanted_R: Sequence[bool]) -> tuple[list[int], Tensor]:
        """Return, for some tokens of x_TE, the token id with the largest logit, or -1 if a logit is NaN.

        Return also logits_RV, float32. Only the rows that are wanted may be read.
        """
        ...

    def logits(self, x_NE: Tensor) -> Tensor:
        """Return logits_NV, float32, of some tokens that `forward` returned."""
        ...


class TorchComputer:
    """The decoder and the attention in torch."""

    def __init__(self, decoder: Decoder, attention: Attention, device: torch.device) -> None:
        self._decoder, self._attention, self._device = decoder, attention, device

    def forward(self, plan: BatchPlan, tables: PageTables, kv_L2PKSD: Tensor) -> tuple[Tensor, Sequence[int]]:
        """See `Computer`."""
        batch = build_batch(plan, tables, self._device)
        return self._decoder.forward(batch, self._attention.plan(batch), kv_L2PKSD), batch.query_starts

    def head(self, x_TE: Tensor, rows_R: Sequence[int], wanted_R: Sequence[bool]) -> tuple[list[int], Tensor]:
        """See `Computer`. All rows are filled in."""
        logits_RV = self.logits(x_TE[torch.tensor(rows_R, dtype=torch.long, device=self._device)])
        return logits_RV.argmax(-1).where(~logits_RV.isnan().any(-1), -1).tolist(), logits_RV

    def logits(self, x_NE: Tensor) -> Tensor:
        """See `Computer`."""
        return self._decoder.logits(x_NE)


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
        kernels: str = "torch",
        quantization: str = "none",
        threads: int = 0,
        dummy: bool = False,
        progress: Progress = lambda done_bytes, total_bytes: None,
    ) -> None:
        """Load the weights of the checked *folder* and allocate the pages.

        *threads* 0 leaves torch's number. With *kernels*, a variant that this machine can use, *attention* does not
        count, *quantization* may be int8, and torch itself gets one thread: what it sums must not depend on their
        number. With *dummy* the weights are random, and only config.json of the folder is read.
        """
        if threads:
            torch.set_num_threads(threads)
        threads = torch.get_num_threads()
        self.device, self.dtype = device, dtype
        packed = kernels != "torch" or packs(device, dtype)
        load_all = dummy_weights if dummy else partial(load_weights, folder=folder, map_tied=packed)
        weights = load_all(spec, dtype=self.dtype, device=self.device, progress=progress)
        self._computer: Computer
        if kernels != "torch":
            self._computer = KernelDecoder(spec, weights, variant=kernels, quantization=quantization, threads=threads)
            torch.set_num_threads(1)
        else:
            if packed:
                pack_weights(weights)
            shape = AttentionShape(
                spec.num_heads, spec.num_kv_heads, spec.head_dim, page_size, spec.window, self.dtype, self.device
            )
            self._computer = TorchComputer(Decoder(spec, weights), ATTENTION[attention](shape), device)
        self._tables = PageTables(max_running_requests, max_seq_len, page_size)
        self.kv_L2PKSD = allocate(spec, num_pages, page_size, self.dtype, self.device)

    @torch.inference_mode()
    def logits(self, plan: BatchPlan) -> Tensor:
        """Compute one step; return logits_RV, float32, for the rows that sample, in row order."""
        x_TE, _, rows_R, samples = self._hidden(plan)
        return self._computer.head(x_TE, rows_R, [True] * len(samples))[1]

    @torch.inference_mode()
    def forward(self, plan: BatchPlan) -> Computed:
        """Compute one step.

        Raises:
            ArithmeticError: A logit is not a number. Nobody knows which token should follow.
        """
        x_TE, starts, rows_R, samples = self._hidden(plan)
        drawn = [index for index, how in enumerate(samples) if how.changes_logits or how.params.temperature > 0]
        wanted_R = [how.params.logprobs is not None for how in samples]
        for index in drawn:
            wanted_R[index] = True
        token_ids, logits_RV = self._computer.head(x_TE, rows_R, wanted_R)
        if -1 in token_ids:
            raise ArithmeticError("the model's output is not a number (NaN)")
        if drawn:
            logits_DV = logits_RV if len(drawn) == len(samples) else logits_RV[drawn]
            for index, token in zip(drawn, sample(logits_DV, [samples[index] for index in drawn]), strict=True):
                token_ids[index] = token
        return Computed(token_ids, score(plan, starts, x_TE, self._computer.logits, logits_RV, token_ids))

    def _hidden(self, plan: BatchPlan) -> tuple[Tensor, Sequence[int], list[int], list[Sample]]:
        """Return x_TE, where each row begins in T, and of the rows that sample the last token's index in T and how."""
        if isinstance(self._computer, KernelDecoder) and torch.get_num_threads() != 1:
            torch.set_num_threads(1)  # another engine of this process has changed it
        self._tables.update(plan.rows)
        x_TE, starts = self._computer.forward(plan, self._tables, self.kv_L2PKSD)
        last = [(end - 1, row.sample) for row, end in zip(plan.rows, starts[1:], strict=True) if row.sample is not None]
        return x_TE, starts, [index for index, _ in last], [how for _, how in last]
