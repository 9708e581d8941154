"""`minisgl trace` on a real Redis: what it prints for every kind of request, and what it says where there is none."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from support.histories import entries_of
from support.lived_requests import LivedRequests
from support.redis_servers import command, until
from support.tool import Tool

from minisgl import main
from ops.trace import lines_of, why_absent
from pipeline.events import (
    Admitted,
    Answered,
    Cancelled,
    Failed,
    Preempted,
    Presentation,
    SamplingParams,
    Submitted,
    TakenOver,
    Templating,
    TokensProduced,
    encode,
    new_uid,
)
from pipeline.log.protocol import Entry, RequestLimits
from pipeline.log.redis import RedisLog
from pipeline.names import WEB, Names
from pipeline.process.redis_server import SOCKET_PATH_LIMIT, EmbeddedRedis
from pipeline.stage.slots import SlotLease, acquire_slot, read_statuses
from pipeline.views.history import story


def test_a_finished_request_is_a_table_between_what_was_asked_and_how_it_ended(
    lived: LivedRequests, trace: Tool
) -> None:
    uid = lived.running(labels={"user": "u1"})
    lived.tokens(uid, "He", "ll", "o\n")
    lived.finished(uid, 3)
    lines = trace(uid)
    assert lines[0] == f"request {uid}: finished"
    assert lines[1].startswith("submitted 20") and lines[1].endswith(" UTC, deadline +60.000 s")
    assert lines[2] == "endpoint=/v1/completions model=nonsense temperature=0.5 seed=7 max_tokens=20 user=u1"
    rows = [line.split() for line in lines[4:10]]
    assert rows[0] == ["time", "what", "who", "n", "details"]
    assert [row[2] for row in rows[1:]] == ["submitted", "tokenized", "admitted", "tokens", "finished"]
    assert rows[1][:3] == ["+0.000", "s", "submitted"]
    assert rows[3][3:] == ["generate-0", "epoch", "1", "0", "step=1", "fingerprint=w1", "cached_tokens=2"]
    assert rows[4][3:8] == ["generate-0", "epoch", "1", "1..3", "until"]
    assert lines[11].startswith("finished (stop) after ") and lines[11].endswith(" s, first token after 0.002 s")
    assert lines[12:] == ["tokens: prompt 3, 2 of them cached; output 3", r"text: Hello\n"]


def test_what_the_tokenizer_answered_has_no_engine_and_no_first_token(lived: LivedRequests, trace: Tool) -> None:
    uid = lived.submitted()
    lived.ended(uid, Answered(token_ids=(5, 6), text="ab", by="tokenize-0"))
    lines = trace(uid)
    assert lines[0] == f"request {uid}: finished"
    assert lines[-3].startswith("answered after ") and lines[-3].endswith(" s by tokenize-0")
    assert lines[-2:] == ["tokens: prompt 2; output 0", "text: ab"]


def test_the_owner_of_a_request_is_told(lived: LivedRequests, trace: Tool) -> None:
    lived.owner = "team-a"
    (row,) = [line for line in trace(lived.submitted()) if "+0.000" in line and "submitted" in line]
    assert row.split()[2:] == ["submitted", "web-0", "0", "owner=team-a"]


def test_the_longest_pause_is_told_for_the_engine_and_for_the_client() -> None:
    submitted = Submitted(endpoint="e", frontend="web-0", sampling=SamplingParams(), ms=1000)
    times = ((1010, 0), (1034, 20), (1034, 16), (1034, 12))
    tokens = [TokensProduced(tokens=(7,), text="x", step="1-1", ms=ms, age_ms=age_ms) for ms, age_ms in times]
    history = entries_of([("0-1", submitted), *((f"{n}-0", event) for n, event in enumerate(tokens, 1))])
    (line,) = [line for line in lines_of(story("u", history)) if " tokens " in line and "until" in line]
    assert line.endswith("until +0.034 s, longest pause 0.004 s (for the client 0.024 s)")


def test_each_thing_that_happened_is_one_row_of_an_aligned_table_and_so_are_a_thousand_tokens(
    lived: LivedRequests, trace: Tool
) -> None:
    uid = lived.running()
    lived.tokens(uid, *("x" for _ in range(1000)))
    lived.mark(uid, 1000, Preempted(engine="generate-0", epoch=1, step=3))
    for epoch in (2, 3):
        lived.mark(uid, 1000, TakenOver(engine="generate-0", epoch=epoch))
    lines = trace(uid)
    names, *rows = lines[4 : lines.index("", 4)]
    what, who = names.index("what"), names.index("who")
    assert [(row[what:who].strip(), *row[who:].split()[:4]) for row in rows[2:]] == [
        ("admitted", "generate-0", "epoch", "1", "0"),
        ("tokens", "generate-0", "epoch", "1", "1..1000"),
        ("preempted", "generate-0", "epoch", "1", "1000"),
        ("taken_over", "generate-0", "epoch", "2", "1000"),
        ("taken_over", "generate-0", "epoch", "3", "1000"),
    ]
    assert "longest pause" in rows[3]
    assert lines[0] == f"request {uid}: running"
    assert lines[-1].endswith(" .. (1,000 characters; --json has all)")


def test_a_takeover_by_an_engine_with_other_numerics_is_seen(lived: LivedRequests, trace: Tool) -> None:
    uid = lived.running()
    for epoch, numerics in enumerate(("bfloat16/cpu", "float32/cpu"), 2):
        lived.mark(uid, 0, TakenOver(engine="generate-0", epoch=epoch))
        lived.mark(uid, 0, Admitted(engine="generate-0", epoch=epoch, step=1, fingerprint="w1", numerics=numerics))
    lines = [line for line in trace(uid) if " admitted " in line]
    assert [line.partition("step=1 ")[2] for line in lines] == [
        "fingerprint=w1 cached_tokens=2",
        "fingerprint=w1 numerics=bfloat16/cpu",
        "fingerprint=w1 numerics=float32/cpu",
    ]


def test_how_far_a_request_came_is_below_the_table(lived: LivedRequests, trace: Tool) -> None:
    failed, cancelled, waiting = lived.submitted(), lived.submitted(), lived.submitted()
    lived.ended(failed, Failed(status=500, code="oops", message="It\nbroke."))
    lived.ended(cancelled, Cancelled(by="client"))
    assert trace(failed)[-2].partition(" s ")[2] == r"with 500 oops: It\nbroke."
    assert trace(cancelled)[-2].partition(" s ")[2] == "by client"
    assert trace(waiting)[-2:] == ["queued, last event after 0.000 s", "tokens: prompt not counted yet; output 0"]


def test_json_is_the_story(lived: LivedRequests, trace: Tool) -> None:
    uid = lived.running()
    lived.tokens(uid, "ü")
    assert trace.json(uid) == story(uid, lived.log.histories([uid])[0])


@pytest.mark.parametrize("prefix", ["chatcmpl-", ""])
def test_the_id_that_a_client_saw_names_the_request_too(lived: LivedRequests, trace: Tool, prefix: str) -> None:
    uid = lived.submitted()
    assert trace(prefix + uid.upper())[0] == f"request {uid}: queued"


def test_a_request_that_is_not_there_is_expired_unknown_or_none(lived: LivedRequests, trace: Tool) -> None:
    uid = lived.submitted()
    lived.log.limits = RequestLimits(retention_s=0.001)
    lived.ended(uid, Cancelled(by="client"))
    until(lambda: lived.log.histories([uid]) == [[]])
    assert "expired" in trace.failure(uid, "--retention", "0.001")
    assert "unknown here" in trace.failure(uid)
    assert "nonsense" in trace.failure("nonsense")
    assert "yet to come" in trace.failure("f" * 12 + uid[12:])


def test_the_workers_tell_for_how_long_requests_are_kept(lived: LivedRequests, trace: Tool) -> None:
    assert isinstance(lived.log, RedisLog)
    uid = f"{int(time.time() - 100) * 1000:012x}{new_uid()[12:]}"
    assert "unknown here" in trace.failure(uid)
    with contextlib.closing(lived.log.another()) as log:
        log.limits = RequestLimits(retention_s=50)
        web = SlotLease(log, acquire_slot(log, WEB, 60_000), 60_000)
        until(lambda: read_statuses(lived.log, WEB))
        assert "50 s (--retention)" in trace.failure(uid)
        assert "unknown here" in trace.failure(uid, "--retention", "900")
        web.leave()


def test_why_a_request_is_absent_follows_from_its_moment() -> None:
    uid, now_s = new_uid(), time.time()
    unknown = f"{uid}: unknown here; it was made {{}} s ago, so look at another server or --namespace"
    assert why_absent(uid, now_s + 59, 900) == unknown.format(59)
    only = "; one that was refused is kept for 60 s only"
    assert why_absent(uid, now_s + 899.9, 900) == unknown.format(900) + only
    expired = "expired; it was made 1,000 s ago, and after its end a request is kept for 900 s"
    assert expired in why_absent(uid, now_s + 1000, 900)
    assert "yet to come" in why_absent(uid, now_s - 5, 900)
    assert why_absent("a\nb", now_s, 900).startswith(r"a\nb: not a uid; expected 32 hex digits")


@pytest.mark.parametrize("fields", [("kind", "dreamt"), ("kind", "tokenized"), ("kind", b"\xff")], ids=str)
def test_a_damaged_history_is_one_line(
    lived: LivedRequests, trace: Tool, redis_url: str, fields: tuple[str, str]
) -> None:
    uid = lived.submitted()
    command(redis_url, "XADD", lived.log.names.request(uid), "0-9", *fields)
    assert trace.failure(uid).startswith("minisgl: ")


@pytest.mark.parametrize("long", [False, True], ids=["a short path", "a path too long for a socket"])
def test_without_a_url_it_asks_the_embedded_redis_of_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], long: bool
) -> None:
    folder = tmp_path / ("x" * (SOCKET_PATH_LIMIT if long else 1))
    server = EmbeddedRedis(folder)
    try:
        log = RedisLog(server.url, Names())
        uid = LivedRequests(log).submitted()
        log.close()
        assert main(["trace", uid, "--data-dir", str(folder)]) == 0
    finally:
        server.stop()
    assert capsys.readouterr().out.startswith(f"request {uid}: queued\n")
    assert main(["trace", uid, "--data-dir", str(folder)]) == 1
    assert capsys.readouterr().err


def test_what_a_client_sent_cannot_move_the_cursor_of_a_terminal() -> None:
    event = Submitted(
        endpoint="/v1/completions", frontend="web-0", model="\x1b[2J", sampling=SamplingParams(), labels={"a\n": "b\r"}
    )
    lines = lines_of(story("a", [Entry("0-1", {"ms": "1", **encode(event)})]))
    assert all(line.isprintable() for line in lines)
    assert r"model=\x1b[2J" in lines[2] and r"a\n=b\r" in lines[2]


def test_of_the_fields_in_fields_only_those_without_their_default_are_shown() -> None:
    event = Submitted(
        endpoint="/v1/completions",
        frontend="web-0",
        sampling=SamplingParams(),
        siblings=2,
        presentation=Presentation(stream=True, choices=2),
        templating=Templating(variables={"think": False}),
    )
    (row,) = [line for line in lines_of(story("a", [Entry("0-1", {"ms": "1", **encode(event)})])) if "+0.000" in line]
    assert row.split()[2:] == [
        "submitted",
        "web-0",
        "0",
        "siblings=2",
        "stream=true",
        "choices=2",
        'variables={"think":false}',
    ]
