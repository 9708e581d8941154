"""The interface between the schedule and `forward`: the rows, tokens and pages of one step, and its result.

Knows no tensors. A plan carries only what is new: every rank keeps the page tables, and a row adds pages to its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.events import SamplingParams, Score


@dataclass(frozen=True, slots=True)
class Sample:
    """How the token after a row's last one is drawn: a function of the logits, (seed, position) and the tokens so far.

    Only rank 0 uses it, and only before the next token is known, because `token_ids` is the schedule's own list.
    """

    params: SamplingParams
    position: int
    """Index of the new token in prompt + output."""
    forbidden: tuple[int, ...]
    """Token ids that must not come out: end-of-sequence and stop ids before `min_tokens`, and ends of bad words."""
    token_ids: Sequence[int] = ()
    """Prompt + output; empty when no penalty needs them."""
    prompt_length: int = 0

    @property
    def changes_logits(self) -> bool:
        """Whether the token is chosen from other logits than the model's own."""
        return bool(self.forbidden) or self.params.shapes


@dataclass(frozen=True, slots=True)
class Scoring:
    """Asks for the log-probabilities of a prompt's tokens."""

    targets: tuple[int, ...]
    """The token that follows each of the row's tokens; one fewer if the prompt ends with the row."""
    num_top: int


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One request in one step: a decode row has one token, a prefill chunk one or more."""

    table: int
    """Row of the page table, held by this request from its admission to its end: 0 <= table < max_running_requests."""
    start: int
    """Position of the first token of `token_ids`; the keys and values of all positions before it are in the pages."""
    token_ids: tuple[int, ...]
    new_pages: tuple[int, ...]
    """Pages appended to this table row before the step. When `start` is 0 they are the whole row."""
    first_page: int
    """Index in the table row at which `new_pages` begin."""
    sample: Sample | None
    """None: a chunk of a prompt that goes on in a later step, so no token is drawn."""
    scoring: Scoring | None = None
    """None: the client does not ask for log-probabilities of the prompt."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The rows of one step, decode rows first, then prefill chunks."""

    step: int
    rows: tuple[PlanRow, ...]
    num_decode_rows: int


@dataclass(frozen=True, slots=True)
class Work:
    """What is there to compute, before a plan is made."""

    streams: int
    """Requests that decode."""
    context: int
    """Positions that their next tokens attend to, of all together."""
    prompts: int
    """Requests whose prompts are not computed yet."""
    position: int
    """Where the first of those goes on; 0 if none has begun."""


@dataclass(frozen=True, slots=True)
class RowScores:
    """The log-probabilities of the tokens of one row."""

    token: Score | None = None
    """Of the token that was drawn."""
    prompt: tuple[Score, ...] = ()
    """One for each of `Scoring.targets`."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a plan."""

    token_ids: Sequence[int]
    """One for each row that samples, in row order."""
    scores: Mapping[int, RowScores] = field(default_factory=dict)
    """By `PlanRow.table`, for the rows that ask for them."""
