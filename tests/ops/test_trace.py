"""`minisgl trace` on a real Redis: what it prints for every kind of request, and what it says where there is none."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lived_requests import LivedRequests
from redis_servers import command, until

from minisgl import main
from ops.trace import lines_of, why_absent
from pipeline.events import (
    Answered,
    Cancelled,
    Failed,
    Preempted,
    SamplingParams,
    Submitted,
    TakenOver,
    encode,
    new_uid,
)
from pipeline.log.protocol import Entry, RequestLimits
from pipeline.log.redis import RedisLog
from pipeline.names import Names
from pipeline.process.redis_server import SOCKET_PATH_LIMIT, EmbeddedRedis
from pipeline.views.history import story


@pytest.fixture
def lived(redis_url: str) -> Iterator[LivedRequests]:
    """A log in which requests can be made."""
    log = RedisLog(redis_url, Names(), RequestLimits(timeout_s=60))
    yield LivedRequests(log)
    log.close()


class Trace:
    """The command on one Redis, and what it said."""

    def __init__(self, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._url = url
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, list[str], list[str]]:
        """Run it; return the exit code and the lines of its two streams."""
        code = main(["trace", *arguments, "--redis-url", self._url])
        said = self._capsys.readouterr()
        return code, said.out.splitlines(), said.err.splitlines()

    def failure(self, *arguments: str) -> str:
        """Run what fails; return the one line that it says."""
        code, out, err = self(*arguments)
        assert code == 1 and out == [] and len(err) == 1
        return err[0]


@pytest.fixture
def trace(redis_url: str, capsys: pytest.CaptureFixture[str]) -> Trace:
    return Trace(redis_url, capsys)


def test_a_finished_request_is_a_table_between_what_was_asked_and_how_it_ended(
    lived: LivedRequests, trace: Trace
) -> None:
    uid = lived.running(labels={"user": "u1"})
    lived.tokens(uid, "He", "ll", "o\n")
    lived.finished(uid, 3)
    code, lines, err = trace(uid)
    assert (code, err) == (0, [])
    assert lines[0] == f"request {uid}: finished"
    assert lines[1].startswith("submitted 20") and lines[1].endswith(" UTC, deadline +60.000 s")
    assert lines[2] == "endpoint=/v1/completions model=nonsense temperature=0.5 seed=7 max_tokens=20 user=u1"
    rows = [line.split() for line in lines[4:10]]
    assert rows[0] == ["time", "what", "who", "n", "details"]
    assert [row[2] for row in rows[1:]] == ["submitted", "tokenized", "admitted", "tokens", "finished"]
    assert rows[1][:3] == ["+0.000", "s", "submitted"]
    assert rows[3][3:] == ["generate-0", "epoch", "1", "0", "step=1", "fingerprint=w1", "cached_tokens=2"]
    assert rows[4][3:8] == ["generate-0", "epoch", "1", "1..3", "until"]
    assert lines[11].startswith("finished (stop) after 0.") and lines[11].endswith(" s, first token after 0.002 s")
    assert lines[12:] == ["tokens: prompt 3, 2 of them cached; output 3", r"text: Hello\n"]


def test_what_the_tokenizer_answered_has_no_engine_and_no_first_token(lived: LivedRequests, trace: Trace) -> None:
    uid = lived.submitted()
    lived.ended(uid, Answered(token_ids=(5, 6), text="ab", by="tokenize-0"))
    code, lines, err = trace(uid)
    assert (code, err) == (0, []) and lines[0] == f"request {uid}: finished"
    assert lines[-3].startswith("answered after 0.") and lines[-3].endswith(" s by tokenize-0")
    assert lines[-2:] == ["tokens: prompt 2; output 0", "text: ab"]


def test_the_columns_of_the_table_are_aligned(lived: LivedRequests, trace: Trace) -> None:
    uid = lived.running()
    lived.tokens(uid, *"abcdefghijkl")
    _, lines, _ = trace(uid)
    table = lines[4 : lines.index("", 4)]
    what, who = table[0].index("what"), table[0].index("who")
    assert [line[what:].split()[0] for line in table] == ["what", "submitted", "tokenized", "admitted", "tokens"]
    assert [line[who:].split()[0] for line in table] == ["who", "web-0", "tokenize-0", "generate-0", "generate-0"]


def test_every_takeover_and_preemption_has_a_row(lived: LivedRequests, trace: Trace) -> None:
    uid = lived.running()
    lived.tokens(uid, "a", "b")
    lived.mark(uid, 2, Preempted(engine="generate-0", epoch=1, step=3))
    for epoch in (2, 3):
        lived.mark(uid, 2, TakenOver(engine="generate-0", epoch=epoch))
    _, lines, _ = trace(uid)
    rows = [line for line in lines if "taken_over" in line or "preempted" in line]
    assert [line.split()[2:7] for line in rows] == [
        ["preempted", "generate-0", "epoch", "1", "2"],
        ["taken_over", "generate-0", "epoch", "2", "2"],
        ["taken_over", "generate-0", "epoch", "3", "2"],
    ]
    assert lines[0] == f"request {uid}: running"


def test_a_thousand_tokens_are_one_row(lived: LivedRequests, trace: Trace) -> None:
    uid = lived.running()
    lived.tokens(uid, *("x" for _ in range(1000)))
    _, lines, _ = trace(uid)
    (row,) = [line for line in lines if " tokens  " in line]
    assert "1..1000" in row and "longest pause" in row
    assert len(lines) < 15
    assert lines[-1].endswith(" .. (1,000 characters; --json has all)")


def test_how_far_a_request_came_is_below_the_table(lived: LivedRequests, trace: Trace) -> None:
    failed, cancelled, waiting = lived.submitted(), lived.submitted(), lived.submitted()
    lived.ended(failed, Failed(status=500, code="oops", message="It\nbroke."))
    lived.ended(cancelled, Cancelled(by="client"))
    assert trace(failed)[1][-2].partition(" s ")[2] == r"with 500 oops: It\nbroke."
    assert trace(cancelled)[1][-2].partition(" s ")[2] == "by client"
    assert trace(waiting)[1][-2:] == ["queued, last event after 0.000 s", "tokens: prompt not counted yet; output 0"]


def test_json_is_the_story(lived: LivedRequests, trace: Trace) -> None:
    uid = lived.running()
    lived.tokens(uid, "ü")
    _, lines, _ = trace(uid, "--json")
    assert json.loads("\n".join(lines)) == story(uid, lived.log.histories([uid])[0])


@pytest.mark.parametrize("prefix", ["chatcmpl-", ""])
def test_the_id_that_a_client_saw_names_the_request_too(lived: LivedRequests, trace: Trace, prefix: str) -> None:
    uid = lived.submitted()
    assert trace(prefix + uid.upper())[1][0] == f"request {uid}: queued"


def test_another_namespace_is_another_log(lived: LivedRequests, trace: Trace) -> None:
    uid = lived.submitted()
    assert trace(uid, "--namespace", "minisgl")[0] == 0
    assert "unknown here" in trace.failure(uid, "--namespace", "blue")


def test_a_request_that_is_not_there_is_expired_unknown_or_none(lived: LivedRequests, trace: Trace) -> None:
    uid = lived.submitted()
    lived.log.limits = RequestLimits(retention_s=0.001)
    lived.ended(uid, Cancelled(by="client"))
    until(lambda: lived.log.histories([uid]) == [[]])
    assert "expired" in trace.failure(uid, "--retention", "0.001")
    assert "unknown here" in trace.failure(uid)
    assert "not a uid" in trace.failure("nonsense")
    assert "yet to come" in trace.failure("f" * 12 + uid[12:])


def test_why_a_request_is_absent_follows_from_its_moment() -> None:
    uid, now_s = new_uid(), time.time()
    assert "unknown here; it was made 900 s ago" in why_absent(uid, now_s + 899.9, 900)
    expired = "expired; it was made 1,000 s ago, and after its end a request is kept for 900 s"
    assert expired in why_absent(uid, now_s + 1000, 900)
    assert "yet to come" in why_absent(uid, now_s - 5, 900)
    assert why_absent("a\nb", now_s, 900).startswith(r"a\nb: not a uid; expected 32 hex digits")


@pytest.mark.parametrize("fields", [("kind", "dreamt"), ("kind", "tokenized"), ("kind", b"\xff")], ids=str)
def test_a_damaged_history_is_one_line(
    lived: LivedRequests, trace: Trace, redis_url: str, fields: tuple[str, str]
) -> None:
    uid = lived.submitted()
    command(redis_url, "XADD", lived.log.names.request(uid), "0-9", *fields)
    assert trace.failure(uid).startswith("minisgl: ")


def test_no_server_is_one_line_that_says_where_it_was_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uid = new_uid()
    assert main(["trace", uid, "--data-dir", str(tmp_path)]) == 1
    assert f"no server runs in {tmp_path}; name it with --port" in capsys.readouterr().err
    assert main(["trace", uid, "--redis-url", f"unix://{tmp_path}/none.sock"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("minisgl: the Redis of --redis-url cannot be used: ")


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
    assert "no server runs in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "minisgl trace: nothing given, expected the uid of a request first"),
        (["--port", "8000"], "minisgl trace: --port given, expected the uid of a request first"),
        (["ab", "cd"], "cd"),
        (["ab", "--lease", "3"], "--lease"),
        (["ab", "--redis-url", "http://here"], "--redis-url: "),
    ],
)
def test_a_command_line_that_cannot_work_ends_with_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert expected in said.err


@pytest.mark.parametrize("arguments", [["--help"], ["ab", "--help"]], ids=str)
def test_help_names_the_flags(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trace", *arguments])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: minisgl trace UID") and "--data-dir" in said


def test_what_a_client_sent_cannot_move_the_cursor_of_a_terminal() -> None:
    event = Submitted(
        endpoint="/v1/completions", frontend="web-0", model="\x1b[2J", sampling=SamplingParams(), labels={"a\n": "b\r"}
    )
    lines = lines_of(story("a", [Entry("0-1", {"ms": "1", **encode(event)})]))
    assert all(line.isprintable() for line in lines)
    assert r"model=\x1b[2J" in lines[2] and r"a\n=b\r" in lines[2]
