"""How the ranks of an engine take the same steps: rank 0 sends each to the others before it takes it, and they follow.

Without overlap one frame is a whole step. With overlap, one frame begins a step, and another lands it: a frame of its
own, or the one that begins the next step, which its tokens follow:

    rank 0                       frames                  another rank
    launch(1, None)              BEGIN 1                 forward pass 1
    launch(2, 1): draw 1         NEXT 2, tokens of 1     its part of the logits of 1, forward pass 2
    wait(1)                      SCORE_BEFORE, if any    its part of the scores of 1
    wait(2): draw 2              LAND                    its part of the logits and the scores of 2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pipeline.errors import RankLost
from stages.generate.collectives import GlooCollectives
from stages.generate.forward.engine import Engine, Launched
from stages.generate.ranks.channel import Follower, Leader
from stages.generate.ranks.frame import NOTHING, Kind
from stages.generate.schedule.plan import BatchPlan, Computed

T = TypeVar("T")


class LeadingEngine:
    """Rank 0's engine without overlap."""

    def __init__(self, engine: Engine, leader: Leader, collectives: GlooCollectives, vocab_size: int) -> None:
        self._engine, self._leader, self._collectives = engine, leader, collectives
        self._vocab_size = vocab_size

    def forward(self, plan: BatchPlan) -> Computed:
        """Compute one step with all ranks. Errors while tokens are drawn or scored are rank 0's alone.

        Raises:
            RankLost: A rank is gone, or the forward pass failed: then the ranks are no longer at the same place.
            ValueError: The model does not know a token. The step was not sent to any rank.
        """
        self._check(plan)
        with self._leader.computing(plan):
            result = self._landed(self._engine.launch(plan, None))
        return _or_raised(result)

    def _check(self, plan: BatchPlan, num_unknown: int = 0) -> None:
        """Raise ValueError if a token is neither the model's nor a placeholder for one of *num_unknown* tokens."""
        for row in plan.rows:
            if not -num_unknown <= min(row.token_ids) <= max(row.token_ids) < self._vocab_size:
                seen = f"{min(row.token_ids)} to {max(row.token_ids)}"
                raise ValueError(f"token ids from {seen}; the model knows 0 to {self._vocab_size - 1}")

    def _landed(self, launched: Launched) -> Computed | Exception:
        """Return the result of a step whose logits and scores the other ranks help to compute, or the error."""
        num_before, num_draws = self._collectives.num_gathered, int(not launched.is_drawn)
        result = self._at_rank_0(lambda: self._engine.wait(launched), num_draws)
        if isinstance(result, Exception):
            self._engine.follow_scores(launched, self._collectives.num_gathered - num_before - num_draws)
        return result

    def _at_rank_0(self, work: Callable[[], T], num_gathers: int) -> T | Exception:
        """Return the result of *work*, or an error of rank 0 alone: after so many gathers no other rank waits for it.

        Raises:
            Exception: Another rank may wait for what rank 0 has not computed: the head is part of the forward pass.
        """
        num_before = self._collectives.num_gathered
        try:
            return work()
        except Exception as error:
            if isinstance(error, RankLost) or self._collectives.num_gathered < num_before + num_gathers:
                raise
            return error


class LaunchingEngine(LeadingEngine):
    """Rank 0's engine with overlap: begins a step before the one before is awaited (`Launches`)."""

    _last: Launched | None = None
    """Newest step that was begun."""

    def launch(self, plan: BatchPlan, before: Launched | None) -> Launched:
        """Draw the tokens of the step *before*, if there is one, and begin one step with all ranks.

        Raises:
            RankLost, ValueError: See `forward`.
            Exception: The tokens of the step before cannot be drawn. All ranks dropped *plan*.
        """
        if before is None:
            self._check(plan)
            with self._leader.computing(plan, Kind.BEGIN):
                self._last = launched = self._engine.launch(plan, None)
            return launched
        assert before is self._last and not before.is_drawn, "the other ranks draw the step that was begun last"
        num_tokens = _num_sampled(before.plan)
        self._check(plan, num_tokens)
        with self._leader.computing(plan, Kind.NEXT):
            token_ids = self._at_rank_0(lambda: self._engine.settle(before), num_gathers=1)
            if isinstance(token_ids, Exception):
                self._leader.tell_tokens(num_tokens, None)
            else:
                self._leader.tell_tokens(num_tokens, token_ids)
                self._last = self._engine.launch(plan, before)
        _or_raised(token_ids)
        return self._last

    def wait(self, launched: Launched) -> Computed:
        """Return the result of a step. Errors while tokens are drawn or scored are rank 0's alone.

        Raises:
            RankLost: See `forward`.
        """
        if launched.is_drawn and not any(row.scoring and row.scoring.targets for row in launched.plan.rows):
            return self._engine.wait(launched)  # the other ranks have no part in it
        kind = Kind.SCORE if launched is self._last else Kind.SCORE_BEFORE
        with self._leader.computing(NOTHING, kind if launched.is_drawn else Kind.LAND):
            result = self._landed(launched)
        return _or_raised(result)


def leading_engine(
    engine: Engine, leader: Leader, collectives: GlooCollectives, vocab_size: int, *, overlap: bool
) -> LeadingEngine:
    """Return rank 0's engine, with *overlap* or without."""
    return (LaunchingEngine if overlap else LeadingEngine)(engine, leader, collectives, vocab_size)


class FollowingEngine:
    """The engine of any other rank."""

    def __init__(self, engine: Engine, follower: Follower) -> None:
        self._engine, self._follower = engine, follower
        self._begun: list[Launched] = []
        """The two newest steps, the older one first."""

    def follow(self) -> bool:
        """Wait for a job of rank 0 and do this rank's part of it; return False when rank 0 has left.

        Raises:
            RankLost: Rank 0 is gone, or was silent for too long.
            ConfigError: Rank 0 has another version of the frames.
        """
        kind, plan = self._follower.receive()
        match kind:
            case Kind.STEP:
                self._engine.follow(plan)
            case Kind.BEGIN:
                self._begin(plan)
            case Kind.NEXT:
                self._engine.follow_draw(self._begun[-1])
                token_ids = self._follower.receive_tokens(_num_sampled(self._begun[-1].plan))
                if token_ids is not None:
                    self._begin(plan, token_ids)
            case Kind.LAND:
                self._engine.follow_draw(self._begun[-1])
                self._engine.follow_scores(self._begun[-1])
            case Kind.SCORE:
                self._engine.follow_scores(self._begun[-1])
            case Kind.SCORE_BEFORE:
                self._engine.follow_scores(self._begun[-2])
        return kind is not Kind.STOP

    def _begin(self, plan: BatchPlan, token_ids: Sequence[int] = ()) -> None:
        self._begun = [*self._begun[-1:], self._engine.follow_launch(plan, token_ids)]


def _num_sampled(plan: BatchPlan) -> int:
    return sum(row.sample is not None for row in plan.rows)


def _or_raised(result: T | Exception) -> T:
    if isinstance(result, Exception):
        raise result
    return result
