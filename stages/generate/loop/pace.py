"""How many prompt tokens a step may have beside streams, learned from the time that steps take.

It has no clock and knows no request: the worker measures the steps. The schedule stays a pure fold: the budget is an
argument of `plan`, and the worker writes it into the step's `StepStats`. Chunks differ from run to run, so this is only
for engines whose tokens do not depend on the batch.

A step with prompts should take TARGET times as long as the same step without. So two things are learned:

- The time of a step without prompts. While prompts come without a break, a step without any is made now and then.
- The time that a prompt token adds. Attention reads all tokens before it, so each range of positions has its own.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from stages.generate.schedule.plan import BatchPlan, Work

TARGET: Final = 1.5
"""Time of a step with prompts, as a multiple of its time without."""
PROMPTS: Final = 2
"""Number of prompts in hand above which the target's part above 1 grows with their number: more clients gain .."""
LARGEST_TARGET: Final = 3.0
""".. up to this target."""
FEWEST_TOKENS: Final = 4
"""Fewest prompt tokens of a step, however long they take. So every prompt makes progress."""
STREAMS_PER_TOKEN: Final = 4
"""Number of streams for each of which a step has at least one prompt token: beside many streams it costs little."""
FIRST_TOKENS: Final = 8
"""Budget at TARGET while no time of a prompt token is known."""
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


class Pace:
    """Decides how many prompt tokens are computed beside streams."""

    def __init__(self) -> None:
        self._plain: deque[tuple[int, int, float]] = deque(maxlen=NUM_PLAIN)
        """Streams, context and seconds of the last steps without prompts."""
        self._token_s: dict[int, float] = {}
        """Similar positions -> seconds that a prompt token there adds to a step."""
        self._num_mixed = 0
        """Steps with prompts since the last one without."""
        self._budget = 0

    def budget(self, work: Work) -> int | None:
        """Return the largest number of prompt tokens of the next step; None: there are no streams or no prompts.

        0: the time of a step without prompts must be measured again.
        """
        if not work.streams or not work.prompts:
            return None
        self._budget = 0 if self._needs_plain(work) else self._most_tokens(work)
        return self._budget

    def measured(self, plan: BatchPlan, seconds: float, budget: int | None = None) -> None:
        """Learn from a step that took *seconds*. *budget*: the step's budget; None: the last one."""
        budget = self._budget if budget is None else budget
        streams = plan.num_decode_rows
        if not streams:
            return
        context = sum(row.start + 1 for row in plan.rows[:streams])
        chunks = plan.rows[streams:]
        if not chunks:
            self._plain.append((streams, context, seconds))
            self._num_mixed = 0
            return
        self._num_mixed += 1
        tokens = sum(len(row.token_ids) for row in chunks)
        if not self._plain or tokens > budget:
            return  # the schedule had reasons of its own
        plain_s, place = self._plain_s(streams, context), _place(chunks[0].start)
        token_s = self._token_s_at(place, plain_s)
        surprise = seconds / (plain_s + tokens * token_s)
        if surprise < 1 and tokens < budget:
            return  # a few tokens may cost nothing where more would
        self._token_s[place] = token_s * min(max(surprise, 1 / SURPRISE), SURPRISE) ** BELIEVED

    def _needs_plain(self, work: Work) -> bool:
        if len(self._plain) < FEWEST_PLAIN:
            return True
        known = len(self._similar(work.streams, work.context)) >= FEWEST_PLAIN
        return self._num_mixed >= (MOST_MIXED if known else FEWEST_MIXED)

    def _most_tokens(self, work: Work) -> int:
        plain_s = self._plain_s(work.streams, work.context)
        extra = min((TARGET - 1) * max(1.0, work.prompts / PROMPTS), LARGEST_TARGET - 1)
        fewest = max(FEWEST_TOKENS, work.streams // STREAMS_PER_TOKEN)
        return max(fewest, int(extra * plain_s / self._token_s_at(_place(work.position), plain_s)))

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

    def _token_s_at(self, place: int, plain_s: float) -> float:
        if not self._token_s:
            return (TARGET - 1) * plain_s / FIRST_TOKENS
        nearest = min(self._token_s, key=lambda known: (abs(known - place), known))
        return self._token_s[nearest]


def _place(position: int) -> int:
    """Return the same number for similar positions."""
    return (position // NEAR).bit_length()
