"""The interface between the schedule and `forward`: the rows, tokens and pages of one step, and its result.

Knows no tensors. A plan carries only what is new: every rank keeps the page tables, and a row adds pages to its own.
Nobody changes a plan, a row or a result. They are not frozen because every step makes hundreds: frozen ones take twice
as long. A sample is changed by its request alone, once the step that it was for has landed.

A plan may be made before the tokens of the step before are known. Then a row has a placeholder in the place of such a
token: -1 minus the index of the token among those that the step before samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from pipeline.events import SamplingParams, Score
from stages.generate.schedule.bad_words import BadWords
from stages.generate.schedule.seen import Seen

NOT_A_NUMBER: Final = -1
"""In place of a token: a logit is NaN, or the largest is infinite, so no token can follow."""

Words = npt.NDArray[np.uint32]
"""One bit for each token: bit t % 32 of word t // 32 is that of token t. There may be more bits than tokens."""


class Matcher(Protocol):
    """Follows the output of one request through its grammar."""

    @property
    def error(self) -> str:
        """Why it gave up; empty: it did not. It is known once `allowed` has returned."""
        ...

    def advance(self, token: int) -> None:
        """Take in the next token of the output, after which it goes on."""
        ...

    def allowed(self) -> Words | None:
        """Return for each token whether it may come next: 1 if so. Wait until that is known. None: it gave up."""
        ...


@dataclass(slots=True)
class Sample:
    """How the token after a row's last one is drawn: a function of the logits, (seed, position) and the tokens so far.

    Only rank 0 uses it.
    """

    params: SamplingParams
    position: int
    """Index of the new token in prompt + output."""
    forbidden: tuple[int, ...]
    """Token ids that must not come out: end-of-sequence and stop ids before `min_tokens`, and ends of bad words."""
    token_ids: Sequence[int] = ()
    """Prompt + output, for `settled`; empty when it does not need them. It is the schedule's own list, and goes on."""
    prompt_length: int = 0
    bad_words: BadWords | None = None
    """What `settled` adds the ends of."""
    matcher: Matcher | None = None
    """What `settled` asks for `allowed`."""
    allowed: Words | None = None
    """Which tokens the grammar allows; None: all."""
    seen: Seen | None = None
    """The tokens that penalties apply to; None: there are no penalties. It is the request's own record: `settled`
    counts the tokens before `position`, and a later sample counts on.
    """

    def settled(self) -> Sample:
        """Return the sample as it is once all tokens before `position` are known."""
        if not self.token_ids and self.matcher is None:
            return self
        forbidden = self.forbidden
        if self.bad_words is not None:
            first = max(self.prompt_length, self.position - self.bad_words.reach)
            forbidden += self.bad_words.completed_by(self.token_ids[first : self.position])
        seen = None if self.seen is None else self.seen.follow(self.token_ids, self.position)
        allowed = None if self.matcher is None else self.matcher.allowed()
        return Sample(self.params, self.position, forbidden, (), self.prompt_length, allowed=allowed, seen=seen)

    @property
    def changes_logits(self) -> bool:
        """Whether the token is chosen from other logits than the model's own."""
        return bool(self.forbidden) or self.allowed is not None or self.params.shapes

    @property
    def is_best_of_allowed(self) -> bool:
        """Whether the token is the one with the model's own largest logit, of those that its grammar allows."""
        return self.allowed is not None and self.params.temperature == 0 and not self.params.shapes


@dataclass(frozen=True, slots=True)
class Scoring:
    """Asks for the log-probabilities of a prompt's tokens."""

    targets: tuple[int, ...]
    """The token that follows each of the row's tokens; one fewer if the prompt ends with the row."""
    num_top: int


@dataclass(slots=True)
class PlanRow:
    """One request in one step: a decode row has one token, a prefill chunk one or more."""

    table: int
    """Row of the page table, held by this request from its admission to its end: 0 <= table < max_running_requests."""
    start: int
    """Position of the first token of `token_ids`; the keys and values of all positions before it are in the pages."""
    token_ids: tuple[int, ...]
    """The only one of a decode row may be a placeholder."""
    new_pages: tuple[int, ...]
    """Pages appended to this table row before the step. When `start` is 0 they are the whole row."""
    first_page: int
    """Index in the table row at which `new_pages` begin."""
    sample: Sample | None
    """None: a chunk of a prompt that goes on in a later step, so no token is drawn."""
    scoring: Scoring | None = None
    """None: the client does not ask for log-probabilities of the prompt."""


@dataclass(slots=True)
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


@dataclass(slots=True)
class Computed:
    """The result of a plan."""

    token_ids: Sequence[int]
    """One for each row that samples, in row order; or NOT_A_NUMBER, which matters only if its request is still here."""
    scores: Mapping[int, RowScores] = field(default_factory=dict)
    """By `PlanRow.table`, for the rows that ask for them."""

    def fits(self, plan: BatchPlan) -> None:
        """Make sure that this can be the result of *plan*: nobody knows whose tokens they are otherwise.

        Raises:
            ValueError: There is not one token for each row that samples, or not one score for each token of a prompt
                that asks for it, or there are scores of others.
        """
        num_samples = sum(row.sample is not None for row in plan.rows)
        if len(self.token_ids) != num_samples:
            raise ValueError(f"the engine returned {len(self.token_ids)} tokens for {num_samples} rows that sample")
        if self.scores and (others := self.scores.keys() - {row.table for row in plan.rows}):
            raise ValueError(f"the engine returned scores of {len(others)} rows that are not in the step")
        for row in plan.rows[plan.num_decode_rows :]:
            num_scores = len(self.scores[row.table].prompt) if row.table in self.scores else 0
            num_targets = 0 if row.scoring is None else len(row.scoring.targets)
            if num_scores != num_targets:
                raise ValueError(f"the engine returned {num_scores} scores for {num_targets} tokens of a prompt")

    def checked(self) -> Computed:
        """Return this result, which has a token for each row.

        Raises:
            ArithmeticError: It has not. Nobody knows which token should follow.
        """
        if NOT_A_NUMBER in self.token_ids:
            raise ArithmeticError("the model's output is not a number (NaN)")
        return self


def filled(plan: BatchPlan, token_ids: Sequence[int]) -> BatchPlan:
    """Return *plan* with its placeholders replaced by *token_ids*, which the step before has sampled; by 0 for a token
    that is not one.
    """
    rows = [
        replace(row, token_ids=(max(token_ids[-1 - row.token_ids[0]], 0),)) if row.token_ids[0] < 0 else row
        for row in plan.rows
    ]
    return replace(plan, rows=tuple(rows))
