"""The interface between the schedule and `forward`: the rows, tokens and pages of one step, and its result.

Knows no tensors. A plan has only what is new: every rank keeps the page tables, and a row adds pages to its own. Plans,
rows and results are never changed. They are not frozen because every step makes hundreds, and frozen ones take twice as
long. Only the request changes its sample, once the sample's step has landed.

A plan may be made before the tokens of the step before are known. Then a row has a placeholder for such a token: -1
minus the index of the token among those that the step before samples.
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
"""Stands for a token: a logit is NaN, or the largest is infinite, so no token can follow."""

Words = npt.NDArray[np.uint32]
"""One bit for each token: bit t % 32 of word t // 32 belongs to token t. There may be more bits than tokens."""


class Matcher(Protocol):
    """Follows the output of one request through its grammar."""

    @property
    def error(self) -> str:
        """The reason why the matcher gave up; empty: it did not. It is known once `allowed` has returned."""
        ...

    def advance(self, token: int) -> None:
        """Take in the next token of the output, which is not its last."""
        ...

    def draft(self, proposed: Sequence[int], most_forced: int) -> tuple[Sequence[int], bool]:
        """Return tokens that may come next, and whether their text is forced: then up to *most_forced*, cut as the text
        usually is; else the first of *proposed* that may come. The matcher takes them as drafts.
        """
        ...

    def allowed(self, ahead: int = 0) -> Words | None:
        """Return one bit for each token, 1 if it may come next, after *ahead* drafts. Wait until that is known.

        None: the matcher gave up. After drafts: no bit may be set, which says nothing of the tokens.
        """
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
    """Token ids that must not be drawn: end-of-sequence and stop ids before `min_tokens`, and ends of bad words."""
    token_ids: Sequence[int] = ()
    """Prompt + output, for `settled`; empty if it does not need them. It is the request's own list, which grows."""
    prompt_length: int = 0
    bad_words: BadWords | None = None
    """Sequences from which `settled` adds tokens to `forbidden`."""
    matcher: Matcher | None = None
    """Matcher from which `settled` takes `allowed`."""
    allowed: Words | None = None
    """Bits of the tokens that the grammar allows; None: all tokens."""
    seen: Seen | None = None
    """Tokens that penalties apply to; None: there are no penalties. It is the request's own record: `settled` counts
    the tokens before `position`, and a later sample counts on.
    """
    ahead: int = 0
    """Number of drafts among the tokens before `position`. A sample that has some comes after one that has fewer."""
    changes_logits: bool = field(init=False)
    """Whether the token is chosen from other logits than the model's own. Most requests keep their samples."""

    def __post_init__(self) -> None:
        self.changes_logits = bool(self.forbidden) or self.allowed is not None or self.params.shapes

    def settled(self) -> Sample:
        """Return the sample with what depends on the tokens before `position`, which are all known now."""
        if not self.token_ids and self.matcher is None:
            return self
        forbidden = self.forbidden
        if self.bad_words is not None:
            first = max(self.prompt_length, self.position - self.bad_words.reach)
            forbidden += self.bad_words.completed_by(self.token_ids[first : self.position])
        seen = self.seen
        if seen is not None:
            seen = (seen.ahead if self.ahead else seen.follow)(self.token_ids, self.position)
        allowed = None if self.matcher is None else self.matcher.allowed(self.ahead)
        return Sample(self.params, self.position, forbidden, (), self.prompt_length, allowed=allowed, seen=seen)

    @property
    def is_best_of_allowed(self) -> bool:
        """Whether the token is the one with the model's largest logit, among those that its grammar allows."""
        return self.allowed is not None and self.params.temperature == 0 and not self.params.shapes


@dataclass(frozen=True, slots=True)
class Scoring:
    """A request for the log-probabilities of a prompt's tokens."""

    targets: tuple[int, ...]
    """Token that follows each of the row's tokens; one fewer if the prompt ends with the row."""
    num_top: int


@dataclass(slots=True)
class PlanRow:
    """One request in one step: a decode row has one token, a prefill chunk one or more.

    A request may have several decode rows, one after the other: the tokens of all but the first are drafts.
    """

    table: int
    """Row of the page table that the request holds from admission to end: 0 <= table < max_running_requests."""
    start: int
    """Position of the first token of `token_ids`. The keys and values of all positions before it are in the pages."""
    token_ids: tuple[int, ...]
    """Tokens to compute. The only token of a decode row may be a placeholder."""
    new_pages: tuple[int, ...]
    """Pages appended to this table row before the step. If `start` is 0, they are the whole row."""
    first_page: int
    """Index in the table row at which `new_pages` begin."""
    sample: Sample | None
    """How a token is drawn; None: a later step computes the rest of the prompt, so no token is drawn."""
    scoring: Scoring | None = None
    """Log-probabilities of the prompt that the client asks for; None: it does not."""
    new_local: tuple[int, ...] = ()
    """Local parts (`LocalLayers`) of the pages from `first_local` on, those of a page together."""
    first_local: int = 0
    is_draft: bool = False
    """Whether its token is a draft: what it draws counts only if the row before drew that token."""


@dataclass(slots=True)
class BatchPlan:
    """The rows of one step, decode rows first, then prefill chunks."""

    step: int
    rows: tuple[PlanRow, ...]
    num_decode_rows: int
    num_drafts: int = 0
    """Number of decode rows whose token is a draft."""


@dataclass(frozen=True, slots=True)
class Work:
    """The work that there is before a plan is made."""

    streams: int
    """Number of requests that decode."""
    context: int
    """Number of positions that their next tokens attend to, summed."""
    prompts: Sequence[tuple[int, int]]
    """The prompts that are not computed yet, in the order in which chunks of them are planned: the position where each
    one continues, and how many tokens it lacks."""


@dataclass(frozen=True, slots=True)
class RowScores:
    """The log-probabilities of the tokens of one request."""

    tokens: tuple[Score, ...] = ()
    """Scores of the tokens that its rows drew, up to one that is none."""
    prompt: tuple[Score, ...] = ()
    """One score for each of `Scoring.targets`."""


@dataclass(slots=True)
class Computed:
    """The result of a plan."""

    token_ids: Sequence[int]
    """One token for each row that samples, in row order; or NOT_A_NUMBER, which matters only if its request is here."""
    scores: Mapping[int, RowScores] = field(default_factory=dict)
    """Scores by `PlanRow.table`, for the requests that ask for them."""

    def fits(self, plan: BatchPlan) -> None:
        """Raise if this cannot be the result of *plan*: then the tokens cannot be assigned to requests.

        Raises:
            ValueError: There is not one token for each row that samples, or one score for each token to score, or there
                are scores of other rows.
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
        """Return this result if it has a token for each row.

        Raises:
            ArithmeticError: A row has no token, so it is unknown which should follow.
        """
        if NOT_A_NUMBER in self.token_ids:
            raise ArithmeticError("the model's output is not a number (NaN)")
        return self


def filled(plan: BatchPlan, token_ids: Sequence[int]) -> BatchPlan:
    """Return *plan* with its placeholders replaced by *token_ids* of the step before; NOT_A_NUMBER becomes 0."""
    rows = [
        replace(row, token_ids=(max(token_ids[-1 - row.token_ids[0]], 0),)) if row.token_ids[0] < 0 else row
        for row in plan.rows
    ]
    return replace(plan, rows=tuple(rows))
