"""In whose company a request was computed, and why its tokens were late: told from its history and some journals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from support.histories import entries_of
from support.log_contract import FINISHED

from pipeline.events import (
    Admitted,
    AnyEvent,
    Chunk,
    EventRow,
    Preempted,
    SamplingParams,
    StepStats,
    Submitted,
    TakenOver,
    Tokenized,
    TokensProduced,
)
from pipeline.log.journal import JournalStep, Row
from pipeline.names import SEAL
from pipeline.recording import Recording
from pipeline.views.company import MOST_WAITS, Company, late_tokens, spans_of, spoken, why_waited
from pipeline.views.recorded import History

UID = "a"
FIRST, SECOND = "generate-0", "generate-1"


def history(times_ms: Mapping[int, int], *more: tuple[str, AnyEvent], epoch: int = 1, ended: bool = True) -> History:
    """Return a request that was submitted at 1000; token n came with step n at *times_ms* of n."""
    events: list[tuple[str, AnyEvent]] = [
        ("0-1", Submitted(endpoint="e", frontend="", prompt="p", sampling=SamplingParams(), ms=1000)),
        ("0-2", Tokenized(token_ids=(1, 2), fingerprint="t", by="tokenize-0", ms=1001)),
        ("0-3", Admitted(engine=FIRST, epoch=epoch, step=1, fingerprint="w", ms=1002)),
        *((f"{n}-0", made(n, ms, epoch=epoch)) for n, ms in times_ms.items()),
        *more,
    ]
    if ended:
        n = max(int(entry_id.partition("-")[0]) for entry_id, _ in events)
        events.append((SEAL, FINISHED.model_copy(update={"n": n})))
    return History(Recording(UID, tuple(entries_of(events))))


def made(n: int, ms: int, *, epoch: int = 1) -> TokensProduced:
    return TokensProduced(tokens=(7,), text="x", step=f"{epoch}-{n}", ms=ms)


def step(
    number: int, ms: int, *rows: tuple[str, int], chunks: tuple[tuple[str, int], ...] = (), epoch: int = 1, **more: Any
) -> JournalStep:
    """Return a step with tokens for rows of (uid, n), and chunks of (uid, tokens)."""
    figures = StepStats(
        decode_rows=len(rows),
        prefill_rows=len(chunks),
        prefill_tokens=sum(count for _, count in chunks),
        waiting=4,
        free_pages=9,
        forward_ms=more.get("forward_ms", 5),
    )
    return JournalStep(
        epoch,
        number,
        ms,
        rows=tuple(Row(uid, n, 7, None, 0) for uid, n in rows),
        events=more.get("events", ()),
        released=(),
        figures=figures,
        inputs=(),
        chunks=tuple(Chunk(uid=uid, start=0, count=count) for uid, count in chunks),
        schedule="",
        said_made_ms=more.get("made_ms", 0),
    )


def told(of: History, *steps: tuple[str, JournalStep]) -> dict[str, Any]:
    company = Company(of)
    for engine, each in steps:
        company.take(engine, each)
    return company.plain(str)


def test_the_steps_of_a_request_say_what_they_computed_and_for_whom() -> None:
    plain = told(
        history({1: 1020, 2: 1030}),
        (FIRST, step(0, 1010, ("b", 5), chunks=((UID, 64), ("c", 3)))),
        (FIRST, step(1, 1020, ("b", 6), (UID, 1))),
        (FIRST, step(2, 1030, ("b", 7), (UID, 2))),
        (FIRST, step(3, 1040, ("b", 8))),
    )
    common = {"engine": FIRST, "forward_ms": 5, "waiting": 4, "pages_free": 9}
    steps = [dict(step) for step in plain["steps"]]
    assert [step.pop("ms") for step in steps] == [1010, 1020, 1030]
    assert steps == [
        common | {"id": "1-0", "made_ms": 1010, "rows": 3, "tokens": 68, "prompt_tokens": 64, "companions": ["b", "c"]},
        common | {"id": "1-1", "made_ms": 1020, "rows": 2, "tokens": 2, "n": 1, "companions": ["b"]},
        common | {"id": "1-2", "made_ms": 1030, "rows": 2, "tokens": 2, "n": 2},
    ], "companions are told where they change, and steps of others are left out"


def test_others_are_called_by_what_whoever_asks_may_know() -> None:
    company = Company(history({1: 1010}))
    company.take(FIRST, step(1, 1010, (UID, 1), ("b", 1), ("c", 1)))
    assert company.companions == ["b", "c"]
    assert company.plain(lambda uid: uid if uid == "b" else 1)["steps"][0]["companions"] == ["b", 1]


def test_late_tokens_have_the_reason_and_others_none() -> None:
    of = history({1: 1100, 2: 1110, 3: 1120, 4: 1400, 5: 1410})
    plain = told(
        of,
        (FIRST, step(0, 1050, chunks=(("c", 900),))),
        (FIRST, step(1, 1100, (UID, 1), chunks=((UID, 2),))),
        *((FIRST, step(n, 1090 + 10 * n, (UID, n))) for n in (2, 3)),
        (FIRST, step(31, 1350, ("b", 1), chunks=(("b", 500),))),
        (FIRST, step(4, 1400, ("b", 2), (UID, 4))),
        (FIRST, step(5, 1410, ("b", 3), (UID, 5))),
    )
    assert [(wait["n"], wait["waited_ms"]) for wait in plain["waits"]] == [(1, 100), (4, 280)]
    assert plain["waits"][0]["why"] == [
        "2 tokens of its prompt were prefilled in 1 chunk",
        "a prompt of 900 tokens was prefilled in 1 chunk",
        "the engine computed for only 10 ms of that time",
    ]
    assert plain["waits"][1]["why"][0] == "a prompt of 500 tokens was prefilled in 1 chunk"


def grouped(
    made_ms: Mapping[int, int], came_ms: Mapping[int, int], *, age: bool = True
) -> tuple[History, list[JournalStep]]:
    """Return a request and its steps; token n was made at *made_ms* and committed at *came_ms* of n."""
    events = {
        n: made(n, ms).model_copy(update={"age_ms": ms - made_ms[n] if age else None}) for n, ms in came_ms.items()
    }
    of = history({}, *((f"{n}-0", event) for n, event in events.items()))
    return of, [step(n, ms, (UID, n), made_ms=made_ms[n] if age else 0) for n, ms in came_ms.items()]


def test_tokens_that_were_committed_together_are_late_only_if_they_were_made_late() -> None:
    made_ms = {n: 1100 + 10 * n + (300 if n > 7 else 0) for n in range(1, 14)}
    came_ms = {n: made_ms[min(13, n + (1 - n) % 4)] + 1 for n in made_ms}
    of, steps = grouped(made_ms, came_ms)
    assert late_tokens(of) == {1: 1000, 8: 1170}
    plain = told(of, *((FIRST, each) for each in steps))
    assert [(wait["n"], wait["waited_ms"], wait["why"]) for wait in plain["waits"]] == [
        (1, 110, ["the engine computed for only 5 ms of that time"]),
        (8, 310, ["the engine computed for only 5 ms of that time"]),
    ]
    assert [each["made_ms"] for each in plain["steps"]] == list(made_ms.values())
    assert [each["ms"] for each in plain["steps"]] == list(came_ms.values())


def test_in_an_older_history_no_token_of_a_commit_is_late_because_it_came_first() -> None:
    made_ms = {n: 1100 + 10 * n for n in range(1, 14)}
    came_ms = {n: made_ms[min(13, n + (1 - n) % 4)] for n in made_ms}
    of, steps = grouped(made_ms, came_ms, age=False)
    assert late_tokens(of) == {1: 1000}
    came_ms |= {n: ms + 400 for n, ms in came_ms.items() if n > 9}
    of, steps = grouped(made_ms, came_ms, age=False)
    waits = told(of, *((FIRST, each) for each in steps))["waits"]
    assert [(wait["n"], wait["waited_ms"]) for wait in waits] == [(1, 110), *((n, 110) for n in range(10, 14))]


def test_only_the_longest_waits_are_told() -> None:
    count = 2 * MOST_WAITS + 100
    times = {n: 1000 + 10 * n + 100 * sum(i % 2 == 0 for i in range(n)) for n in range(1, count)}
    late = late_tokens(history(times))
    assert len(late) > MOST_WAITS and 1 in late
    plain = told(history(times), *((FIRST, step(n, ms, (UID, n))) for n, ms in times.items()))
    assert len(plain["waits"]) == MOST_WAITS
    assert [wait["n"] for wait in plain["waits"]] == sorted(wait["n"] for wait in plain["waits"])


def test_a_takeover_by_another_engine_leads_to_two_journals() -> None:
    over = TakenOver(engine=SECOND, epoch=4, ms=1500)
    back = Admitted(engine=SECOND, epoch=4, step=7, fingerprint="w", ms=1501)
    of = history({1: 1010, 2: 1020}, ("2-1", over), ("2-2", back), ("3-0", made(9, 1600, epoch=4)), epoch=3)
    assert spans_of(of) == {FIRST: ("3-1", "3-2"), SECOND: ("4-7", "4-9")}
    row = EventRow(uid=UID, n=2, event=over)
    plain = told(
        of,
        (SECOND, step(6, 900, ("z", 1), epoch=4)),
        (SECOND, step(7, 1501, chunks=((UID, 4),), epoch=4, events=(row,))),
        (SECOND, step(9, 1600, (UID, 3), epoch=4)),
        (FIRST, step(1, 1010, (UID, 1), epoch=3)),
        (FIRST, step(2, 1020, (UID, 2), epoch=3)),
    )
    assert [(each["engine"], each["id"]) for each in plain["steps"]] == [
        (FIRST, "3-1"), (FIRST, "3-2"), (SECOND, "4-7"), (SECOND, "4-9"),
    ]  # fmt: skip
    assert plain["complete"] and plain["waits"][-1]["n"] == 3
    assert plain["waits"][-1]["why"][0] == "its engine was gone, and another one took it over"


def test_a_running_request_goes_on_where_it_is() -> None:
    assert spans_of(history({1: 1010}, ended=False)) == {FIRST: ("1-1", "+")}
    preempted = Preempted(engine=FIRST, epoch=1, step=5, ms=1020)
    assert spans_of(history({1: 1010}, ("1-1", preempted))) == {FIRST: ("1-1", "1-5")}


def test_what_the_journal_lacks_makes_it_incomplete() -> None:
    of = history({1: 1010, 2: 1020})
    assert told(of, (FIRST, step(2, 1020, (UID, 2))))["complete"] is False
    assert told(of, (FIRST, step(1, 1010, (UID, 1))), (FIRST, step(2, 1020, (UID, 2))))["complete"] is True


@pytest.mark.parametrize("times", [{}, {1: 1010}])
def test_a_request_with_few_tokens_has_few_waits(times: dict[int, int]) -> None:
    assert set(late_tokens(history(times))) == {*times}


PREEMPTED = Preempted(engine="generate-0", epoch=1, step=1)
ADMITTED = Admitted(engine="generate-0", epoch=2, step=1, fingerprint="w")
AGAIN = "it was preempted because the pages ran out, and computed again"


def preempted(*uids: str) -> dict[str, Any]:
    return {"events": tuple(EventRow(uid=uid, n=3, event=PREEMPTED) for uid in uids)}


def test_a_long_prompt_and_preemptions_are_named() -> None:
    steps = [
        step(1, 1600, forward_ms=600, chunks=(("p", 2048),), **preempted("x", "y")),
        step(1, 2200, forward_ms=600, chunks=(("p", 2048),)),
        step(1, 2900, forward_ms=690, chunks=(("p", 1904),)),
    ]
    wait = why_waited(steps, "a", 212, since_ms=1000)
    assert str(wait) == (
        "token 212 of a waited 1.9 s: a prompt of 6,000 tokens was prefilled in 3 chunks, and 2 other requests were "
        "preempted"
    )
    assert (wait.num_steps, wait.computed_ms, wait.longest_ms) == (3, 1890, 690)


@pytest.mark.parametrize(
    ("ms", "said"), [(0.64, "0.64 ms"), (9.96, "10 ms"), (12.4, "12 ms"), (999, "999 ms"), (6193.5, "6.2 s")]
)
def test_times_below_a_second_are_said_in_milliseconds(ms: float, said: str) -> None:
    assert spoken(ms) == said
    assert f"only {said} of" in str(why_waited([step(1, 90_000, forward_ms=ms)], "a", 5, since_ms=0))


@pytest.mark.parametrize(
    ("steps", "n", "said"),
    [
        ([step(1, 1010, forward_ms=10)], 5, "nothing else happened in 1 step, the longest of which took 10 ms"),
        ([step(1, 3000, forward_ms=10)], 5, "the engine computed for only 10 ms of that time"),
        ([step(1, 1300, forward_ms=290, chunks=(("a", 90),))], 1, "90 tokens of its prompt were prefilled in 1 chunk"),
        (
            [step(1, 1300, forward_ms=290, chunks=(("b", 90), ("c", 10))), step(2, 1400, chunks=(("c", 1000),))],
            5,
            "2 prompts of 1,100 tokens were prefilled in 3 chunks",
        ),
        (
            [step(1, 1300, forward_ms=290, **preempted("a")), step(1, 1400, forward_ms=90, chunks=(("a", 64),))],
            5,
            f"{AGAIN}, and 64 tokens of its prompt and output were prefilled in 1 chunk",
        ),
        (
            [
                step(1, 1300, forward_ms=290, events=(EventRow(uid="a", n=4, event=TakenOver(engine="e", epoch=2)),)),
                step(2, 1400, forward_ms=10, events=(EventRow(uid="b", n=0, event=ADMITTED),)),
            ],
            5,
            "its engine was gone, and another one took it over",
        ),
        ([step(1, 1300, forward_ms=290, **preempted("b", "b"))], 5, "1 other request was preempted"),
    ],
)
def test_what_happened_between_two_tokens_is_said(steps: list[JournalStep], n: int, said: str) -> None:
    assert str(why_waited(steps, "a", n, since_ms=1000)).partition(": ")[2] == said
