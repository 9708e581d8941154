"""`minisgl shell` in scripts: one question, whose answer alone is on standard output."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from support.openai_stand_in import DONE, FINISH, Body, Frames, Hold, OpenAIStandIn, data, listening, text_chunk
from support.servers import ROOT, free_port

import minisgl
from ops.shell.reply import Piece, Reply
from ops.shell.server import Server, Unanswered

NASTY = "a\x1b[2J\r\n\tü\x00"


@dataclass(frozen=True)
class Ended:
    code: int
    out: bytes
    err: str


@pytest.fixture
def server() -> Iterator[OpenAIStandIn]:
    with listening() as stand_in:
        stand_in.script = said("Hel", "lo!")
        yield stand_in


def said(*texts: str, end: Frames | None = None) -> Any:
    def frames(body: Body) -> Frames:
        return [*map(text_chunk, texts), *([FINISH, DONE] if end is None else end)]

    return frames


def start(*arguments: str, url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "minisgl.py"), "shell", "--url", url, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith("MINISGL_")},
    )


Ask = Callable[..., Ended]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Ask:
    """Run the command in this process: another one costs half a second."""

    def ended(*arguments: str, url: str, piped: bytes = b"", environment: Mapping[str, str] | None = None) -> Ended:
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(piped)))
            for name, value in (environment or {}).items():
                patch.setenv(name, value)
            code = minisgl.main(["shell", "--url", url, *arguments])
        out, err = capsysbinary.readouterr()
        return Ended(code, out, err.decode())

    return ended


def asked(server: OpenAIStandIn) -> list[dict[str, str]]:
    (body,) = server.bodies
    messages: list[dict[str, str]] = body["messages"]
    return messages


def test_a_prompt_is_answered_with_the_answer_alone(ask: Ask, server: OpenAIStandIn) -> None:
    assert ask("-q", "Hi", url=server.url) == Ended(0, b"Hello!\n", "")
    assert asked(server) == [{"role": "user", "content": "Hi"}]
    assert server.bodies[0]["model"] == "stand-in", "the first that the server lists"


def test_all_that_is_piped_in_is_one_prompt(ask: Ask, server: OpenAIStandIn) -> None:
    assert ask(url=f"{server.url}/v1/", piped=b"  Hi\n\n/reset\n\n").code == 0
    assert asked(server) == [{"role": "user", "content": "  Hi\n\n/reset"}]
    assert server.paths == ["/v1/chat/completions"]


def test_a_prompt_comes_before_what_is_piped_in(ask: Ask, server: OpenAIStandIn) -> None:
    ask("--prompt", "Sum this up:", url=server.url, piped="ü\n".encode())
    assert asked(server) == [{"role": "user", "content": "Sum this up:\n\nü"}]


def test_flags_say_model_system_text_fields_and_key(ask: Ask, server: OpenAIStandIn) -> None:
    flags = ("--model", "m", "--system", "Be kind.", "--set", "seed=1", 'stop=["a b"]', "-q", "Hi")
    assert ask(*flags, url=server.url).code == 0
    (body,) = server.bodies
    assert body["messages"][0] == {"role": "system", "content": "Be kind."}
    assert (body["model"], body["seed"], body["stop"]) == ("m", 1, ["a b"])
    assert "authorization" not in server.headers[0]
    ask("-q", "Hi", url=server.url, environment={"MINISGL_API_KEY": "k1 k2", "MINISGL_SET": "seed=2 top_k=3"})
    assert server.headers[1]["authorization"] == "Bearer k1"
    assert (server.bodies[1]["seed"], server.bodies[1]["top_k"]) == (2, 3)


def test_the_text_is_as_the_model_wrote_it_where_no_terminal_reads_it(ask: Ask, server: OpenAIStandIn) -> None:
    server.script = said(NASTY)
    assert ask("-q", "Hi", url=server.url).out == NASTY.encode() + b"\n"
    server.script = said("ends with one\n")
    assert ask("-q", "Hi", url=server.url).out == b"ends with one\n"


def test_thoughts_are_not_of_the_answer(ask: Ask, server: OpenAIStandIn) -> None:
    thought = data({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]})
    server.script = lambda body: [thought, text_chunk("A"), FINISH, DONE]
    assert ask("-q", "Hi", url=server.url) == Ended(0, b"A\n", "")


def test_a_refusal_goes_to_standard_error(ask: Ask, server: OpenAIStandIn) -> None:
    server.script = lambda body: (400, {"error": {"message": "temperature:\nno\x1b[2J", "code": "c"}})
    assert ask("-q", "Hi", url=server.url) == Ended(1, b"", "minisgl: HTTP 400: temperature: no\\x1b[2J\n")


def test_what_came_before_an_error_is_printed(ask: Ask, server: OpenAIStandIn) -> None:
    server.script = said("Hel", end=[data({"error": {"message": "It broke."}}), DONE])
    assert ask("-q", "Hi", url=server.url) == Ended(1, b"Hel\n", "minisgl: It broke.\n")
    server.script, server.cut = said("Hel", end=[]), True
    broken = ask("-q", "Hi", url=server.url)
    assert (broken.code, broken.out) == (1, b"Hel\n") and broken.err.startswith("minisgl: the stream broke: ")


def test_a_stream_that_ends_without_an_end_broke(ask: Ask, server: OpenAIStandIn) -> None:
    server.script = said("Hel", end=[])
    assert ask("-q", "Hi", url=server.url) == Ended(1, b"Hel\n", "minisgl: the stream broke: it ended too early\n")


def test_a_stream_that_broke_goes_on_and_nothing_comes_twice(ask: Ask, server: OpenAIStandIn) -> None:
    """An event may be several frames, of which the last has its id."""
    a, b, c, d = map(text_chunk, "abcd")
    whole = [a, b"id: 1-0\n" + b, c, b"id: 2-0\n" + d, FINISH, DONE]
    breaks: Iterator[Frames | tuple[int, object]] = iter([[b"id: 1-0\ndata: {torn"], (503, {}), whole[2:3], whole[2:]])
    after: list[str] = []

    def rest(last_id: str) -> Frames | tuple[int, object]:
        after.append(last_id)
        return next(breaks)

    server.uid, server.rest, server.script = "u1", rest, lambda body: whole[:3]
    assert ask("-q", "Hi", url=server.url) == Ended(0, b"abcd\n", "")
    assert after == 4 * ["1-0"] and len(server.bodies) == 1
    assert server.headers[0]["x-minisgl-event-ids"] == "1", "without it, a server sends no ids"


def test_a_question_whose_connection_broke_before_an_answer_is_sent_again_under_its_key(
    ask: Ask, server: OpenAIStandIn
) -> None:
    server.breaks = 2
    assert ask("-q", "Hi", url=server.url) == Ended(0, b"Hello!\n", "")
    assert len(server.bodies) == 3 and all(body == server.bodies[0] for body in server.bodies)
    assert ask("-q", "Hi", url=server.url).code == 0
    *same, other = [headers["idempotency-key"] for headers in server.headers]
    assert len(set(same)) == 1 and other not in same, "each question has a key of its own"


@pytest.mark.parametrize("status", [0, 503])
def test_a_question_is_not_sent_again_for_ever(
    server: OpenAIStandIn, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    async def said() -> list[Piece]:
        return [piece async for piece in Server(server.url).answer({"stream": True}, Reply())]

    monkeypatch.setattr("ops.shell.server.ASK_AGAIN_S", (0.001, 0.001))
    server.breaks = 1 if status else 100
    server.script = lambda body: (status, {"error": {"message": "It is loading."}})
    with pytest.raises(Unanswered, match="It is loading" if status else "cannot be reached"):
        asyncio.run(said())
    assert len(server.bodies) == 3
    server.bodies.clear()
    if status:
        with pytest.raises(Unanswered):
            asyncio.run(said())
        assert len(server.bodies) == 1, "a server that refuses has not lost the question"


def test_a_stream_whose_request_is_gone_broke(ask: Ask, server: OpenAIStandIn) -> None:
    server.uid, server.script = "u1", said("Hel", end=[])
    server.rest = lambda last_id: (404, {"error": {"message": "There is no such request."}})
    ended = ask("-q", "Hi", url=server.url)
    assert (ended.code, ended.out) == (1, b"Hel\n")
    assert ended.err == (
        "minisgl: the stream broke: it ended too early; the rest: HTTP 404: There is no such request.\n"
    )


def test_a_server_that_is_not_there_is_named(ask: Ask) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert ask("-q", "Hi", url=url) == Ended(1, b"", f"minisgl: {url} cannot be reached: Connection refused\n")


@pytest.mark.parametrize(
    ("piped", "said"),
    [(b"", "standard input is empty"), (b" \n\n", "is empty"), (b"ab\xff", "not UTF-8 text: byte 2 is 0xff")],
)
def test_what_is_no_prompt_is_not_sent(ask: Ask, server: OpenAIStandIn, piped: bytes, said: str) -> None:
    ended = ask(url=server.url, piped=piped)
    assert (ended.code, ended.out) == (1, b"") and said in ended.err
    assert not server.bodies


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--set", "n=2"), "--set: n cannot be set"),
        (("--set", "temperature"), "--set: temperature: expected NAME=VALUE"),
        (("--set", "seed="), "--set: seed: expected NAME=VALUE"),
        (("--url", "127.0.0.1:1919"), "expected one like http://"),
        (("--url", "http://h:x"), "expected one like http://"),
    ],
)
def test_flags_that_cannot_work_are_refused(ask: Ask, server: OpenAIStandIn, flags: tuple[str, str], said: str) -> None:
    ended = ask("-q", "Hi", *flags, url=server.url)
    assert (ended.code, ended.out) == (2, b"") and said in ended.err


def test_ctrl_c_ends_with_130(server: OpenAIStandIn) -> None:
    server.gate = hold = Hold()
    process = start("-q", "Hi", url=server.url)
    assert process.stdin is not None
    process.stdin.close()
    assert hold.has_come.wait(30)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    hold.may_go_on.set()
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read() + process.stderr.read() == b""
    process.stdout.close()
    process.stderr.close()


def test_a_reader_that_leaves_ends_it_without_a_word(server: OpenAIStandIn) -> None:
    server.script = said(*(1000 * "x" for _ in range(2000)))
    process = start("-q", "Hi", url=server.url)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    process.stdin.close()
    assert process.stdout.read(1) == b"x"
    process.stdout.close()
    assert process.wait(30) == 1
    assert process.stderr.read() == b""
    process.stderr.close()
