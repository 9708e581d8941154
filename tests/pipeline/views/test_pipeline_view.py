"""The fold of looks into pictures: who works, what waits, how fast; no Redis, no clock, no terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from pipeline.events import (
    Admitted,
    Answered,
    Cancelled,
    Event,
    Failed,
    Finished,
    Preempted,
    SamplingParams,
    Submitted,
    TakenOver,
    Timings,
    Tokenized,
    TokensProduced,
    Usage,
    encode,
)
from pipeline.log.protocol import GUEST, Depth, Entry, Lease, Occupancy
from pipeline.log.snapshot import HistoryEnds, HistoryQuery, LogSnapshot, RedisFacts, SlotState
from pipeline.metrics import families
from pipeline.metrics.counters import Measures
from pipeline.names import SEAL
from pipeline.stage.slots import Status
from pipeline.views.pipeline import (
    MOST_REQUESTS,
    EngineView,
    Observed,
    PipelineView,
    SlotView,
    median,
    observe,
    queries_for,
    view_of,
)
from pipeline.views.requests import RequestView

START_MS = 1_000_000
SUBMITTED = Submitted(endpoint="/v1/completions", frontend="web-0", prompt="p", sampling=SamplingParams())
TOKENIZED = Tokenized(token_ids=(1, 2, 3), fingerprint="t", by="tokenize-0")
ADMITTED = Admitted(engine="generate-0", epoch=1, step=1, fingerprint="w", cached_tokens=2)


def a_look(ms: int = 0, **fields: Any) -> LogSnapshot:
    """A log with nothing in it, so many milliseconds after the start."""
    empty = LogSnapshot(
        now_ms=START_MS + ms,
        redis=RedisFacts("Redis", "7.0.15", 60, 1_000_000, 0),
        occupancy=Occupancy(Depth(0, 0), Depth(0, 0), {}, 0, 0),
        slots={},
        pending={},
        living=(),
        held={},
    )
    return replace(empty, **fields)


def a_slot(
    slot: str = "generate-0",
    said_ms: int = 0,
    measures: Measures | None = None,
    *,
    epoch: int = 1,
    lease: Lease | None = None,
    **changes: object,
) -> SlotState:
    """A slot whose worker is ready, and said so then."""
    owner = f"{epoch}:n"
    status = Status(slot=slot, owner=owner, pid=7, host="here", phase="ready").model_copy(update=changes)
    if measures is not None:
        status = status.model_copy(update={"metrics": measures.snapshot()})
    held = Lease(owner, 2000) if lease is None else lease
    return SlotState(owner, held, status.model_dump_json(), START_MS + said_ms)


def after(*looks: LogSnapshot, peeks: Mapping[str, HistoryEnds] | None = None) -> Observed:
    """What is known after these looks, the last of which brought the peeks."""
    reading: Observed | None = None
    for snapshot in looks[:-1]:
        reading = observe(reading, snapshot, {})
    return observe(reading, looks[-1], peeks or {})


# stages


def slot_of(seen: SlotState, **snapshot: Any) -> SlotView:
    (shown,) = view_of(after(a_look(slots={"generate-0": seen}, **snapshot))).slots
    return shown


def test_a_worker_is_shown_as_it_says_with_its_lease_and_what_it_has() -> None:
    shown = slot_of(a_slot(epoch=3, phase="draining", detail="d"), pending={"generate-0": 5, "generate-1": 6})
    assert shown == SlotView("generate-0", "draining", "d", 0.0, "here", 7, 3, 2000, 5, "", 0)


LOADING: dict[str, Any] = {"owner": "", "phase": "loading", "detail": "weights", "progress": 0.4}
HOLDER = SlotState("2:n", Lease("2:n", 900), "", 0)
GUARDED = SlotState(f"2:{GUEST}x", Lease(f"2:{GUEST}x", 900), "", 0)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (
            a_slot(lease=Lease("", 0), detail="d"),
            {"phase": "away", "lease_ms": 0, "pid": 7, "pending": 5, "detail": ""},
        ),
        (SlotState("4:n", Lease("", 0), "", 0), {"phase": "away", "epoch": 4}),
        (
            a_slot(lease=Lease("", 0), **LOADING),
            {"phase": "loading", "detail": "weights", "progress": 0.4, "lease_ms": 0},
        ),
        (a_slot(lease=GUARDED.lease, **LOADING), {"phase": "loading", "lease_ms": 900}),
        (replace(HOLDER, status=a_slot(epoch=1).status), {"phase": "held", "epoch": 2, "pid": 0}),
        (GUARDED, {"phase": "guest"}),
        (HOLDER, {"phase": "held"}),
        (replace(a_slot(), status='{"slot": 1}'), {"phase": "held", "pid": 0}),
    ],
    ids=[
        *("nobody holds it", "nobody who spoke", "who has no slot yet", "who has no slot yet beside a guest"),
        *("who had it before spoke", "a guest", "who holds it says nothing", "a status of another version"),
    ],
)
def test_a_slot_says_who_has_it_or_had_it(seen: SlotState, expected: dict[str, Any]) -> None:
    shown = slot_of(seen, pending={"generate-0": 5})
    assert {name: getattr(shown, name) for name in expected} == expected


def test_slots_are_in_the_order_of_a_requests_way() -> None:
    names = ["janitor-0", "generate-10", "generate-2", "detokenize-0", "web-0", "tokenize-1"]
    view = view_of(after(a_look(slots={name: a_slot(name) for name in names})))
    in_order = ["web-0", "tokenize-1", "generate-2", "generate-10", "detokenize-0", "janitor-0"]
    assert [slot.slot for slot in view.slots] == in_order
    assert [engine.engine for engine in view.engines] == ["generate-2", "generate-10"]


def test_a_frontend_says_how_many_clients_it_streams_to() -> None:
    measures = Measures()
    measures.set(families.STREAMS_OPEN, 4)
    seen = a_slot("web-0", 0, measures, address="http://h:1")
    (shown,) = view_of(after(a_look(slots={"web-0": seen}))).slots
    assert (shown.address, shown.streams_open) == ("http://h:1", 4)


# streams


def test_streams_are_shown_with_what_waits_and_what_is_worked_on() -> None:
    steps = {"generate-10": Depth(1, 1), "generate-2": Depth(5, 2)}
    view = view_of(after(a_look(occupancy=Occupancy(Depth(3, 1), Depth(9, 8), steps, 2, 12))))
    assert [(each.stream, each.length, each.pending, each.lag) for each in view.streams] == [
        ("submitted", 3, 1, 2),
        ("tokenized", 9, 8, 1),
        ("steps:generate-2", 5, 2, 3),
        ("steps:generate-10", 1, 1, 0),
    ]
    assert (view.num_dead, view.num_live) == (2, 12)


# engines


def engine_after(*looks: LogSnapshot) -> EngineView:
    (engine,) = view_of(after(*looks)).engines
    return engine


def counted(prompt: int, output: int) -> Measures:
    measures = Measures()
    measures.add(families.PROMPT_TOKENS, amount=prompt)
    measures.add(families.GENERATION_TOKENS, amount=output)
    return measures


def generating(ms: int, prompt: int, output: int, *, said_ms: int | None = None, **slot: Any) -> LogSnapshot:
    said_ms = ms if said_ms is None else said_ms
    return a_look(ms, slots={"generate-0": a_slot("generate-0", said_ms, counted(prompt, output), **slot)})


def rates(engine: EngineView) -> tuple[float | None, float | None]:
    return engine.prompt_tokens_per_s, engine.output_tokens_per_s


def test_an_engine_is_shown_with_what_it_holds_and_serves() -> None:
    measures = Measures()
    for gauge, value in ((families.NUM_RUNNING, 3), (families.NUM_WAITING, 2), (families.KV_CACHE_USAGE, 0.25)):
        measures.set(gauge, value)
    for counter, amount in ((families.NUM_PREEMPTIONS, 4), (families.PREFIX_QUERIES, 200), (families.PREFIX_HITS, 50)):
        measures.add(counter, amount=amount)
    seen = a_slot("generate-0", 0, measures, models=("m", "n"), context=128)
    assert engine_after(a_look(slots={"generate-0": seen})) == EngineView(
        "generate-0", "m", 128, running=3, waiting=2, preemptions=4, cache_used=0.25, prefix_hits=0.25
    )


def test_rates_are_what_was_counted_between_two_times_that_the_worker_spoke() -> None:
    assert rates(engine_after(generating(0, 100, 10))) == (None, None)
    assert rates(engine_after(generating(0, 100, 10), generating(2000, 300, 20))) == (100, 5)
    assert rates(engine_after(generating(0, 100, 10), generating(2000, 100, 10))) == (0, 0)


def test_a_look_before_the_worker_spoke_again_changes_no_rate() -> None:
    looks = [generating(0, 0, 0), generating(1000, 10, 20), generating(1030, 10, 20, said_ms=1005)]
    assert rates(engine_after(*looks)) == (10, 20)
    looks += [generating(1900, 10, 20, said_ms=1002), generating(2100, 40, 60, said_ms=2000)]
    assert rates(engine_after(*looks)) == (30, 40)


def test_a_counter_that_begins_anew_is_no_negative_rate() -> None:
    looks = [generating(0, 1000, 1000), generating(1000, 2000, 2000), generating(2000, 10, 20)]
    assert rates(engine_after(*looks)) == (None, None)


def test_a_restarted_engine_has_no_rate_until_it_spoke_twice() -> None:
    looks = [generating(0, 10, 10), generating(1000, 5000, 5000, epoch=2)]  # more than before, of another process
    assert rates(engine_after(*looks)) == (None, None)
    looks.append(generating(2000, 5001, 5002, epoch=2))
    assert rates(engine_after(*looks)) == (1, 2)


def test_what_a_dead_engine_said_last_is_not_what_it_does() -> None:
    looks = [generating(0, 0, 0), generating(1000, 10, 20), generating(4000, 10, 20, said_ms=1000, lease=Lease("", 0))]
    assert engine_after(*looks) == EngineView("generate-0", "", 0)


def test_latencies_are_the_medians_of_what_its_detokenizer_saw_between_two_times_that_it_spoke() -> None:
    def snapshot(ms: int, first_s: list[float], between_s: list[float]) -> LogSnapshot:
        measures = Measures()
        for value in first_s:
            measures.observe(families.FIRST_TOKEN_SECONDS, value)
        for value in between_s:
            measures.observe(families.BETWEEN_TOKENS_SECONDS, value)
        engine = a_slot("generate-1", ms, counted(0, 0))
        return a_look(ms, slots={"generate-1": engine, "detokenize-1": a_slot("detokenize-1", ms, measures)})

    slow = [30.0] * 9
    engine = engine_after(snapshot(0, slow, slow), snapshot(1000, [*slow, 0.3, 0.4], slow))
    assert engine.first_token_p50_s == 0.375  # of the bucket from 0.25 to 0.5
    assert engine.between_tokens_p50_s is None
    assert engine_after(snapshot(0, slow, slow)).first_token_p50_s is None
    begun = engine_after(snapshot(0, [], []), snapshot(1000, [0.3], [0.0005]))
    assert (begun.first_token_p50_s, begun.between_tokens_p50_s) == (0.375, 0.00025)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([0, 0, 0], None), ([4, 0, 0], 0.5), ([1, 3, 0], 4 / 3), ([2, 2, 0], 1.0), ([0, 0, 7], 2.0), ([3, -1, 0], None)],
    ids=str,
)
def test_the_median_is_read_off_the_buckets(counts: list[int], expected: float | None) -> None:
    assert median(counts, (1.0, 2.0)) == expected


# requests


def peek(*events: Event, n: int = 0, ms: int = START_MS) -> HistoryEnds:
    """What a history of these events, so many milliseconds long ago, shows: the last one has the tokens up to *n*."""
    entries = []
    for k, event in enumerate(events, 1):
        entry_id = SEAL if isinstance(event, Finished | Failed | Cancelled | Answered) else f"0-{k}"
        entry_id = f"{n}-0" if isinstance(event, TokensProduced) else entry_id
        entries.append(Entry(entry_id, {"ms": str(ms), **encode(event)}))
    head = tuple(entry for entry in entries if entry.id.startswith("0-"))
    return HistoryEnds(True, head, entries[-1] if entries and entries[-1].id not in ("0-1", "0-2") else None)


def produced(epoch: int = 1) -> TokensProduced:
    return TokensProduced(tokens=(1,), text="x", step=f"{epoch}-9")


def request(seen: HistoryEnds, **snapshot: Any) -> RequestView:
    (shown,) = view_of(after(a_look(**snapshot), peeks={"a": seen})).requests
    return shown


@pytest.mark.parametrize(
    ("events", "held", "expected"),
    [
        ([SUBMITTED], "", ("queued", "", "")),
        ([SUBMITTED], "tokenize-1", ("tokenizing", "", "")),
        ([SUBMITTED, TOKENIZED], "", ("waiting", "", "")),
        ([SUBMITTED, TOKENIZED], "generate-1", ("waiting", "", "generate-1")),
        ([SUBMITTED, TOKENIZED, ADMITTED], "generate-0", ("running", "", "generate-0")),
        ([SUBMITTED, TOKENIZED, ADMITTED, produced()], "generate-0", ("running", "", "generate-0")),
        (
            [SUBMITTED, TOKENIZED, ADMITTED, Preempted(engine="generate-0", epoch=1, step=1)],
            "generate-0",
            ("preempted", "", "generate-0"),
        ),
        ([SUBMITTED, TOKENIZED, TakenOver(engine="generate-2", epoch=4)], "", ("running", "", "generate-2")),
        ([SUBMITTED, Failed(status=400, code="too_long", message="m")], "", ("failed", "too_long", "")),
        ([SUBMITTED, TOKENIZED, ADMITTED, Cancelled(by="client")], "", ("cancelled", "by client", "generate-0")),
        ([SUBMITTED, Answered(by="tokenize-0")], "", ("finished", "by tokenize-0", "")),
    ],
)
def test_how_far_a_request_is_follows_from_the_ends_of_its_history(
    events: list[Event], held: str, expected: tuple[str, str, str]
) -> None:
    shown = request(peek(*events), held={"a": held} if held else {})
    assert (shown.state, shown.reason, shown.engine) == expected


def test_a_finished_request_has_its_counts_its_time_and_its_rate() -> None:
    usage = Usage(prompt_tokens=3, completion_tokens=11, cached_tokens=2)
    end = Finished(n=11, reason="length", usage=usage, timings=Timings(admitted_ms=1, first_token_ms=100, total_ms=600))
    seen = peek(SUBMITTED, TOKENIZED, ADMITTED, end)
    assert seen.last is not None
    ended = replace(seen, last=Entry(SEAL, {**seen.last.fields, "ms": str(START_MS + 600)}))
    assert request(ended, now_ms=START_MS + 5000) == RequestView(
        "a", "finished", "length", "/v1/completions", 5000, 600, 3, 2, 11, 20.0, "generate-0"
    )


def test_a_running_request_makes_tokens_since_the_look_before_or_since_its_submit() -> None:
    first = after(a_look(2000), peeks={"a": peek(SUBMITTED, TOKENIZED, ADMITTED, produced(), n=10)})
    assert [each.tokens_per_s for each in view_of(first).requests] == [5.0]
    later = observe(first, a_look(2500), {"a": peek(produced(), n=30)})
    (shown,) = view_of(later).requests
    assert (shown.output_tokens, shown.tokens_per_s, shown.cached_tokens) == (30, 40.0, 2)
    stalled = observe(later, a_look(3500), {"a": peek(produced(), n=30)})
    assert [each.tokens_per_s for each in view_of(stalled).requests] == [0.0]


def test_one_that_a_tokenizer_let_fall_is_queued_again() -> None:
    first = after(a_look(held={"a": "tokenize-0"}), peeks={"a": peek(SUBMITTED)})
    later = observe(first, a_look(1000), {"a": HistoryEnds(True)})
    assert [each.state for each in view_of(later).requests] == ["queued"]


def test_tokens_of_another_epoch_are_of_whichever_engine_has_the_request_now() -> None:
    running = after(a_look(), peeks={"a": peek(SUBMITTED, TOKENIZED, ADMITTED)})
    seen = {"a": peek(produced(epoch=7), n=5)}
    assert [each.engine for each in view_of(observe(running, a_look(1000), seen)).requests] == [""]
    taken_over = observe(running, a_look(1000, held={"a": "generate-1"}), seen)
    assert [each.engine for each in view_of(taken_over).requests] == ["generate-1"]
    ended = observe(taken_over, a_look(2000), {"a": peek(Cancelled(by="client"))})
    assert [each.engine for each in view_of(ended).requests] == ["generate-1"]


def test_what_does_not_decode_is_unreadable_and_costs_no_other_request() -> None:
    seen = {"b": HistoryEnds(True, (Entry("0-1", {"kind": "dreamt"}),)), "a": peek(SUBMITTED)}
    view = view_of(after(a_look(), peeks=seen))
    assert [(each.uid, each.state) for each in view.requests] == [("b", "unreadable"), ("a", "queued")]


def test_a_request_that_is_gone_is_not_shown() -> None:
    first = after(a_look(), peeks={"a": peek(SUBMITTED, Cancelled(by="client"))})
    assert len(view_of(first).requests) == 1
    assert view_of(observe(first, a_look(1000), {"a": HistoryEnds(False)})).requests == ()


def test_of_a_history_is_asked_what_is_not_known_of_it() -> None:
    snapshot = a_look(living=("q", "r"))
    assert queries_for(None, snapshot, ["e"]) == {uid: HistoryQuery("", last=True) for uid in "rqe"}
    seen = {
        "q": peek(SUBMITTED),
        "r": peek(SUBMITTED, TOKENIZED, ADMITTED, produced(), n=1),
        "e": peek(SUBMITTED, Cancelled(by="client")),
    }
    reading = observe(None, snapshot, seen)
    assert queries_for(reading, snapshot, ["e", "new"]) == {
        "r": HistoryQuery(SEAL, last=True),
        "q": HistoryQuery("0-1", last=True),
        "new": HistoryQuery("", last=True),
        "e": HistoryQuery(SEAL, last=False),
    }


def test_of_many_requests_the_newest_are_asked_for() -> None:
    uids = [f"{number:05}" for number in range(1000)]
    assert list(queries_for(None, a_look(living=tuple(uids[:900])), uids[900:])) == uids[: -MOST_REQUESTS - 1 : -1]


def test_a_picture_has_the_moment_and_the_server_of_its_look() -> None:
    view = view_of(after(a_look(5)))
    assert isinstance(view, PipelineView)
    assert (view.at_ms, view.redis.name, view.redis.version) == (START_MS + 5, "Redis", "7.0.15")
    assert view.error == ""
