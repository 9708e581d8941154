"""How many prompt tokens a step may have, learned from the time that steps take.

It has no clock and knows no request: the worker measures the steps. The schedule stays a pure fold: the budget is an
argument of `plan`, and the worker writes it into the step's `StepStats`. Chunks differ from run to run, so this is only
for engines whose tokens do not depend on the batch.

Every step has a target time, in which prompts get what the streams leave:

| step | target |
|---|---|
| beside streams | `--target-itl`; its default is in `Targets`: people do not notice faster tokens |
| without streams | `ALONE_S`, so that a request that comes meanwhile does not wait long |
| without streams, and the next prompt of several is short | as beside streams: it becomes a stream at once |

So two things are learned: the time of a step without prompts, and the time that a prompt token adds. While prompts come
without a break, a step without any is made now and then. Attention reads all tokens before a token, so each range of
positions has its own time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from stages.generate.schedule.plan import BatchPlan, Work
from stages.generate.setup.config import ON_CPU, Targets

ALONE_S: Final = 0.3
"""Target of a step without streams."""
FEWEST_ALONE: Final = 128
"""Fewest prompt tokens of a step without streams, if one prompt is in hand: so reading the weights again for each chunk
takes at most a twentieth of the time, however large the model .."""
FEWEST_OF_SEVERAL: Final = 32
""".. and if others wait."""
FIRST_SHARE: Final = 0.0625
"""Time of a prompt token, as a part of a step without prompts, while none is known."""
FEWEST_TOKENS: Final = 4
"""Fewest prompt tokens of a step beside streams, however long they take. So every prompt makes progress."""
STREAMS_PER_TOKEN: Final = 4
"""Number of streams for each of which a step has at least one prompt token: beside many streams it costs little."""
NUM_PLAIN: Final = 9
"""Number of steps without prompts that are remembered. The lower third of their times counts, because a busy machine
only makes them longer."""
FEWEST_PLAIN: Final = 3
"""If fewer such steps are known, the next step has no prompts."""
MOST_MIXED: Final = 16
"""After this many steps with prompts, one has none .."""
FEWEST_MIXED: Final = 4
""".. or after this many, if streams or context are now CHANGED times those of the last step without."""
CHANGED: Final = 1.25
SURPRISE: Final = 2.0
"""Largest factor by which a step counts as slower or faster than expected. So a delayed step teaches little."""
BELIEVED: Final = 0.5
"""Exponent: the part of a surprise that is taken as lasting, the rest as noise."""
NEAR: Final = 256
"""Positions below this one are similar, then those below twice as much, and so on."""
MANY: Final = 8
"""See `Targets.many_s`."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What one step may have."""

    tokens: int
    """Largest number of prompt tokens. 0: the time of a step without prompts must be measured again."""
    target_s: float


class Pace:
    """Decides how many prompt tokens a step computes."""

    def __init__(self, targets: Targets = ON_CPU) -> None:
        self._targets = targets
        self._plain: deque[tuple[int, int, float]] = deque(maxlen=NUM_PLAIN)
        """Streams, context and seconds of the last steps without prompts."""
        self._token_s: dict[int, float] = {}
        """Similar positions -> seconds that a prompt token there adds to a step."""
        self._num_mixed = 0
        """Steps with prompts since the last one without."""

    def budget(self, work: Work) -> Budget | None:
        """Return the budget of the next step; None: there are no prompts."""
        if not work.prompts:
            return None
        if not work.streams:
            return self._alone(work)
        if self._needs_plain(work):
            return Budget(0, self._targets.step_s)
        plain_s = self._plain_s(work.streams, work.context)
        target_s = max(self._beside_s(work), self._targets.times_plain * plain_s)
        fewest = max(FEWEST_TOKENS, work.streams // STREAMS_PER_TOKEN)
        return Budget(max(fewest, self._tokens_in(target_s - plain_s, work, plain_s)), target_s)

    def measured(self, plan: BatchPlan, seconds: float, budget: Budget | None) -> None:
        """Learn from a step that took *seconds*. *budget*: the one it was planned with."""
        streams = plan.num_decode_rows - plan.num_drafts
        context = sum(row.start + 1 for row in plan.rows[: plan.num_decode_rows] if not row.is_draft)
        chunks = [(row.start, len(row.token_ids)) for row in plan.rows[plan.num_decode_rows :]]
        if not chunks:
            self._plain.append((streams, context, seconds))
            self._num_mixed = 0
            return
        self._num_mixed += bool(streams)
        tokens = sum(count for _, count in chunks)
        if budget is None or tokens > budget.tokens or (streams and not self._plain):
            return  # the schedule had reasons of its own
        if not streams and self._token_s and tokens < min(budget.tokens, FEWEST_ALONE):
            return  # a few tokens take most of their time to read the weights
        plain_s = self._plain_s(streams, context) if streams else 0.0
        if not streams and not self._token_s:
            self._token_s[_place(chunks[0][0])] = seconds / tokens
            return
        before = {_place(start): self._token_s_at(start, plain_s) for start, _ in chunks}
        surprise = seconds / (plain_s + sum(count * before[_place(start)] for start, count in chunks))
        if surprise < 1 and tokens < budget.tokens:
            return  # a few tokens may cost nothing where more would
        factor = min(max(surprise, 1 / SURPRISE), SURPRISE) ** BELIEVED
        self._token_s |= {place: token_s * factor for place, token_s in before.items()}

    def _alone(self, work: Work) -> Budget:
        """Return the budget of a step without streams."""
        several = len(work.prompts) > 1
        fewest = FEWEST_OF_SEVERAL if several else FEWEST_ALONE
        if not self._token_s:
            return Budget(fewest, ALONE_S)
        (position, length), soon_s = work.prompts[0], self._beside_s(work)
        is_short = several and length * self._token_s_at(position, 0) <= soon_s
        target_s = soon_s if is_short else max(ALONE_S, soon_s)
        return Budget(max(fewest, self._tokens_in(target_s, work, 0)), target_s)

    def _beside_s(self, work: Work) -> float:
        return self._targets.many_s if len(work.prompts) >= MANY else self._targets.step_s

    def _tokens_in(self, seconds: float, work: Work, plain_s: float) -> int:
        """Return how many tokens of the prompts, in their order, can be computed in *seconds*."""
        tokens = 0
        for position, length in work.prompts:
            token_s = self._token_s_at(position, plain_s)
            if length * token_s >= seconds:
                break
            tokens, seconds = tokens + length, seconds - length * token_s
        return tokens + max(int(seconds / token_s), 0)  # more than there are, or a few would seem to be all that fit

    def _needs_plain(self, work: Work) -> bool:
        if len(self._plain) < FEWEST_PLAIN:
            return True
        known = len(self._similar(work.streams, work.context)) >= FEWEST_PLAIN
        return self._num_mixed >= (MOST_MIXED if known else FEWEST_MIXED)

    def _plain_s(self, streams: int, context: int) -> float:
        """Return the time of a step without prompts, rather too short than too long.

        Compared with a remembered step, a step with fewer streams or less context takes at least its share of the time,
        and one with more takes at least as long.
        """
        similar = self._similar(streams, context)
        known = sorted(
            seconds * min(1.0, streams / then_streams, context / then_context)
            for then_streams, then_context, seconds in (similar if len(similar) >= FEWEST_PLAIN else self._plain)
        )
        return known[(len(known) - 1) // 3]

    def _similar(self, streams: int, context: int) -> list[tuple[int, int, float]]:
        """Return the remembered steps that had about as many streams and as much context."""

        def near(one: int, other: int) -> bool:
            return max(one, other) <= CHANGED * min(one, other)

        return [plain for plain in self._plain if near(plain[0], streams) and near(plain[1], context)]

    def _token_s_at(self, position: int, plain_s: float) -> float:
        if not self._token_s:
            return FIRST_SHARE * plain_s
        place = _place(position)
        nearest = min(self._token_s, key=lambda known: (abs(known - place), known))
        return self._token_s[nearest]


def _place(position: int) -> int:
    """Return the same number for similar positions."""
    return (position // NEAR).bit_length()
