"""`minisgl shell` and `serve --shell` with real servers, on a pseudo-terminal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import termios
import uuid
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from support.servers import ROOT, Command, Server, eventually, free_port, is_alive, run_command, wait_until_ready
from support.terminal import Terminal, on_a_terminal

from ops.bench.models import nonsense
from ops.shell.conversation import Conversation, Turn, save
from ops.shell.reply import Reply
from ops.shell.server import BROKE
from ops.shell.server import Server as Client
from pipeline.events import AnyEvent, Cancelled, Finished, Submitted, TokensProduced, decode
from pipeline.log.redis import RedisLog
from pipeline.names import GENERATE, WEB, Names

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plain_server")]

MINISGL = (sys.executable, str(ROOT / "minisgl.py"))
ENDLESS = "/set ignore_eos=true max_tokens=3500"
BRIEF = "/set ignore_eos=true max_tokens=12"


@pytest.fixture
def shell(plain_server: Server, tmp_path: Path) -> Iterator[Terminal]:
    with on_a_terminal(["shell", "--url", plain_server.url], tmp_path) as terminal:
        yield terminal


History = list[AnyEvent]
Told = Callable[[], list[History]]


def told_of(log: RedisLog, before: Collection[str] = ()) -> list[History]:
    """Return the histories of all requests but the frontend's own and those *before*, the oldest first."""
    _, uids = log.requests("0", 100_000)
    found = log.histories(sorted(set(uids).difference(before)))
    histories = [[decode(entry.fields) for entry in history] for history in found]
    return [history for history in histories if submitted(history).endpoint != "probe"]


@pytest.fixture
def told(plain_server: Server) -> Iterator[Told]:
    """Return the histories of the requests of this test."""
    with plain_server.log() as log:
        _, before = log.requests("0", 100_000)
        yield lambda: told_of(log, before)


def submitted(history: History) -> Submitted:
    assert isinstance(history[0], Submitted)
    return history[0]


def messages(history: History) -> list[tuple[str, str]]:
    return [(str(message["role"]), str(message["content"])) for message in submitted(history).messages]


def text(history: History) -> str:
    return "".join(event.text for event in history if isinstance(event, TokensProduced))


def until_long(shell: Terminal, num: int = 300) -> None:
    """Wait until there is so much of an answer."""
    start = len(shell.text)
    shell.until(lambda: len(shell.text) > start + num, "an answer under way")


def test_the_server_gets_all_turns_and_after_a_reset_one_message(
    shell: Terminal, plain_server: Server, told: Told
) -> None:
    shell.said(BRIEF)
    for question in ("one", "two", "three"):
        shell.said(question)
    assert "/rset is not a command" in shell.said("/rset")
    assert shell.said("/reset") == "the conversation is empty"
    shell.said("four")
    first, second, third, fourth = told()
    answers = [("assistant", text(history)) for history in (first, second)]
    assert messages(third) == [("user", "one"), answers[0], ("user", "two"), answers[1], ("user", "three")]
    assert messages(fourth) == [("user", "four")]
    figures = shell.said("/stats")
    assert "answers 1 4" in figures and "output tokens 12 48" in figures
    uid = figures.partition("`minisgl trace ")[2][:32]
    assert httpx.get(f"{plain_server.url}/v1/requests/{uid}").json()["completion_tokens"] == 12
    story = shell.said("/trace")
    assert story.startswith(f"request {uid}: finished submitted ") and "output 12" in story
    other = httpx.post(
        f"{plain_server.url}/v1/completions", json={"prompt": "five", "n": 2, "max_tokens": 3}, timeout=60
    )
    uid = other.headers["x-minisgl-uid"]
    story = shell.said(f"/trace {other.json()['id']}")
    assert f"request {uid}.0: finished" in story and f"request {uid}.1: finished" in story
    assert shell.said("/trace nonsense").startswith("error: HTTP 404: ")
    assert shell.said("/model") == "* minisgl-nonsense"


def test_ctrl_c_cancels_on_the_server_and_what_came_stays(
    shell: Terminal, plain_server: Server, told: Told, tmp_path: Path
) -> None:
    shell.said(ENDLESS)
    shell.enter("endless")
    until_long(shell)
    shell.press("\x03")
    shell.until_shown("stopped; the conversation keeps the text so far")
    shell.until(lambda: isinstance(told()[-1][-1], Cancelled), "the request is cancelled")
    cut = told()[-1]
    shell.said(BRIEF)
    shell.said("more")
    after = told()[-1]
    assert isinstance(after[-1], Finished)
    (role, answer), (_, last) = messages(after)[1:]
    assert role == "assistant" and len(answer) > 100 and text(cut).startswith(answer) and last == "more"
    shell.said("/save talk.json")
    turns = json.loads((tmp_path / "talk.json").read_text())["turns"]
    assert [turn.get("cut", False) for turn in turns] == [True, False]


def test_what_the_server_says_of_a_request_is_shown(shell: Terminal, tmp_path: Path) -> None:
    save(Conversation(turns=[Turn(9000 * "a", "b")]), tmp_path / "long.json")
    shell.said(BRIEF)
    shell.said("/set tempratur=1")
    assert shell.said("one").endswith("the server ignored unknown fields: tempratur")
    assert shell.said("/load long.json").startswith("loaded: 1 turn")
    shell.said(BRIEF)
    said = shell.said("three")
    assert "maximum context length is 4096 tokens" in said
    assert said.endswith("/reset starts a new conversation, /undo removes the last turn")
    assert shell.said("/undo").startswith("removed: aaaa")
    assert "error" not in shell.said("three")


def test_an_answer_goes_on_where_it_was_when_its_web_worker_dies(
    shell: Terminal, plain_server: Server, told: Told, tmp_path: Path
) -> None:
    shell.said("/set ignore_eos=true max_tokens=800")
    shell.enter("long")
    until_long(shell)
    (worker,) = plain_server.command.workers(WEB)
    worker.kill()
    shell.until_shown("the answer ends here: it reached its token limit")
    history = told()[-1]
    assert isinstance(history[-1], Finished)
    shell.said("/save talk.json")
    (turn,) = json.loads((tmp_path / "talk.json").read_text())["turns"]
    assert turn["answer"] == text(history), "nothing is missing and nothing came twice"
    letters = "".join(shell.text.partition("> long")[2].split())
    assert "".join(text(history).split())[-200:] in letters
    wait_until_ready(plain_server.url, [plain_server.command])


def test_clients_whose_web_worker_dies_before_the_first_token_ask_again_and_each_is_one_request(
    plain_server: Server, told: Told
) -> None:
    async def of_the_shell(number: int) -> str:
        reply, body = Reply(), {"messages": [{"role": "user", "content": f"shell {number}"}], "max_tokens": 8}
        pieces = [piece.text async for piece in Client(plain_server.url).answer(body | {"stream": True}, reply)]
        assert BROKE.text in pieces and reply.has_ended
        return reply.text

    async def of_openai(number: int, client: openai.AsyncOpenAI) -> str:
        chunks = await client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": f"openai {number}"}],
            max_tokens=8,
            stream=True,
            extra_headers={"Idempotency-Key": str(uuid.uuid4())},
        )
        return "".join([choice.delta.content or "" async for chunk in chunks for choice in chunk.choices])

    async def answers() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{plain_server.url}/v1", api_key="none") as client:
            asked = [*map(of_the_shell, range(12)), *(of_openai(number, client) for number in range(12))]
            return await asyncio.gather(*asked)

    (engine,), (worker,) = plain_server.command.workers(GENERATE), plain_server.command.workers(WEB)
    engine.suspend()
    with ThreadPoolExecutor() as pool:
        try:
            waiting = pool.submit(asyncio.run, answers())
            eventually(lambda: len(told()) == 24, "the log has every request")
            worker.kill()
        finally:
            engine.resume()
        texts = waiting.result(timeout=60)
    histories = told()
    assert sorted(texts) == sorted(map(text, histories)) and len(histories) == 24
    assert {history[-1].kind for history in histories} == {"finished"}
    wait_until_ready(plain_server.url, [plain_server.command])


@contextlib.contextmanager
def served(port: int, folder: Path) -> Iterator[Command]:
    flags = ["--port", str(port), "--data-dir", str(folder / "data"), "--model", str(nonsense(folder))]
    command = run_command(["serve", *flags], folder)
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", [command])
        yield command
    finally:
        command.stop()


@pytest.mark.night  # by day `test_on_a_terminal.py` and `test_script.py` have what a stand-in does so
def test_a_server_that_is_killed_and_comes_back_is_answered_in_the_same_shell(tmp_path: Path) -> None:
    port = free_port()
    with on_a_terminal(["shell", "--url", f"http://127.0.0.1:{port}"], tmp_path) as shell:
        with served(port, tmp_path) as command:
            shell.said(BRIEF)
            shell.said("one")
            shell.said(ENDLESS)
            shell.enter("two")
            until_long(shell)
            command.process.kill()
        shell.until_shown("error: the stream broke: ")
        assert "cannot be reached: Connection refused" in shell.said("three")
        with served(port, tmp_path):
            shell.said(BRIEF)
            assert "error" not in shell.said("four")
            with contextlib.closing(RedisLog(f"unix://{tmp_path / 'data' / 'redis.sock'}", Names())) as log:
                first, _, last = told_of(log)
    assert messages(last) == [("user", "one"), ("assistant", text(first)), ("user", "four")]
    assert isinstance(last[-1], Finished)


def test_a_script_gets_the_answer_alone(plain_server: Server, told: Told) -> None:
    def ask(*arguments: str, piped: str = "", code: int = 0) -> tuple[str, str]:
        command = [*MINISGL, "shell", "--url", plain_server.url, "--set", "max_tokens=9", "seed=1", *arguments]
        done = subprocess.run(command, input=piped, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code
        return done.stdout, done.stderr

    for arguments, piped, said in ((["-q", "Hi"], "", "Hi"), ([], "Hello\nyou\n", "Hello\nyou")):
        answer, errors = ask(*arguments, piped=piped)
        history = told()[-1]
        assert messages(history) == [("user", said)]
        assert (answer.removesuffix("\n"), errors) == (text(history).removesuffix("\n"), "")
    _, errors = ask("tempratur=1", "-q", "Hi")
    assert errors == "minisgl: the server ignored unknown fields: tempratur\n"
    answer, errors = ask("top_p=7", "-q", "Hi", code=1)
    assert answer == "" and "top_p" in errors


def starting(port: int, folder: Path, *flags: str) -> list[str]:
    return ["serve", "--shell", "--port", str(port), "--data-dir", str(folder / "data"), *flags]


def below(shell: Terminal) -> list[psutil.Process]:
    top = psutil.Process(shell.child.pid)
    return [top, *top.children(recursive=True)]


def assert_ended(family: list[psutil.Process], port: int) -> None:
    assert not any(map(is_alive, family))
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.night  # a server for one sentence
def test_serve_shell_begins_with_a_chat_and_ends_with_it(tmp_path: Path) -> None:
    port = free_port()
    flags = ("--model", str(nonsense(tmp_path)))
    with on_a_terminal(starting(port, tmp_path, *flags), tmp_path, {"MINISGL_API_KEY": "k1 k2"}) as shell:
        shell.until_shown("starting: ")
        shell.until_asking()
        log = tmp_path / "data" / "serve.log"
        assert f"logis{log};Ctrl-Dendschatandserver." in "".join(shell.text.split())
        assert f"http://127.0.0.1:{port}, model minisgl-nonsense; /help lists the commands" in shell.lines
        assert "starting" not in shell.text and "level" not in shell.text
        assert httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 401
        family = below(shell)
        shell.said(ENDLESS)
        shell.enter("endless")
        until_long(shell)
        shell.press("\x03")
        shell.until_shown("stopped; the conversation keeps the text so far")
        shell.said(BRIEF)
        assert "error" not in shell.said("more")
        assert "k1" not in " ".join(part for process in family for part in process.cmdline())
        shell.press("\x03")
        shell.press("\x04")
        assert shell.ended() == 0
    assert_ended(family, port)
    events = [json.loads(line)["event"] for line in log.read_text().splitlines() if line.startswith("{")]
    assert "engine_loaded" in events and "request" in events and "worker_killed" not in events


@pytest.mark.night
def test_sigterm_ends_shell_and_server_and_gives_the_terminal_back(tmp_path: Path) -> None:
    port = free_port()
    with on_a_terminal(starting(port, tmp_path), tmp_path) as shell:
        before = termios.tcgetattr(shell.child.child_fd)
        shell.until_asking()
        assert "No --model was given, so the demo model answers" in shell.text and "model minisgl-demo;" in shell.text
        family = below(shell)
        os.kill(shell.child.pid, signal.SIGTERM)
        assert shell.ended() == 0
        assert termios.tcgetattr(shell.child.child_fd)[3] == before[3]
    assert_ended(family, port)
    assert "worker_killed" not in (tmp_path / "data" / "serve.log").read_text()


@pytest.mark.night
def test_a_server_that_is_killed_takes_its_shell_along(tmp_path: Path) -> None:
    """It was started by a shell, as by people: the terminal is not gone with it."""
    program = ("/bin/sh", "-c", f'{sys.executable} {ROOT / "minisgl.py"} "$@"; echo it ended with $?; read line', "sh")
    with on_a_terminal(starting(free_port(), tmp_path), tmp_path, program=program) as shell:
        before = termios.tcgetattr(shell.child.child_fd)
        shell.until_asking()
        _, serve, *others = family = below(shell)
        assert "serve" in serve.cmdline() and len(others) >= 6
        serve.kill()
        shell.until_shown("it ended with 137")
        del family[0]
        eventually(lambda: not any(map(is_alive, family)), "nothing of it is left")
        assert termios.tcgetattr(shell.child.child_fd)[3] == before[3]


@pytest.mark.night
def test_a_worker_that_cannot_start_says_why_in_the_terminal(tmp_path: Path) -> None:
    with on_a_terminal(
        starting(free_port(), tmp_path, "--device", "cuda"), tmp_path, {"CUDA_VISIBLE_DEVICES": ""}
    ) as shell:
        assert shell.ended() == 2
        shown = " ".join(shell.text.split())
    assert "minisgl: --device cuda" in shown and "serve.log has all of it" in shown


def test_without_a_terminal_there_is_no_shell_and_nothing_is_started(tmp_path: Path) -> None:
    command = [*MINISGL, *starting(free_port(), tmp_path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.startswith("minisgl: --shell: needs a terminal")
    assert not (tmp_path / "data").exists()
