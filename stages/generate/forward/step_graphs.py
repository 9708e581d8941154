"""CUDA graphs of --gpu-new, which no GPU has run yet: of prompts, and of decode steps with few operations around."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from stages.generate.attention.flashinfer import FlashInferAttention, padded_rows
from stages.generate.batch import ForwardBatch, HostBatch, PageTables, fill_in, on_device
from stages.generate.forward import graphs
from stages.generate.forward.graphs import DecodeGraphs
from stages.generate.model.decoder import Decoder, Ropes

# T = tokens of a recording, N = tokens of a step, R = rows of a recording, B = decode rows of a step, E = hidden size,
# L = layers, P = pages, K = kv heads, S = slots of a page, H = query heads, D = head dim

PROMPT_STEP: Final = 256
"""Prompts are padded to a multiple of this number of tokens."""
MOST_PROMPT_TOKENS: Final = 2048
"""More tokens keep a GPU busy for longer than the host takes to launch a step."""

logger = structlog.get_logger()


class Places(NamedTuple):
    """Tensors through which the recorded parts of a prompt and the attentions pass their results on."""

    x_TE: Tensor
    q_THD: Tensor
    o_THD: Tensor

    def of(self, num_tokens: int) -> Places:
        """Return the places of the first tokens."""
        return Places(*(place[:num_tokens] for place in self))


class StepGraphs(DecodeGraphs):
    """See `DecodeGraphs`; the numbers of a decode step go to the device with FlashInfer's indices, in one copy, and the
    recording of a step replaces the placeholders.

    A step of prompts is padded to one of some sizes. Its parts between two attentions are recorded. FlashInfer plans
    the attention for the tokens of the step, and it is launched between the replays.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: FlashInferAttention,
        kv_L2PKSD: Tensor,
        tables: PageTables,
        most_rows: int,
        most_step_rows: int,
        sizes: Sequence[int],
    ) -> None:
        """Record decode steps, then prompts of *sizes*, which ascend. *most_step_rows*: see `DecodeGraphs`."""
        self._last_R = torch.zeros(most_step_rows, dtype=torch.int64, device=kv_L2PKSD.device)
        self._spare_slot = (kv_L2PKSD.shape[2] - 1) * kv_L2PKSD.shape[4]
        super().__init__(decoder, attention, kv_L2PKSD, tables, most_rows, most_step_rows)
        began_s, self._sizes, self._kv_of_layers = time.monotonic(), sizes, list(kv_L2PKSD)
        hidden, heads = (sizes[-1], decoder.hidden_size), (sizes[-1], attention.num_heads, kv_L2PKSD.shape[-1])
        self._places = Places(*(kv_L2PKSD.new_zeros(shape) for shape in (hidden, heads, heads)))
        self._prompts = {size: self._parts(decoder, size) for size in reversed(sizes)}
        seconds = round(time.monotonic() - began_s, 2)
        logger.info("prompts_recorded", sizes=sizes, seconds=seconds)

    def records(self, batch: HostBatch) -> bool:
        """See `DecodeGraphs`."""
        is_prompt = not batch.num_decode_rows and batch.inputs_3T.shape[1] <= self._sizes[-1]
        return is_prompt or super().records(batch)

    def forward(self, batch: HostBatch, last_R: Tensor | None) -> Tensor:
        """See `DecodeGraphs`; also compute prompts alone."""
        if not batch.num_decode_rows:
            return self._prompt(batch)
        num_rows = len(batch.seq_lens)
        replay, x_RE = self._graphs[padded_rows(num_rows)]
        if last_R is not None:
            self._last_R[: len(last_R)].copy_(last_R)
        self._attention.prepare(batch, self._padded(batch.inputs_3T, len(x_RE)))
        replay()
        return x_RE[:num_rows].clone()

    def _inputs(self, num_rows: int) -> Tensor:
        inputs_3R = self._attention.inputs(num_rows)
        inputs_3R.copy_(self._padding_31.expand(-1, num_rows))
        return inputs_3R

    def _fill_in(self, batch: ForwardBatch) -> None:
        fill_in(batch.token_ids_T, self._last_R)

    def _padded(self, inputs_3N: np.ndarray, size: int) -> np.ndarray:
        inputs_3T = np.zeros((3, size), np.int32)
        inputs_3T[2] = self._spare_slot
        inputs_3T[:, : inputs_3N.shape[1]] = inputs_3N
        return inputs_3T

    def _parts(self, decoder: Decoder, num_tokens: int) -> tuple[Tensor, list[Callable[[], object]]]:
        """Record the parts of a prompt: up to the first attention, between two, and after the last one."""
        token_ids_T, positions_T, slots_T = inputs_3T = self._padding_31.repeat(1, num_tokens)
        at, replays = self._places.of(num_tokens), list[Callable[[], object]]()
        ropes: list[Ropes] = [()]

        def part(number: int) -> None:
            if number:
                x_TE, y_TE = decoder.finish(decoder.layers[number - 1], at.x_TE, at.o_THD)
            else:
                x_TE, y_TE, ropes[0] = decoder.begin(token_ids_T, positions_T)
            if x_TE is not at.x_TE:
                at.x_TE.copy_(x_TE)
            if number < len(decoder.layers):
                kv_2PKSD = self._kv_of_layers[number]
                q_THD, k_TKD, v_TKD = decoder.project(decoder.layers[number], y_TE, ropes[0], slots_T, kv_2PKSD)
                at.q_THD.copy_(q_THD)
                if k_TKD is not None and v_TKD is not None:
                    self._attention.writing(slots_T)(kv_2PKSD, k_TKD, v_TKD)

        for number in range(len(decoder.layers) + 1):
            replay, _, self._pool = graphs.record(partial(part, number), self._device, self._pool)
            replays.append(replay)
        return inputs_3T, replays

    def _prompt(self, batch: HostBatch) -> Tensor:
        """Compute prompts alone; return x_NE."""
        num_tokens = batch.inputs_3T.shape[1]
        size = next(size for size in self._sizes if size >= num_tokens)
        inputs_3T, (first, *others) = self._prompts[size]
        inputs_3T.copy_(on_device(self._padded(batch.inputs_3T, size), self._device))
        attend = self._attention.attending(self._attention.prepare(batch), inputs_3T[2])
        x_NE, q_NHD, o_NHD = self._places.of(num_tokens)
        first()
        for kv_2PKSD, replay in zip(self._kv_of_layers, others, strict=True):
            attend(q_NHD, None, None, kv_2PKSD, o_NHD)
            replay()
        return x_NE.clone()


def prompt_sizes(max_prefill_length: int) -> list[int]:
    """Return the numbers of tokens for which prompts are recorded, if a step has at most *max_prefill_length*."""
    most = min(MOST_PROMPT_TOKENS, -(-max_prefill_length // PROMPT_STEP) * PROMPT_STEP)
    return list(range(PROMPT_STEP, most + 1, PROMPT_STEP))
