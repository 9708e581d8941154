"""`minisgl replay show` on a real Redis, and why a token took long."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from support.lived_requests import LivedRequests
from support.log_contract import put
from support.memory_log.log import MemoryLog
from support.redis_servers import command
from support.tool import Tool

from minisgl import History
from ops.replay.show import why
from pipeline.events import (
    Chunk,
    Logprob,
    SamplingParams,
    StepCompleted,
    StepStats,
    Submitted,
    TokenRow,
    TokensProduced,
    TopLogprob,
    encode,
    new_uid,
)
from pipeline.log.journal import JournalWriter
from pipeline.log.protocol import Entry, Produced
from pipeline.log.redis import RedisLog
from pipeline.names import Names


def test_the_last_token_is_shown_unless_another_is_named(lived: LivedRequests, show: Tool) -> None:
    uid = lived.answered("He", "ll", "o\n")
    lines = dict(line.split(maxsplit=1) for line in show(uid))
    assert lines["request"] == f"{uid}: finished (stop), 3 tokens"
    assert lines["token"] == "3, id 43"
    assert lines["engine"] == "generate-0 epoch 1, step 3"
    assert lines["with"] == "weights=w1"
    assert lines["time"].startswith("20") and "s after submit" in lines["time"]
    assert lines["sampling"] == "temperature=0.5 seed=7 max_tokens=20"
    assert (lines["text"], lines["ids"]) == (r"Hello\n", "41 42 43")
    lines = dict(line.split(maxsplit=1) for line in show(uid, "--at", "1"))
    assert (lines["token"], lines["text"], lines["ids"]) == ("1, id 41", "He", "41")
    assert lines["mark"].startswith("kind=admitted engine=generate-0")
    assert show("--at", "1", uid) == show(uid, "--at", "1")


def test_json_has_the_state_at_every_token(lived: LivedRequests, show: Tool) -> None:
    uid = lived.answered("He", "ll", "o\n")
    told = [show.json(uid, "--at", str(n)) for n in range(4)]
    assert [each["text"] for each in told] == ["", "He", "Hell", "Hello\n"]
    assert [each.get("token") for each in told] == [None, 41, 42, 43]
    assert [each["position"] for each in told] == [each["prompt_tokens"] + each["n"] - 1 for each in told]
    assert "engine" not in told[0] and told[0]["tokens"] == 3


def test_what_the_engine_did_between_two_tokens_is_told_from_its_journal(
    lived: LivedRequests, show: Tool, redis_url: str
) -> None:
    uid = lived.answered("He", "ll", "o\n")
    row, chunk = TokenRow(uid=uid, n=3, token=43), Chunk(uid="other", start=0, count=6000)
    step = StepCompleted(rows=(row,), chunks=(chunk,), figures=StepStats(forward_ms=1))
    entry = Entry("1-3", {"ms": str(show.json(uid)["submitted_ms"] + 5000)} | encode(step))
    fields = JournalWriter().fields(entry, step)
    command(redis_url, "XADD", Names().journal("generate-0"), entry.id, *itertools.chain(*fields.items()))
    assert show.json(uid)["meanwhile"][0] == "a prompt of 6,000 tokens was prefilled in 1 chunk"
    assert any(line.startswith("meanwhile  a prompt of 6,000 tokens") for line in show(uid))
    assert "meanwhile" not in show.json(uid, "--at", "2")


def test_who_shared_the_batch_and_the_pages_is_told_while_the_journal_has_the_step(
    lived: LivedRequests, show: Tool, redis_url: str
) -> None:
    uid = lived.answered("He", "ll", "o\n")
    gone = "batch      unknown: the journal does not have this step (--journal-bytes, --retention)"
    assert gone.split() in [line.split() for line in show(uid)] and show.json(uid)["batch"] is None
    assert not any(line.startswith("batch") for line in show(uid, "--at", "0"))
    others = [new_uid() for _ in range(10)]
    writer = JournalWriter()

    def journalled(number: int, *, schedule: str = "", chunks: tuple[Chunk, ...] = ()) -> None:
        rows = tuple(TokenRow(uid=each, n=number, token=40 + number) for each in (uid, *others))
        figures = StepStats(decode_rows=11, prefill_rows=len(chunks), prefill_tokens=9 * len(chunks), free_pages=13)
        step = StepCompleted(rows=rows, chunks=chunks, figures=figures, schedule=schedule)
        entry = Entry(f"1-{number}", {"ms": str(show.json(uid)["submitted_ms"] + number)} | encode(step))
        fields = writer.fields(entry, step)
        command(redis_url, "XADD", Names().journal("generate-0"), entry.id, *itertools.chain(*fields.items()))

    journalled(1, schedule='{"num_pages": 64}')
    journalled(2)
    journalled(3, chunks=(Chunk(uid="other", start=0, count=9),))
    told = show.json(uid)
    assert told["batch"] == {"rows": 12, "prompt_tokens": 9, "others": [*others, "other"]}
    assert told["pages"] == {"free": 13, "all": 64}
    lines = dict(line.split(maxsplit=1) for line in show(uid))
    assert lines["batch"] == "12 rows, 9 prompt tokens" and lines["pages"] == "13 free, 51 used, after the step"
    assert lines["beside"] == f"{', '.join(others[:8])} and 3 more"
    assert show.json(uid, "--at", "2")["batch"] == {"rows": 11, "prompt_tokens": 0, "others": others}
    command(redis_url, "XDEL", Names().journal("generate-0"), "1-1")
    assert show.json(uid, "--at", "2")["batch"] is None, "nobody can tell its rows"


def move(
    lived: LivedRequests,
    uid: str,
    times: Mapping[str, tuple[int, int]],
    rest: tuple[int, int],
    *,
    is_known: bool = True,
) -> None:
    """Have the tokens committed so many ms after the submit, each so many after the engine had made it, if known."""
    assert isinstance(lived.log, RedisLog)
    entries = lived.log.histories([uid])[0]
    command(lived.log.url, "DEL", Names().request(uid))
    for entry in entries:
        ms, age_ms = times.get(entry.id, rest) if entry.id >= "1" else (0, 0)
        moved = {**entry.fields, "ms": str(int(entries[0].fields["ms"]) + ms)} | {"age_ms": str(age_ms)}
        if "tokens" not in moved or not is_known:
            del moved["age_ms"]
        command(lived.log.url, "XADD", Names().request(uid), entry.id, *itertools.chain(*moved.items()))


def test_the_token_that_came_last_after_the_one_before_is_named(lived: LivedRequests, show: Tool) -> None:
    uid = lived.answered("He", "ll", "o\n")
    move(lived, uid, {"1-0": (900, 0), "2-0": (1300, 0)}, (1400, 0))
    lines = dict(line.split(maxsplit=1) for line in show(uid))
    assert lines["slowest"] == "token 2, 0.400 s after the token before (--at 2)"
    assert not any(line.startswith("slowest") for line in show(uid, "--at", "2"))
    assert show.json(uid)["slowest"] == {"n": 2, "pause_ms": 400}


@pytest.mark.parametrize("is_known", [True, False])
def test_a_token_says_when_the_engine_made_it_and_when_the_client_got_it(
    lived: LivedRequests, show: Tool, is_known: bool
) -> None:
    uid = lived.answered("He", "ll", "o\n")
    move(lived, uid, {"1-0": (100, 0), "2-0": (120, 10)}, (120, 2), is_known=is_known)
    told = show.json(uid)
    names = ("at_ms", "pause_ms", "client_at_ms", "client_pause_ms", "committed")
    made = (118, 8) if is_known else (120, 10)
    assert [told[name] for name in names] == [*made, 120, 0, [2, 3]]
    assert told["slowest"] == {"n": 2, "pause_ms": 10}
    lines = dict(line.split(maxsplit=1) for line in show(uid))
    guess = "" if is_known else ", and when each was made is an estimate"
    assert lines["client"] == (
        f"0.00{120 - made[0]} s later, 0.000 s after the token before; "
        f"tokens 2 to 3 were committed together (--commit-interval){guess}"
    )


def test_recorded_log_probabilities_are_shown(lived: LivedRequests, show: Tool) -> None:
    uid = lived.running()
    top = (TopLogprob(token=41, text="He", logprob=-0.25), TopLogprob(token=9, text="\x1b", logprob=-2))
    score = Logprob(token=41, text="He", logprob=-0.25, top=top)
    event = TokensProduced(tokens=(41,), text="He", step="1-1", scores=(score,))
    assert lived._detokenizer.say(Produced(uid, "1-0", 1, event, "web-0"))
    lines = show(uid)
    at = next(place for place, line in enumerate(lines) if line.startswith("logprob"))
    assert [line.split() for line in lines[at : at + 3]] == [
        ["logprob", "'He'", "-0.25"],
        ["probable", "'He'", "-0.25"],
        [r"'\x1b'", "-2"],
    ]


def test_a_request_that_waits_has_no_token_yet(lived: LivedRequests, show: Tool) -> None:
    lines = show(lived.submitted())
    assert "token     0: none yet" in lines and not any(line.startswith("engine") for line in lines)


def test_a_token_that_never_was_is_an_error_of_the_command_line(lived: LivedRequests, show: Tool) -> None:
    uid = lived.answered("He", "ll", "o\n")
    assert f"--at 4: {uid} has 3 tokens" in show.refusal(uid, "--at", "4")


def test_an_absent_request_says_why_and_several_are_named(lived: LivedRequests, show: Tool) -> None:
    assert "unknown here" in show.failure(new_uid())
    assert "nonsense" in show.failure("nonsense")
    base, event = new_uid(), Submitted(endpoint="e", frontend="web-0", prompt="Hi", sampling=SamplingParams())
    lived.log.submit(base, [event, event])
    assert f"{base}.0, {base}.1" in show.failure(base)
    assert show.json(f"{base}.1")["uid"] == f"{base}.1"


def test_a_request_whose_history_has_expired_is_read_from_its_dead_letter(lived: LivedRequests, show: Tool) -> None:
    uid = lived.dead()
    told = show.json(uid)
    command(show.url, "DEL", Names().request(uid))
    assert show.json(uid) == told and told["state"] == "failed (killed_its_worker)"


def test_a_notebook_opens_the_same_request(lived: LivedRequests, redis_url: str) -> None:
    uid = lived.answered("He", "ll", "o\n")
    history = History.open(uid, redis_url=redis_url)
    assert (history.uid, history.text) == (uid, "Hello\n")


ENGINE = "generate-0"


def log_of(chunks: Sequence[int]) -> MemoryLog:
    """Return a log with the journal of as many steps: each has a chunk of another prompt, and ends after a second."""
    log, writer = MemoryLog(Names()), JournalWriter()
    for number, count in enumerate(chunks, 1):
        step = StepCompleted(
            rows=(TokenRow(uid="a", n=number, token=5),),
            figures=StepStats(forward_ms=900),
            chunks=(Chunk(uid="p", start=0, count=count),) if count else (),
        )
        entry = Entry(f"3-{number}", {"ms": str(1000 * number)} | encode(step))
        put(log, log.names.journal(ENGINE), writer.fields(entry, step), entry.id)
    return log


def test_only_the_steps_since_the_token_before_count() -> None:
    wait = why(log_of([100, 20, 30, 7]), ENGINE, "3-3", "a", 3, since_ms=1000)
    assert wait is not None
    assert str(wait) == "token 3 of a waited 2.0 s: a prompt of 50 tokens was prefilled in 2 chunks"


def test_a_long_wait_is_read_in_pieces() -> None:
    wait = why(log_of([1] * 1200), ENGINE, "3-1200", "a", 9, since_ms=50_000)
    assert wait is not None
    assert (wait.num_steps, wait.others[0].num_chunks) == (1150, 1150)


def test_a_step_that_the_journal_does_not_have_says_nothing() -> None:
    assert why(log_of([1, 1]), ENGINE, "3-7", "a", 9, since_ms=0) is None
    assert why(log_of([1, 1]), "generate-1", "3-1", "a", 9, since_ms=0) is None
