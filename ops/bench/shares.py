"""What the steps of a model must at least read and compute, as a share of what the machine can do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stages.generate.model.spec import ModelSpec, tensor_shapes


@dataclass(frozen=True, slots=True)
class Step:
    """What one forward pass computed, and in which time."""

    seconds: float
    decode_rows: int
    decode_context: int
    """Tokens whose keys and values the decode rows read, together; as if no window hid any."""
    prefill_tokens: int
    prefill_samples: int
    """Prompts that it brought to their end."""

    @property
    def phase(self) -> str:
        """`decode`, `prefill`, or `mixed` when it was both."""
        if not self.prefill_tokens:
            return "decode"
        return "mixed" if self.decode_rows else "prefill"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a model costs: counts are of parameters."""

    dense: int
    """Of the layers, without experts. Looking up embeddings costs next to nothing and is not counted."""
    head: int
    experts: int
    """Of all experts together."""
    chosen_share: float
    """Of the experts, how many a token goes to."""
    weight_bytes: int
    """Of one parameter."""
    kv_bytes: int
    """Of the keys and values of one token."""

    def bytes_read(self, step: Step) -> float:
        """Return what a decode step must read: weights once, and what its rows have in the cache.

        Of experts it reads those that one row at least goes to: as many as when rows chose at random.
        """
        reached = 1 - (1 - self.chosen_share) ** step.decode_rows
        num_weights = self.dense + self.head + self.experts * reached
        return num_weights * self.weight_bytes + step.decode_context * self.kv_bytes

    def operations(self, step: Step) -> float:
        """Return what a step must compute: two operations per weight and token, those of the head where it samples."""
        per_token = self.dense + self.experts * self.chosen_share
        num_tokens = step.prefill_tokens + step.decode_rows
        return 2 * (per_token * num_tokens + self.head * (step.prefill_samples + step.decode_rows))


def cost_of(spec: ModelSpec, dtype_bytes: int) -> Cost:
    """Return what *spec* costs in a dtype of *dtype_bytes*."""
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
    """Return the least time that the decode steps among *steps* could take over the time that they took; 0: none."""
    decodes = [step for step in steps if step.phase == "decode"]
    seconds = sum(step.seconds for step in decodes)
    return sum(map(cost.bytes_read, decodes)) / bytes_per_s / seconds if decodes else 0.0


def prefill_share(steps: Sequence[Step], cost: Cost, operations_per_s: float) -> float:
    """As `decode_share`, of the steps that compute prompts, alone or beside decode rows."""
    prefills = [step for step in steps if step.phase != "decode"]
    seconds = sum(step.seconds for step in prefills)
    return sum(map(cost.operations, prefills)) / operations_per_s / seconds if prefills else 0.0
