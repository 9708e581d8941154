"""One request as the schedule remembers it: its tokens, how many of them are computed, how its next one is sampled.

It knows nothing of other requests, of pages that are free, or of budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.events import FinishReason, SamplingParams, Score
from stages.generate.kvcache.base import Holding
from stages.generate.schedule.bad_words import BadWords
from stages.generate.schedule.plan import Sample, Scoring


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as it comes from the log; `output_ids` is not empty when another owner of a slot had begun it."""

    uid: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    """Lower runs earlier; equal ones run in the order of their arrival."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that must not come out."""


@dataclass(slots=True, eq=False)
class Request:
    """A waiting or running request."""

    uid: str
    priority: int
    arrival: int
    """Counts up."""
    prompt_length: int
    token_ids: list[int]
    """Prompt + output."""
    limit: int
    """Length at which it ends."""
    sampling: SamplingParams
    bad_words: BadWords
    table: int = -1
    """Its row of the page table; -1 while it waits."""
    holding: Holding = field(default_factory=Holding)
    num_computed: int = 0
    """Keys and values of the tokens before this position are in the pages, once the plans made so far have run."""
    chunks: int = 0
    """Prefill chunks planned since it was admitted; 0 once it decodes."""
    prompt_scores: list[Score] = field(default_factory=list)
    """Of the prompt's tokens computed so far. They are told with the first token."""
    stands_still: bool = False
    """It came with tokens of another engine: a client sees its stream stand still until it is computed."""

    @property
    def order(self) -> tuple[int, int]:
        """The lowest comes first, the highest is preempted first."""
        return self.priority, self.arrival

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.prompt_length

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits of the prompt are wanted, so that none of it may come from the cache."""
        return self.sampling.prompt_logprobs is not None and self.num_output == 0

    @property
    def decodes(self) -> bool:
        return self.chunks == 0 and self.num_computed == len(self.token_ids) - 1

    def scoring(self, start: int, end: int) -> Scoring | None:
        """Return how the prompt tokens that follow positions *start* to *end* are scored; None: they are not."""
        num_top = self.sampling.prompt_logprobs
        if num_top is None or not self.scores_prompt:
            return None
        return Scoring(tuple(self.token_ids[start + 1 : end + 1]), num_top)

    def sample(self, eos_ids: tuple[int, ...]) -> Sample:
        """Return how the next token is sampled."""
        sampling = self.sampling
        forbidden: tuple[int, ...] = ()
        if self.num_output < sampling.min_tokens:
            forbidden = sampling.stop_token_ids if sampling.ignore_eos else eos_ids + sampling.stop_token_ids
        if self.bad_words:
            forbidden += self.bad_words.completed_by(self.token_ids, self.num_output)
        seen = self.token_ids if sampling.penalizes else ()
        return Sample(sampling, len(self.token_ids), forbidden, seen, self.prompt_length)

    def end_of(self, token: int, eos_ids: Sequence[int]) -> FinishReason | None:
        """Return why the request ends with *token*, its last one; None: it goes on."""
        sampling = self.sampling
        if token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos):
            return "stop"
        return "length" if len(self.token_ids) >= self.limit else None
