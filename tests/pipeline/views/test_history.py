"""The story of a request is a fold of its history alone: histories written by hand, no log, no clock."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from pipeline.errors import UndecodableEvent
from pipeline.events import (
    Admitted,
    Answered,
    Cancelled,
    Event,
    Failed,
    Finished,
    Markup,
    Preempted,
    SamplingParams,
    StepCompleted,
    Submitted,
    TakenOver,
    Timings,
    Tokenized,
    TokensProduced,
    Usage,
    encode,
)
from pipeline.log.protocol import Entry
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID, tokens_id
from pipeline.views.history import Story, copied_history, state_of, story
from pipeline.walk import walk

BEGAN_MS = 1_700_000_000_000
SUBMITTED = Submitted(
    endpoint="/v1/chat/completions",
    frontend="web-0",
    model="nonsense",
    messages=({"role": "user", "content": "Hi"},),
    sampling=SamplingParams(temperature=0.5, seed=7, max_tokens=20),
    deadline_ms=BEGAN_MS + 600_000,
    labels={"user": "u1"},
)
TOKENIZED = Tokenized(token_ids=(5, 6, 7), fingerprint="t1", by="tokenize-0")
ADMITTED = Admitted(engine="generate-0", epoch=3, step=11, fingerprint="w1", cached_tokens=2)


def entry(entry_id: str, event: Event, at_ms: int) -> Entry:
    return Entry(entry_id, {"ms": str(BEGAN_MS + at_ms), **encode(event)})


def tokens(n: int, at_ms: int, *, text: str = "x", epoch: int = 3, count: int = 1, **more: Any) -> Entry:
    ids = tuple(range(n - count + 1, n + 1))
    event = TokensProduced(count=count, tokens=ids, text=text, step=f"{epoch}-{n}", **more)
    return entry(tokens_id(n), event, at_ms)


ACCEPTED = [entry(SUBMITTED_ID, SUBMITTED, 0)]
READY = [*ACCEPTED, entry(TOKENIZED_ID, TOKENIZED, 2)]
RUNNING = [*READY, entry("0-3", ADMITTED, 5)]


def finished(n: int, at_ms: int) -> Entry:
    event = Finished(
        n=n,
        reason="stop",
        usage=Usage(prompt_tokens=3, completion_tokens=n, cached_tokens=2),
        timings=Timings(admitted_ms=5, first_token_ms=9, total_ms=at_ms),
    )
    return entry(SEAL, event, at_ms)


def whats(found: dict[str, Any]) -> list[str]:
    return [moment["what"] for moment in found["moments"]]


def test_a_finished_request_tells_what_was_asked_what_came_and_when() -> None:
    found = story("a", [*RUNNING, tokens(1, 9, text="He", chunks=1), tokens(2, 12, text="llo"), finished(2, 13)])
    moments = found.pop("moments")
    assert found == {
        "uid": "a",
        "state": "finished",
        "endpoint": "/v1/chat/completions",
        "model": "nonsense",
        "submitted_ms": BEGAN_MS,
        "deadline_ms": BEGAN_MS + 600_000,
        "labels": {"user": "u1"},
        "sampling": SUBMITTED.sampling.model_dump(mode="json"),
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "text": "Hello",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 2},
        "timings": {"admitted_ms": 5, "first_token_ms": 9, "total_ms": 13},
    }
    assert [(m["at_ms"], m["id"], m["what"], m["who"], m["n"]) for m in moments] == [
        (0, "0-1", "submitted", "web-0", 0),
        (2, "0-2", "tokenized", "tokenize-0", 0),
        (5, "0-3", "admitted", "generate-0 epoch 3", 0),
        (9, "1-0", "tokens", "generate-0 epoch 3", 2),
        (13, SEAL, "finished", "", 2),
    ]


def test_a_moment_shows_what_its_event_carries() -> None:
    admitted = story("a", RUNNING)["moments"][2]
    assert {name: admitted[name] for name in ("step", "fingerprint", "cached_tokens")} == {
        "step": 11,
        "fingerprint": "w1",
        "cached_tokens": 2,
    }
    tokenized = story("a", READY)["moments"][1]
    assert (tokenized["prompt_tokens"], tokenized["fingerprint"]) == (3, "t1")
    assert "token_ids" not in tokenized


@pytest.mark.parametrize(
    ("history", "state"),
    [
        (ACCEPTED, "queued"),
        (READY, "tokenized"),
        (RUNNING, "running"),
        ([*RUNNING, tokens(1, 9)], "running"),
        ([*READY, entry("0-3", TakenOver(engine="generate-0", epoch=2), 4)], "running"),
        ([*RUNNING, finished(0, 9)], "finished"),
        ([*READY, entry(SEAL, Failed(status=500, code="c", message="m"), 4)], "failed"),
        ([*ACCEPTED, entry(SEAL, Cancelled(by="client"), 4)], "cancelled"),
        ([*ACCEPTED, entry(SEAL, Answered(by="tokenize-0"), 4)], "finished"),
    ],
    ids=["queued", "tokenized", "admitted", "writing", "taken over", "finished", "failed", "cancelled", "answered"],
)
def test_the_state_is_how_far_the_request_has_come(history: list[Entry], state: str) -> None:
    assert story("a", history)["state"] == state_of(history) == state


def test_a_prompt_tells_how_its_answer_is_read() -> None:
    markup = Markup(tools="hermes", think=("<think>", "</think>"))
    told = story("u1", [*ACCEPTED, entry(TOKENIZED_ID, TOKENIZED.model_copy(update={"markup": markup}), 2)])
    assert (told["moments"][-1]["calls"], told["moments"][-1]["thinking"]) == ("hermes", "<think> </think>")
    assert not {"calls", "thinking"} & set(story("u1", READY)["moments"][-1])


def test_a_failed_request_tells_its_error_and_a_cancelled_one_who_ended_it() -> None:
    failed = story("a", [*READY, entry(SEAL, Failed(status=500, code="c", message="No.", param="prompt"), 4)])
    assert failed["error"] == {"code": "c", "message": "No.", "status": 500, "param": "prompt"}
    cancelled = story("a", [*READY, entry(SEAL, Cancelled(by="client"), 4)])
    assert cancelled["moments"][-1]["who"] == "client"
    assert "error" not in cancelled and "finish_reason" not in cancelled


def test_what_the_tokenizer_answered_is_told_by_its_tokens_number_or_its_text() -> None:
    answered = Answered(token_ids=(5, 6, 7), pieces=("a", "b", "c"), by="tokenize-0")
    told = story("a", [*ACCEPTED, entry(SEAL, answered, 4)])
    assert (told["prompt_tokens"], told["completion_tokens"], told["text"]) == (3, 0, "")
    assert told["moments"][-1] == {"at_ms": 4, "id": SEAL, "what": "answered", "who": "tokenize-0", "n": 0}
    told = story("a", [*ACCEPTED, entry(SEAL, Answered(text="abc", by="tokenize-0"), 4)])
    assert (told["prompt_tokens"], told["text"]) == (None, "abc")


def test_a_thousand_tokens_in_a_row_are_one_moment_with_its_longest_pause() -> None:
    at_ms = [10 * n + (300 if n > 700 else 0) for n in range(1, 1001)]
    found = story("a", [*RUNNING, *(tokens(n, at, text=f"{n} ") for n, at in enumerate(at_ms, 1))])
    assert whats(found) == ["submitted", "tokenized", "admitted", "tokens"]
    run = found["moments"][-1]
    assert (run["first_n"], run["n"], run["count"]) == (1, 1000, 1000)
    assert (run["id"], run["last_id"]) == ("1-0", "1000-0")
    assert (run["at_ms"], run["last_at_ms"], run["longest_pause_ms"]) == (10, 10300, 310)
    assert found["completion_tokens"] == 1000
    assert found["text"].startswith("1 2 3 ") and found["text"].endswith("999 1000 ")


def test_the_longest_pause_is_that_of_the_engine_and_the_client_has_its_own() -> None:
    said = [(1, 10, 0), (2, 30, 15), (3, 30, 10), (4, 30, 2), (5, 40, 3)]
    found = story("a", [*RUNNING, *(tokens(n, at, age_ms=age) for n, at, age in said)])
    run = found["moments"][-1]
    assert (run["at_ms"], run["last_at_ms"]) == (10, 40)
    assert (run["longest_pause_ms"], run["longest_client_pause_ms"]) == (9, 20)
    older = story("a", [*RUNNING, *(tokens(n, at) for n, at, _ in said)])["moments"][-1]
    assert (older["longest_pause_ms"], older["longest_client_pause_ms"]) == (10, 20)


def test_an_event_of_several_tokens_counts_them_all() -> None:
    found = story("a", [*RUNNING, tokens(3, 9, count=3), tokens(5, 12, count=2)])
    run = found["moments"][-1]
    assert (run["first_n"], run["n"], run["count"], found["completion_tokens"]) == (1, 5, 5, 5)


def test_every_takeover_and_preemption_parts_the_tokens_around_it() -> None:
    history = [
        *RUNNING,
        tokens(1, 9, chunks=1),
        tokens(2, 12),
        entry("2-1", Preempted(engine="generate-0", epoch=3, step=14), 13),
        entry("2-2", ADMITTED.model_copy(update={"step": 20, "cached_tokens": 0}), 30),
        tokens(3, 40, chunks=2),
        entry("3-1", TakenOver(engine="generate-0", epoch=4), 900),
        entry("3-2", TakenOver(engine="generate-1", epoch=1), 1900),
        tokens(4, 2000, epoch=1, chunks=1),
    ]
    found = story("a", history)
    assert whats(found)[2:] == [
        "admitted",
        "tokens",
        "preempted",
        "admitted",
        "tokens",
        "taken_over",
        "taken_over",
        "tokens",
    ]
    assert [(m["who"], m["n"]) for m in found["moments"][-3:]] == [
        ("generate-0 epoch 4", 3),
        ("generate-1 epoch 1", 3),
        ("generate-1 epoch 1", 4),
    ]
    assert [m["chunks"] for m in found["moments"] if m["what"] == "tokens"] == [1, 2, 1]


def test_tokens_of_another_epoch_are_a_moment_of_their_own() -> None:
    found = story("a", [*RUNNING, tokens(1, 9), tokens(2, 900, epoch=4)])
    assert [m["who"] for m in found["moments"][-2:]] == ["generate-0 epoch 3", "generate-0 epoch 4"]


def test_tokens_that_the_log_lost_are_shown_where_they_are_missing() -> None:
    found = story("a", [*RUNNING, tokens(1, 9), tokens(4, 12), tokens(5, 13)])
    assert whats(found)[-3:] == ["tokens", "missing", "tokens"]
    missing, after = found["moments"][-2:]
    assert (missing["first_n"], missing["n"], missing["count"], missing["at_ms"]) == (2, 3, 2, 12)
    assert (after["first_n"], after["n"]) == (4, 5)


def test_tokens_that_an_event_after_them_counts_are_missing_too() -> None:
    preempted = entry("3-1", Preempted(engine="generate-0", epoch=3, step=14), 13)
    found = story("a", [*RUNNING, tokens(1, 9), preempted, finished(5, 20)])
    assert [(m["what"], m["n"]) for m in found["moments"][-4:]] == [
        ("missing", 3),
        ("preempted", 3),
        ("missing", 5),
        ("finished", 5),
    ]
    assert found["completion_tokens"] == 5


def test_a_history_that_was_cut_is_told_from_its_first_entry() -> None:
    found = story("a", [tokens(7, 50), finished(7, 60)])
    assert (found["state"], found["submitted_ms"], found["endpoint"]) == ("finished", BEGAN_MS + 50, "")
    assert (found["prompt_tokens"], found["completion_tokens"]) == (3, 7)
    assert [m["at_ms"] for m in found["moments"]] == [0, 0, 10]
    assert found["moments"][0]["what"] == "missing"


def test_the_number_of_prompt_tokens_is_unknown_before_the_tokenizer_counted_them() -> None:
    assert story("a", ACCEPTED)["prompt_tokens"] is None


def test_a_story_is_plain_json() -> None:
    found = story("a", [*RUNNING, tokens(1, 9), finished(1, 13)])
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([], "no entries"),
        ([*ACCEPTED, Entry("0-2", {"kind": "dreamt"})], "unknown kind 'dreamt'"),
        ([*ACCEPTED, Entry("0-2", {"kind": "tokenized", "token_ids": "[1,"})], "tokenized"),
        ([*ACCEPTED, entry("0-2", StepCompleted(rows=()), 1)], "step"),
    ],
    ids=["empty", "unknown", "broken", "out of place"],
)
def test_what_does_not_decode_is_refused(history: list[Entry], expected: str) -> None:
    with pytest.raises(UndecodableEvent, match=expected):
        story("a", history)


def test_of_no_history_there_is_no_state() -> None:
    with pytest.raises(UndecodableEvent, match="no entries"):
        state_of([])


def letter(history: str) -> Entry:
    return Entry("5-0", {"uid": "a", "history": history})


def test_the_copy_in_a_dead_letter_is_a_history() -> None:
    copy = json.dumps([[each.id, *(part for pair in each.fields.items() for part in pair)] for each in RUNNING])
    assert copied_history(letter(copy)) == RUNNING


@pytest.mark.parametrize("history", ["", "[", "5", "[5]", '["a"]', '[["1-0", "ms"]]', '[["1-0", [], 2]]', "[[]]"])
def test_what_is_no_copy_of_a_history_is_refused(history: str) -> None:
    with pytest.raises(UndecodableEvent, match="5-0"):
        copied_history(letter(history))
    with pytest.raises(UndecodableEvent, match="5-0"):
        copied_history(Entry("5-0", {"uid": "a"}))


def told(history: list[Entry]) -> dict[str, Any]:
    """Return what the changes of all events come to, each as it is when it is sent."""
    fold, facts = Story(), dict[str, Any](moments={}, bars={}, tokens=[])
    for each in walk(history, over_holes=True):
        changes = copy.deepcopy(fold.add(each.id, each.n, each.event))
        facts |= changes.facts
        facts["moments"] |= changes.moments
        facts["bars"] |= changes.bars
        facts["tokens"] += changes.tokens
    facts["tokens"] += fold.rest().tokens
    return facts


def test_the_changes_that_events_make_come_to_the_story() -> None:
    history = [*RUNNING, tokens(1, 9), tokens(4, 12, count=2, age_ms=1), tokens(5, 19), tokens(6, 19), finished(6, 20)]
    found, whole = told(history), story("a", history)
    assert [*found["moments"].values()] == whole["moments"]
    assert {name: found[name] for name in ("state", "usage", "completion_tokens", "submitted_ms", "model")} == {
        name: whole[name] for name in ("state", "usage", "completion_tokens", "submitted_ms", "model")
    }


@pytest.mark.parametrize("is_known", [True, False])
def test_a_token_tells_when_it_was_made_and_with_which_it_came(is_known: bool) -> None:
    """Tokens 2 to 4 were committed together, and 6 follows a hole."""
    said = [(1, 10, 0), (2, 40, 20), (3, 40, 10), (4, 40, 0), (6, 60, 2), (7, 70, 0)]
    found = told([*RUNNING, *(tokens(n, at, age_ms=age if is_known else None) for n, at, age in said)])["tokens"]
    names = ("n", "at_ms", "pause_ms", "client_at_ms", "client_pause_ms", "commit", "estimated")
    after_ms = 58 if is_known else 60
    assert [tuple(token[name] for name in names) for token in found] == [
        (1, 10, 10, 10, 10, 1, False),
        (2, 20, 10, 40, 30, 2, not is_known),
        (3, 30, 10, 40, 0, 2, not is_known),
        (4, 40, 10, 40, 0, 2, not is_known),
        (6, after_ms, 0, 60, 0, 6, False),
        (7, 70, 70 - after_ms, 70, 10, 7, False),
    ]


def test_the_bars_are_the_waits_and_what_each_engine_did() -> None:
    history = [
        *RUNNING,
        tokens(1, 9, chunks=2),
        tokens(2, 12),
        entry("2-1", Preempted(engine="generate-0", epoch=3, step=14), 13),
        entry("2-2", ADMITTED.model_copy(update={"step": 20}), 30),
        tokens(3, 40, chunks=1),
        entry("3-1", TakenOver(engine="generate-1", epoch=4), 900),
        entry("3-2", ADMITTED.model_copy(update={"engine": "generate-1", "epoch": 4, "step": 1}), 950),
    ]

    def bars(history: list[Entry]) -> list[tuple[Any, ...]]:
        names = ("lane", "kind", "from_ms", "to_ms")
        return [tuple(bar[name] for name in names) for bar in told(history)["bars"].values()]

    engine, other = "generate-0 epoch 3", "generate-1 epoch 4"
    assert bars(history) == [
        ("way", "tokenize", 0, 2),
        ("way", "wait", 2, 5),
        (engine, "prefill", 5, 9),
        (engine, "decode", 9, 13),
        ("way", "preempted", 13, 30),
        (engine, "prefill", 30, 40),
        (engine, "decode", 40, 40),
        ("way", "gone", 40, 950),
        (other, "prefill", 950, None),
    ]
    ended = bars([*history, tokens(4, 960, epoch=4), finished(4, 990)])
    assert ended[-2:] == [(other, "prefill", 950, 960), (other, "decode", 960, 990)]
    assert [bar[1] for bar in bars([entry("0-3", ADMITTED, 5), tokens(1, 9), finished(1, 13)])] == ["prefill", "decode"]
    assert bars(ACCEPTED) == [("way", "tokenize", 0, None)]


def test_a_request_that_finished_tells_when_its_engine_took_it() -> None:
    """An engine says so at the end of the step, and how long the step took is known at the end of the request."""
    bars = told([*READY, entry("0-3", ADMITTED, 8), tokens(1, 9), finished(1, 13)])["bars"]
    assert [(bar["kind"], bar["from_ms"], bar["to_ms"]) for bar in bars.values()] == [
        ("tokenize", 0, 2),
        ("wait", 2, 5),
        ("prefill", 5, 9),
        ("decode", 9, 13),
    ]
