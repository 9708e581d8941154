"""One request in the schedule: its tokens, how many of them are computed, how the next one is sampled.

It knows nothing of other requests, free pages or budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from pipeline.events import FinishReason, SamplingParams, Scores
from stages.generate.kvcache.base import Allocation
from stages.generate.schedule.bad_words import BadWords
from stages.generate.schedule.drafts import Drafts
from stages.generate.schedule.plan import Matcher, Sample, Scoring
from stages.generate.schedule.seen import Seen

WHOLE: Final = 1024
"""An acceptance of 1: all drafts are what was drawn."""
MEMORY: Final = 8
"""Number of drafts that an acceptance remembers."""
HOPE: Final = 1
"""What a low acceptance gains with a token that came without drafts, so that they are tried again some time."""
MOST_FOLLOWED: Final = 2048
"""Largest number of output tokens that drafts take in before a step. Of another engine's output there may be many."""
MANY_STREAMS: Final = 8
"""With so many streams nothing is drafted: the rows of a step share what it costs, so drafts would cost more."""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request from the log. `output_ids` is not empty if another owner of a slot began it."""

    uid: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    """Of the requests of an owner, lower runs earlier. With the same priority, the first to arrive does."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that must not be drawn."""
    reads_cache: bool = True
    """Whether its prompt may come from the prefix cache."""
    grammar: str = ""
    """Grammar of its output, see Tokenized; empty: any output."""
    grammar_param: str = ""
    """Field of the request that asked for the grammar."""
    matcher: Matcher | None = None
    """Follows the output through the grammar, and has taken in `output_ids`. None if there is no grammar, or if nothing
    is computed because its tokens are known."""
    prediction: tuple[int, ...] = ()
    """Tokens that the client expects as output: drafts."""
    owner: str = ""
    """Whose request it is: owners share prompts and pages .."""
    weight: int = 1
    """.. by their weights."""
    overtakes: bool = False
    """Whether its priority counts among the requests of all owners."""


@dataclass(slots=True, eq=False)
class Request:
    """A waiting or running request."""

    uid: str
    priority: int
    arrival: int
    """Ordinal of its arrival."""
    came_at: int
    """Number of prompt tokens that the schedule had planned when it came."""
    prompt_length: int
    token_ids: list[int]
    """Prompt + output. Tokens that steps in flight sample are placeholders, as in a plan."""
    limit: int
    """Length, prompt + output, at which it ends."""
    sampling: SamplingParams
    bad_words: BadWords
    reads_cache: bool = True
    """See NewRequest."""
    is_constrained: bool = False
    """Whether it has a grammar, so an end-of-sequence token comes only where the grammar is complete."""
    grammar_param: str = ""
    """See NewRequest."""
    matcher: Matcher | None = None
    """See NewRequest."""
    table: int = -1
    """Its row of the page table; -1 while it waits."""
    allocation: Allocation = field(default_factory=Allocation)
    num_computed: int = 0
    """Number of first tokens whose keys and values are in the pages once the plans made so far have run."""
    chunks: int = 0
    """Prefill chunks planned since it was admitted; 0 once it decodes."""
    prompt_scores: Scores = field(default_factory=Scores)
    """Scores of the prompt's tokens computed so far. The first token's row has them."""
    stands_still: bool = False
    """Whether it came with tokens of another engine: its client's stream pauses until it is computed."""
    last_plan: int = 0
    """Ordinal of the last plan that has a row of it."""
    prediction: tuple[int, ...] = ()
    """See NewRequest."""
    owner: str = ""
    """See NewRequest."""
    weight: int = 1
    """See NewRequest."""
    overtakes: bool = False
    """See NewRequest."""
    acceptance: int = WHOLE // 2
    """Part of its last drafts that were what was drawn, of WHOLE: a decaying mean."""
    forced_acceptance: int = WHOLE // 2
    """The same of drafts that its grammar forced: their text was certain, but not how it is cut into tokens."""
    are_forced: bool = False
    """Whether the drafts of the step in flight were forced."""
    num_drafts: int = 0
    """Number of drafts in the step in flight."""
    is_predicted: bool = False
    """Whether these are of the client's prediction."""
    _drafts: Drafts | None = None
    num_known: int = field(init=False)
    """Number of known tokens in `token_ids`. The others are placeholders."""
    is_plain: bool = field(init=False)
    """Whether the next token is sampled without looking at the tokens before."""
    seen: Seen | None = field(init=False)
    """Record of `token_ids` for penalties. Only the sampler counts tokens there."""
    _samples: tuple[Sample, Sample] = field(init=False)
    """Samples of a plain request, for even and odd positions, because two steps may be in flight."""

    def __post_init__(self) -> None:
        self.num_known = len(self.token_ids)
        shaped = self.sampling.min_tokens or self.sampling.penalizes or self.bad_words
        self.is_plain = not shaped and self.matcher is None
        self.seen = Seen(self.prompt_length) if self.sampling.penalizes else None
        even, odd = (Sample(self.sampling, 0, (), (), self.prompt_length) for _ in range(2))
        self._samples = even, odd

    @property
    def is_simple(self) -> bool:
        """Whether the next token depends on the logits alone, and nothing else of the logits is told."""
        sampling = self.sampling
        return self.is_plain and sampling.logprobs is None and sampling.typical_p == 1 and not sampling.shapes

    def ends(self, eos_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens that end it."""
        ignored = self.sampling.ignore_eos and not self.is_constrained
        return self.sampling.stop_token_ids if ignored else (*eos_ids, *self.sampling.stop_token_ids)

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: the lowest comes first, the highest is preempted first."""
        return self.priority, self.arrival

    @property
    def band(self) -> int:
        """Sort key before all others: its priority, if that counts among the requests of all owners."""
        return self.priority if self.overtakes else 0

    @property
    def num_output(self) -> int:
        """Number of known output tokens."""
        return self.num_known - self.prompt_length

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits of the prompt are needed, so no page of it may come from the cache."""
        return self.sampling.prompt_logprobs is not None and len(self.token_ids) == self.prompt_length

    @property
    def may_read_cache(self) -> bool:
        return self.reads_cache and not self.scores_prompt

    @property
    def decodes(self) -> bool:
        """Whether its next row has one token. A request that ends by length with the step in flight has no next row."""
        length = len(self.token_ids)
        return not self.chunks and self.num_computed == length - 1 and length < self.limit

    def scoring(self, start: int, end: int) -> Scoring | None:
        """Return how the prompt tokens that follow positions *start* to *end* are scored; None: they are not."""
        num_top = self.sampling.prompt_logprobs
        if num_top is None or not self.scores_prompt:
            return None
        return Scoring(tuple(self.token_ids[start + 1 : end + 1]), num_top)

    def most_drafts(self, most: int, streams: int, row_cost: int, *, forced: bool = False) -> int:
        """Return how many drafts pay, up to *most*, in a step with *streams*. *row_cost*: see `Schedule.plan`.

        One more draft makes a step longer for all streams, and adds a token if it and all before it are accepted.
        """
        most = min(most, self.limit - 1 - len(self.token_ids))
        if row_cost <= 0:
            return max(most, 0)
        acceptance = self.forced_acceptance if forced else self.acceptance
        chance, count = acceptance, 0
        while count < most and chance * 1000 > row_cost * streams * WHOLE:
            count, chance = count + 1, chance * acceptance // WHOLE
        return count

    @property
    def copies(self) -> bool:
        """Whether its output copied something a few tokens ago."""
        return self._drafts is not None and not self._drafts.is_lost

    def drafts(self, most: int, *, at_most: int | None = MOST_FOLLOWED) -> Sequence[int]:
        """Return up to *most* tokens that may come next, by what came before. All its tokens are known.

        Return none if it has more than *at_most* tokens that were not taken in yet: they are taken in little by little.
        """
        if most <= 0:
            self.is_predicted = False
            return ()
        if self._drafts is None:
            self._drafts = Drafts(self.token_ids[: self.prompt_length], self.prediction)
        if not self._drafts.follow(self.token_ids, at_most):
            return ()
        proposed, self.is_predicted = self._drafts.propose(most)
        return proposed

    def judge(self, *, was_right: bool) -> None:
        """Learn whether a draft was what was drawn."""
        before = self.forced_acceptance if self.are_forced else self.acceptance
        after = before - (-(WHOLE - before) // MEMORY) if was_right else before - before // MEMORY
        if self.are_forced:
            self.forced_acceptance = after
        else:
            self.acceptance = after

    def hope(self) -> None:
        """Learn that a token came without drafts."""
        self.acceptance += HOPE * (self.acceptance < WHOLE // 2)
        self.forced_acceptance += HOPE * (self.forced_acceptance < WHOLE // 2)

    def sample(self, eos_ids: tuple[int, ...], ahead: int = 0) -> Sample:
        """Return how the next token is sampled, after *ahead* drafts.

        Without drafts, the result may change once the step after the next one is planned.
        """
        sampling, position = self.sampling, len(self.token_ids)
        if self.is_plain and ahead:
            return Sample(sampling, position, (), (), self.prompt_length)
        if self.is_plain:
            sample = self._samples[position % 2]
            sample.position = position
            return sample
        forbidden: tuple[int, ...] = ()
        if position - self.prompt_length < sampling.min_tokens:
            forbidden = sampling.stop_token_ids if sampling.ignore_eos else eos_ids + sampling.stop_token_ids
        bad_words, seen = self.bad_words or None, self.seen
        token_ids = self.token_ids if seen or bad_words else ()
        return Sample(
            *(sampling, position, forbidden, token_ids, self.prompt_length, bad_words, self.matcher),
            seen=seen,
            ahead=ahead,
        )

    def learn(self, position: int, token: int, eos_ids: Sequence[int]) -> FinishReason | None:
        """Replace the placeholder at *position*. Return why the request ends with this token; None: it goes on."""
        self.token_ids[position] = token
        self.num_known = position + 1
        if token in self.ends(eos_ids):
            return "stop"
        if self.num_known >= self.limit:
            return "length"
        if self.matcher is not None:
            self.matcher.advance(token)
        return None
