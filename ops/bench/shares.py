"""The least bytes and operations of a model's steps, as a share of the machine's limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stages.generate.model.spec import ModelSpec, tensor_shapes


@dataclass(frozen=True, slots=True)
class Step:
    """The work and the time of one forward pass."""

    seconds: float
    decode_rows: int
    decode_context: int
    """Tokens with keys and values that the decode rows read, together, without regard to sliding windows."""
    prefill_tokens: int
    prefill_samples: int
    """Prompts that it completed."""

    @property
    def phase(self) -> str:
        """`decode`, `prefill`, or `mixed` for both."""
        if not self.prefill_tokens:
            return "decode"
        return "mixed" if self.decode_rows else "prefill"


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a model, in parameters."""

    dense: int
    """Parameters of the layers, without experts. Embedding lookups cost almost nothing and are not counted."""
    head: int
    experts: int
    """Parameters of all experts together."""
    chosen_share: float
    """Share of the experts that a token uses."""
    weight_bytes: int
    """Bytes per parameter."""
    kv_bytes: int
    """Bytes of the keys and values of one token."""

    def bytes_read(self, step: Step) -> float:
        """Return the bytes that a decode step must read: weights once, and the cached tokens of its rows.

        It reads every expert that at least one row uses: the expected number if rows choose at random.
        """
        reached = 1 - (1 - self.chosen_share) ** step.decode_rows
        num_weights = self.dense + self.head + self.experts * reached
        return num_weights * self.weight_bytes + step.decode_context * self.kv_bytes

    def operations(self, step: Step) -> float:
        """Return the operations of a step: two per weight and token; the head only where a row samples."""
        per_token = self.dense + self.experts * self.chosen_share
        num_tokens = step.prefill_tokens + step.decode_rows
        return 2 * (per_token * num_tokens + self.head * (step.prefill_samples + step.decode_rows))


def cost_of(spec: ModelSpec, dtype_bytes: int) -> Cost:
    """Return the cost of *spec* in a dtype of *dtype_bytes*."""
    sizes = {name: math.prod(shape) for name, shape in tensor_shapes(spec).items()}
    embedding = sizes.pop("model.embed_tokens.weight")
    head = sizes.pop("lm_head.weight", embedding)  # tied
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return Cost(
        dense=sum(sizes.values()) - experts,
        head=head,
        experts=experts,
        chosen_share=spec.experts.experts_per_token / spec.experts.num_experts if experts else 0.0,
        weight_bytes=dtype_bytes,
        kv_bytes=2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype_bytes,
    )


def decode_share(steps: Sequence[Step], cost: Cost, bytes_per_s: float) -> float:
    """Return the least possible time of the decode steps divided by their real time; 0 without such steps."""
    decodes = [step for step in steps if step.phase == "decode"]
    seconds = sum(step.seconds for step in decodes)
    return sum(map(cost.bytes_read, decodes)) / bytes_per_s / seconds if decodes else 0.0


def prefill_share(steps: Sequence[Step], cost: Cost, operations_per_s: float) -> float:
    """Like `decode_share`, for the steps that compute prompts, alone or beside decode rows."""
    prefills = [step for step in steps if step.phase != "decode"]
    seconds = sum(step.seconds for step in prefills)
    return sum(map(cost.operations, prefills)) / operations_per_s / seconds if prefills else 0.0
