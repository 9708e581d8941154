"""Which of the requests that may have killed engines runs alone: the states and transitions by themselves."""

from __future__ import annotations

import pytest

from pipeline.events import SamplingParams
from stages.generate.loop.past import TOKENS_IN_DOUBT
from stages.generate.loop.suspects import Suspects, Trial
from stages.generate.schedule.request import NewRequest


def suspect(uid: str, num_output: int = 0) -> NewRequest:
    return NewRequest(uid, (1, 2), (3,) * num_output, SamplingParams())


def waiting(*uids: str) -> Suspects:
    suspects = Suspects()
    for uid in uids:
        suspects.add(suspect(uid, num_output=4))
    return suspects


def test_suspects_have_their_trials_one_by_one_in_the_order_in_which_they_came() -> None:
    suspects = waiting("b", "a")
    for uid in ("b", "a"):
        assert suspects.begin() == suspect(uid, num_output=4)
        assert suspects.trial == Trial(uid, 4)
        with pytest.raises(AssertionError):
            suspects.begin()
        suspects.end()
    assert suspects.begin() is None and suspects.trial is None


def test_a_suspect_that_ended_before_its_trial_has_none() -> None:
    suspects = waiting("a", "b")
    suspects.drop("a")
    suspects.drop("unknown")
    assert suspects.begin() == suspect("b", num_output=4)


def test_a_suspect_that_ends_during_its_trial_leaves_it_on_until_it_is_ended() -> None:
    suspects = waiting("a")
    suspects.begin()
    suspects.drop("a")
    assert suspects.trial == Trial("a", 4)


@pytest.mark.parametrize(
    ("num_output", "over"), [(4, False), (4 + TOKENS_IN_DOUBT - 1, False), (4 + TOKENS_IN_DOUBT, True), (None, True)]
)
def test_a_trial_is_over_when_the_suspect_came_further_than_engines_before_it_or_left(
    num_output: int | None, over: bool
) -> None:
    assert Trial("a", began_n=4).is_over(num_output) is over
