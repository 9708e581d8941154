"""The figures, the table and the JSON of traffic that was sent again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import orjson
from support.histories import recording, uid

from ops.replay import drive
from ops.replay.sender import Sent
from ops.replay.traffic import Outcome, Target, outcome_of, traffic_of
from pipeline.walk import walk

WORDS = ("a ", "b ", "c ")


def outcome(words: Sequence[str] = WORDS, end: str = "stop", *, first_ms: int = 20, pause_ms: int = 10) -> Outcome:
    history = recording(words, end, first_ms=first_ms, pause_ms=pause_ms).entries
    return outcome_of(moment.event for moment in walk(history))


def sent_again(*pairs: tuple[Outcome, Outcome | None]) -> list[Sent]:
    """Return what was sent, each a millisecond later than the one before."""
    recordings = [recording(name=uid(number)) for number in range(len(pairs))]
    planned = traffic_of(recordings, Target(is_ours=True)).planned
    return [
        Sent(
            dataclasses.replace(one, before=(before,)),
            late_s=number / 1000,
            uids=(uid(100 + number),),
            after=(after,),
            unread="" if after else "it is gone",
        )
        for number, (one, (before, after)) in enumerate(zip(planned, pairs, strict=True))
    ]


def with_greedy(one: Sent) -> Sent:
    return dataclasses.replace(one, planned=dataclasses.replace(one.planned, is_sampled=False))


def test_the_table_has_both_sides_and_says_by_which_clock() -> None:
    sent = sent_again((outcome(), outcome(first_ms=1040)), (outcome(), outcome(end="failed", pause_ms=30)))
    pairs = drive.pairs_of(sent)
    assert drive.table(pairs, same_clock=True).splitlines() == [
        "                             before   p50   p90   p99  after      p50      p90      p99",
        "time to first token, ms              20.0  20.0  20.0           530.0    938.0  1,029.8",
        "time per token after it, ms          10.0  10.0  10.0            20.0     28.0     29.8",
        "whole request, ms                    45.0  45.0  45.0         1,065.0  1,065.0  1,065.0",
        "whole answers                     2                        1",
        "cancelled                         0                        0",
        "errors                            0                        1",
        "prompts from the cache          44%                      44%",
        "Times after: by Redis' clock.",
    ]
    assert drive.table(pairs, same_clock=False).endswith("by this client's clock, and not Redis' as before.")
    assert drive.lateness(sent) == "sent late by: p50 0.5 ms, p99 1.0 ms"


def test_a_side_without_times_has_none() -> None:
    pairs = drive.pairs_of(sent_again((outcome(), Outcome("failed", error="refused"))))
    lines = drive.table(pairs, same_clock=True).splitlines()
    assert lines[1].split()[-3:] == ["-", "-", "-"] and lines[7].split()[-2:] == ["44%", "-"]


def test_a_sender_without_time_says_so() -> None:
    [one] = sent_again((outcome(), outcome()))
    late = drive.lateness([dataclasses.replace(one, late_s=0.5)])
    assert late.startswith("sent late by: p50 500.0 ms") and "Lower --speed" in late


def test_the_comparison_counts_what_has_an_answer_and_names_each_difference() -> None:
    sent = sent_again(
        (outcome(), outcome()),
        (outcome(), outcome(("a ", "x ", "c "), "length")),
        (outcome(end="failed"), outcome()),
        (outcome(), None),
        (outcome(end="cancelled"), outcome(WORDS[:2], end="cancelled")),
    )
    pairs = drive.pairs_of(sent)
    assert drive.comparison(drive.compared(pairs)).splitlines() == [
        "identical answers: 2 of 3 (66.7%)",
        f"  {uid(1)} differs at token 2: 'b c ', now 'x c '",
        "changed finish reasons: 1x stop -> length, 1x failed -> stop",
    ]
    assert drive.comparison(drive.compared(pairs[3:4])) == "no answers to compare"


def test_what_another_engine_drew_is_told_from_what_it_computed_otherwise() -> None:
    drawn, greedy, wrong = sent_again(
        (outcome(), outcome(("x",))), (outcome(), outcome()), (outcome(), outcome(("x", "y")))
    )
    sent = [drawn, *(with_greedy(one) for one in (greedy, wrong))]
    found = drive.compared(drive.pairs_of(sent))
    said = drive.comparison(found, draws_alike=False).splitlines()
    assert said[:2] == [
        "identical answers: 1 of 3 (33.3%)",
        "of those at temperature 0: 1 of 2; another engine draws other tokens",
    ]
    assert drive.comparison(found).splitlines() == [said[0], *said[2:]]
    only_greedy = drive.compared(drive.pairs_of(sent[1:]))
    assert "temperature" not in drive.comparison(only_greedy, draws_alike=False)


def test_prompts_of_other_lengths_are_counted_where_both_sides_say_them() -> None:
    told = (3, 4), (3, 3), (3, 0), (0, 3)
    sides = [(dataclasses.replace(outcome(), prompt_tokens=n) for n in lengths) for lengths in told]
    pairs = drive.pairs_of(sent_again(*[(before, after) for before, after in sides], (outcome(), None)))
    assert drive.other_prompts(pairs) == 1


def test_of_many_differences_the_first_are_shown() -> None:
    pairs = drive.pairs_of(sent_again(*[(outcome(), outcome(("x",)))] * 23))
    lines = drive.comparison(drive.compared(pairs)).splitlines()
    assert len(lines) == 1 + drive.DIFFERENCES_SHOWN + 1 and lines[-1] == "  and 3 more; --json has all"


def test_an_error_that_was_there_before_is_no_new_failure() -> None:
    pairs = drive.pairs_of(
        sent_again((outcome(end="failed"), outcome(end="failed")), (outcome(), outcome(end="failed")))
    )
    assert [pair.has_failed for pair in pairs] == [False, True]


def test_the_json_has_every_request() -> None:
    sent = sent_again((outcome(), outcome(("a ", "x ", "c "))), (outcome(), None))
    document = orjson.loads(orjson.dumps(drive.document(drive.pairs_of(sent), sent, with_answers=True)))
    assert document["before"]["ttft_ms"]["p50"] == 20 and document["after"]["num_requests"] == 1
    assert document["answers"] == {"compared": 1, "identical": 0, "changed_ends": {}}
    first, second = document["requests"]
    assert (first["uid"], first["new_uid"], first["due_ms"], first["late_ms"]) == (uid(0), uid(100), 0, 0)
    assert first["before"]["e2e_ms"] == first["after"]["e2e_ms"] == 45
    assert (first["identical"], first["difference"]["token"]) == (False, 2)
    assert (second["after"], second["identical"], second["unread"]) == (None, None, "it is gone")
