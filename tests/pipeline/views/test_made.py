"""When each token of a history was made: said by its commit, or an estimate where older histories do not say it."""

from __future__ import annotations

from support.histories import moments_of

from pipeline.events import AnyEvent, TokensProduced
from pipeline.views.made import Made, times_made


def tokens(*said: tuple[int, int | None], epoch: int = 1) -> list[tuple[str, AnyEvent]]:
    """Return a history with a token for each (ms, age_ms)."""
    events = (TokensProduced(tokens=(7,), text="x", step=f"{epoch}-9", ms=ms, age_ms=age) for ms, age in said)
    return [(f"{n}-0", event) for n, event in enumerate(events, 1)]


def made(*said: tuple[int, int | None]) -> list[int]:
    return [each.ms for each in times_made(moments_of(tokens(*said))).values()]


def test_tokens_that_were_committed_together_have_the_times_at_which_they_were_made() -> None:
    told = times_made(moments_of(tokens((1000, 1), (1020, 11), (1020, 8), (1020, 5), (1030, 2))))
    assert told == {
        1: Made(999, False, 1),
        2: Made(1009, False, 2),
        3: Made(1012, False, 2),
        4: Made(1015, False, 2),
        5: Made(1028, False, 5),
    }


def test_in_an_older_history_the_tokens_of_a_commit_divide_the_pause_before_it() -> None:
    told = times_made(moments_of(tokens((1000, None), *4 * [(1014, None)], *2 * [(1020, None)])))
    assert [each.ms for each in told.values()] == [1000, 1003, 1007, 1010, 1014, 1017, 1020]
    assert [each.is_estimate for each in told.values()] == [False, *6 * [True]]
    assert [each.first for each in told.values()] == [1, 2, 2, 2, 2, 6, 6]


def test_tokens_that_came_with_the_first_one_have_its_time() -> None:
    assert made((1000, None), (1000, None), (1010, None)) == [1000, 1000, 1010]


def test_a_time_that_was_measured_too_early_is_not_before_the_token_before() -> None:
    assert made((1000, 0), (1004, 6), (1010, 0)) == [1000, 1000, 1010]


def test_of_several_tokens_in_one_event_the_last_has_its_time_and_the_others_divide_the_pause() -> None:
    first = TokensProduced(tokens=(7,), text="x", step="1-1", ms=1000, age_ms=0)
    more = TokensProduced(count=3, tokens=(7, 8, 9), text="x", step="1-2", ms=1040, age_ms=10)
    told = times_made(moments_of([("1-0", first), ("4-0", more)]))
    assert {n: (each.ms, each.is_estimate) for n, each in told.items()} == {
        1: (1000, False), 2: (1010, True), 3: (1020, True), 4: (1030, False),
    }  # fmt: skip


def test_nobody_knows_how_long_the_first_token_after_missing_ones_took() -> None:
    last = TokensProduced(tokens=(7,), text="x", step="1-9", ms=1020)
    told = times_made(moments_of([*tokens((1000, None)), ("8-0", last), ("9-0", last)]))
    assert {n: each.ms for n, each in told.items()} == {1: 1000, 8: 1020, 9: 1020}
