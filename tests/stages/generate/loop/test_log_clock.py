"""What an engine knows of Redis' clock from the answers to its commits."""

from __future__ import annotations

from stages.generate.loop.log_thread import LogClock


def test_before_the_first_commit_nothing_is_known() -> None:
    assert LogClock().at(5.0) == 0


def test_commits_that_take_long_do_not_move_what_a_short_one_has_told() -> None:
    clock = LogClock()
    clock.learn(10.000, 10.001, 90_010_000)
    known = clock.at(20.0)
    for late_ms in (0, 5, 60):  # Redis did it so long after the sending
        clock.learn(11.000, 11.100, 90_011_000 + late_ms)
        assert clock.at(20.0) == known
    assert abs(known - 90_020_000) <= 1


def test_a_first_commit_that_took_long_is_corrected_by_the_next_ones() -> None:
    clock = LogClock()
    clock.learn(10.000, 10.300, 90_010_290)
    clock.learn(11.000, 11.001, 90_011_000)
    assert abs(clock.at(12.0) - 90_012_000) <= 1


def test_a_clock_that_was_set_is_followed_at_once() -> None:
    clock = LogClock()
    clock.learn(10.000, 10.001, 90_010_000)
    for set_ms in (7_000, -7_000):
        clock.learn(11.000, 11.001, 90_011_000 + set_ms)
        assert abs(clock.at(12.0) - 90_012_000 - set_ms) <= 1
