"""`make recovery`: what a pause is, how long it may be, and when an answer is whole; then a real run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest
from chaos import recovery_figures as figures
from chaos.recovery_figures import (
    Pause,
    Resumed,
    longest_pause,
    resumed,
    what_is_wrong,
)
from support.checkpoints import make_checkpoint
from support.servers import measured

from ops.bench.load import Arrival
from ops.sse_reader import Frame
from pipeline.events import (
    Admitted,
    AnyEvent,
    Finished,
    SamplingParams,
    Submitted,
    TakenOver,
    Timings,
    Tokenized,
    TokensProduced,
    Usage,
    encode,
)
from pipeline.log.protocol import Entry
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID

TIMINGS = Timings(admitted_ms=20, first_token_ms=100, total_ms=1701)


def entry(entry_id: str, event: AnyEvent, ms: int) -> Entry:
    return Entry(entry_id, encode(event) | {"ms": str(ms)})


def tokens(n: int, ms: int, text: str = "a") -> Entry:
    return entry(f"{n}-0", TokensProduced(count=1, tokens=(7,), text=text, step=f"1-{n}"), ms)


def finished(n: int, ms: int) -> Entry:
    usage = Usage(prompt_tokens=3, completion_tokens=n)
    return entry(SEAL, Finished(n=n, reason="length", usage=usage, timings=TIMINGS), ms)


BEGUN = (
    entry(SUBMITTED_ID, Submitted(endpoint="chat", frontend="web-0", sampling=SamplingParams()), 100),
    entry(TOKENIZED_ID, Tokenized(token_ids=(1, 2, 3), fingerprint="f", by="tokenize-0"), 110),
    entry("0-3", Admitted(engine="generate-0", epoch=1, step=1, fingerprint="f"), 120),
    tokens(1, 200),
    tokens(2, 300),
)
EPOCH_2 = TakenOver(engine="generate-0", epoch=2)
HISTORY = (*BEGUN, entry("2-1", EPOCH_2, 1500), tokens(3, 1700), tokens(4, 1800), finished(4, 1801))


def wire(*texts: str, ends: int = 1, completion_tokens: int = 4, done: int = 1) -> list[Arrival]:
    """Return the pieces of a stream, one frame each, at 0, 1, 2 .. s."""

    def chunk(delta: str, reason: str | None) -> bytes:
        choice = {"index": 0, "delta": {"content": delta}, "finish_reason": reason}
        return b"data: " + orjson.dumps({"choices": [choice]}) + b"\n\n"

    usage = {"prompt_tokens": 3, "completion_tokens": completion_tokens}
    pieces = [chunk(text, None) for text in texts] + [chunk("", "length")] * ends
    pieces += [b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n"] + [b"data: [DONE]\n\n"] * done
    return [(float(place), piece) for place, piece in enumerate(pieces)]


def test_a_history_says_when_each_token_and_the_end_came() -> None:
    assert figures.token_times_ms(HISTORY) == {1: 200, 2: 300, 3: 1700, 4: 1800, 5: 1801}


def at(came_s: float, entry_id: str) -> tuple[float, Frame]:
    return came_s, Frame("{}", entry_id)


def test_pauses_are_between_frames_that_bring_something() -> None:
    seen = [at(0.5, ""), at(1.0, "1-0"), at(1.5, "2-0"), at(1.5, ""), at(3.0, "3-0"), at(3.25, "4-0"), at(3.5, SEAL)]
    assert figures.pauses_of(seen, figures.token_times_ms(HISTORY)) == [
        Pause(1.0, 1.5, 0.5),
        Pause(1.5, 3.0, 1.5),
        Pause(3.0, 3.25, 0.25),
        Pause(3.25, 3.5, 0.25),
    ]


def test_what_tokens_took_that_had_nothing_to_show_is_no_pause() -> None:
    """Token 2, 100 ms after 1, and token 4, 100 ms after 3, had no text; between 2 and 3 was the kill."""
    seen = [at(1.0, "1-0"), at(1.0 + 1.75, "4-0")]
    (pause,) = figures.pauses_of(seen, figures.token_times_ms(HISTORY))
    assert pause == Pause(1.0, 2.75, pytest.approx(1.75 - 0.2))  # type: ignore[arg-type]


def between(began_s: float, ended_s: float) -> Pause:
    return Pause(began_s, ended_s, ended_s - began_s)


PAUSES = [between(0, 5), between(5, 5.25), between(5.25, 7.25), between(7.25, 7.5), between(7.5, 17.5)]


def test_the_longest_pause_around_the_kill_ends_after_it_and_begins_before_the_stream_goes_on() -> None:
    assert longest_pause(PAUSES, 5.5, 7.2) == between(5.25, 7.25)
    assert longest_pause(PAUSES, 5.1, 7.2) == between(5.25, 7.25)
    assert longest_pause(PAUSES, 4.9, 7.2) == between(0, 5)
    assert longest_pause(PAUSES, 7.3) == between(7.5, 17.5)
    assert longest_pause(PAUSES, 18.0) is None  # no frame came after the kill
    assert figures.longest_later_s(PAUSES, 7.2) == 10.0  # what comes later is another pause
    assert figures.longest_later_s(PAUSES, 7.6) == 0.0


def test_the_prefill_is_from_the_takeover_to_the_next_token() -> None:
    assert resumed(HISTORY, 400.0) == Resumed(taken_over_ms=1500, next_token_ms=1700, tokens_before=2, tokens_again=5)


def test_who_was_not_taken_over_since_the_kill_has_no_prefill() -> None:
    assert resumed((*BEGUN, tokens(3, 400), finished(3, 401)), 350.0) is None
    assert resumed(HISTORY, 1600.0) is None
    assert resumed(HISTORY[:6], 400.0) is None  # and no token came any more


def test_an_answer_that_has_its_tokens_once_is_whole() -> None:
    assert what_is_wrong(wire("a", "a", "a", "a"), HISTORY, 4) == ""


@pytest.mark.parametrize(
    ("pieces", "history", "says"),
    [
        (wire("a", "a", "a", "a"), HISTORY[:-1], "it ends with TokensProduced"),
        (wire("a", "a", "a", "a"), (*HISTORY[:4], *HISTORY[5:]), "after 1 tokens comes 3-0"),
        (wire("a", "a", "a", "a"), (*HISTORY[:5], *HISTORY[4:]), "after 2 tokens comes 2-0"),
        (wire("a", "a", "a"), HISTORY, "its client read 3 characters, its history has 4"),
        (wire("a", "a", "a", "a", "a"), HISTORY, "its client read 5 characters, its history has 4"),
        (wire("a", "a", "b", "a"), HISTORY, "its client read another text than its history has"),
        (wire("a", "a", "a", "a", ends=2), HISTORY, "2 last chunks and 1 [DONE]"),
        (wire("a", "a", "a", "a", done=0), HISTORY, "1 last chunks and 0 [DONE]"),
        (wire("a", "a", "a", "a", completion_tokens=5), HISTORY, "its usage says 5 tokens, 4 were asked"),
        (wire("a", "a", "a", "a")[:-3], HISTORY, "without a finish_reason"),
    ],
)
def test_what_is_not_whole_is_told(pieces: Sequence[Arrival], history: Sequence[Entry], says: str) -> None:
    assert says in what_is_wrong(pieces, history, 4)


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.parametrize("peers", [1, 2])
def test_a_killed_engine_is_measured(peers: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "qwen3", "qwen3", max_positions=2048)
    flags = ["--model", str(folder), "--threads", "1", "--runs", "1", "--requests", "6", "--input-len", "8-20"]
    flags += ["--output-len", "1500", "--lease", "1", "--peers", str(peers)]
    said, document = measured(("-m", "chaos.recovery"), flags, tmp_path)
    assert "longest pause" in said and ("met, " in said or "missed by " in said)
    (run,) = document["runs"]
    assert len(run["streams"]) == 6 and run["problems"] == []
    hit = [one for one in run["streams"] if one["resumed"]]
    assert len(hit) == 6 if peers == 1 else 1 <= len(hit) <= 5
    for one in hit:
        assert 0 < one["taken_over_s"] < one["pause_ended_s"]
        assert one["resumed"]["taken_over_ms"] <= one["resumed"]["next_token_ms"]
        assert 8 <= one["resumed"]["tokens_again"] - one["resumed"]["tokens_before"] <= 20
    assert run["alone_s"] == pytest.approx(run["tokens_again"] / run["alone_tokens_per_s"])
    medians = document["medians"]
    assert medians["longest_pause_s"] == max(one["pause_s"] for one in hit)
    assert medians["beyond_s"] == pytest.approx(run["beyond_s"])
    if peers == 1:
        assert run["lease_s"] == 0 and 0 < run["noticed_s"] <= run["freed_s"] + 0.05
        assert run["freed_s"] < run["owner_s"] <= run["start_s"] < medians["longest_pause_s"] + 1
        assert 0 <= run["load_s"] < run["start_s"]  # so small a model is loaded in no time
    else:
        assert run["lease_s"] == 1 and run["start_s"] == 0 and run["noticed_s"] is None
        assert 0.3 < run["freed_s"] <= run["owner_s"]  # nobody gives the lease back, it runs out
