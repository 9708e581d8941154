"""`minisgl shell` on a pseudo-terminal, against a stand-in that says what a real server seldom does."""

from __future__ import annotations

import signal
import stat
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.openai_stand_in import DONE, Body, Frames, Hold, OpenAIStandIn, data, listening, text_chunk, usage_chunk
from support.selection import rest_at_night
from support.servers import free_port
from support.terminal import Terminal, on_a_terminal

pytestmark = pytest.mark.slow

QUIET = {"NO_COLOR": "1"}
FINISH = data({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})


@pytest.fixture
def server() -> Iterator[OpenAIStandIn]:
    with listening() as stand_in:
        stand_in.script = echo
        yield stand_in


@pytest.fixture
def shell(server: OpenAIStandIn, tmp_path: Path) -> Iterator[Terminal]:
    with on_a_terminal(["shell", "--url", server.url], tmp_path) as terminal:
        yield terminal


def echo(body: Body) -> Frames:
    """Say how many messages came, and what the last one says."""
    messages = body["messages"]
    text = f"{len(messages)}: {messages[-1]['content']}"
    return [*(text_chunk(piece) for piece in text.split("|")), FINISH, usage_chunk(7, 5, 3), DONE]


def sent(server: OpenAIStandIn) -> list[str]:
    return [message["content"] for message in server.bodies[-1]["messages"]]


def test_the_greeting_says_server_model_and_help_in_one_line(shell: Terminal, server: OpenAIStandIn) -> None:
    shell.until_asking()
    assert shell.lines[0] == f"{server.url}, model stand-in; /help lists the commands"
    assert shell.lines[1] == ">"


def test_a_text_cannot_send_orders_to_the_terminal(shell: Terminal, server: OpenAIStandIn) -> None:
    pieces = [text_chunk("a\x1b[2Jb\x1b"), text_chunk("]0;title\x07\rc\x9b5A\n\td\x08")]
    server.script = lambda body: [*pieces, FINISH, DONE]
    shell.enter("Hi")
    shell.until_shown("d\\x08")
    shell.until_asking()
    assert "a\\x1b[2Jb\\x1b]0;title\\x07\\rc\\x9b5A" in shell.lines
    assert b"\x1b[2J" not in shell.sent and b"\x1b]0;" not in shell.sent and b"\x07" not in shell.sent


@pytest.mark.night  # by day test_lines.py and test_reply.py have it without a terminal
def test_thoughts_are_dim_and_before_the_answer(shell: Terminal, server: OpenAIStandIn) -> None:
    thought = data({"choices": [{"index": 0, "delta": {"reasoning_content": "Hm.\x1b[5m"}}]})
    server.script = lambda body: [thought, text_chunk("So."), FINISH, DONE]
    assert shell.said("Hi") == "Hm.\\x1b[5m So."
    assert b"\x1b[2mHm.\\x1b[5m\x1b[0m" in shell.sent
    shell.said("again")
    assert sent(server) == ["Hi", "So.", "again"]


def test_several_lines_are_one_message(shell: Terminal, server: OpenAIStandIn) -> None:
    shell.until_asking()
    shell.press("one\x1b\rtwo\\\rthree")
    shell.until_shown("> one two three")
    shell.press("\r")
    shell.until_shown("1: one two three")
    assert sent(server) == ["one\ntwo\nthree"]
    shell.until_asking()
    shell.press("\x1b[200~a\r\n\tb\nc\x1b[201~")
    shell.until_shown("> a b c")
    shell.press("\r")
    shell.until_shown("3: a")
    assert sent(server)[-1] == "a\n\tb\nc"


def test_a_line_that_was_typed_comes_again_also_in_the_next_shell_and_only_its_owner_may_read_it(
    server: OpenAIStandIn, tmp_path: Path
) -> None:
    flags = ["shell", "--url", server.url]
    with on_a_terminal(flags, tmp_path) as shell:
        shell.said("alpha beta")
        shell.said("gamma")
        shell.recall("gamma")
        shell.recall("alpha beta")
        shell.press("\x03")
        shell.enter("/quit")
        assert shell.ended() == 0
    file = tmp_path / "state" / "minisgl" / "shell_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with on_a_terminal(flags, tmp_path) as shell:
        shell.until_asking()
        shell.press("\x12alp")
        # The lines are read while one can type already: who is that quick asks for the next match again.

        def is_found() -> bool:
            if "alpha beta" not in shell.text:
                shell.press("\x12")
            return "alpha beta" in shell.text

        shell.until(is_found, "the line is found")
        shell.press("\r\r")
        shell.until_shown("1: alpha beta")


@pytest.mark.night  # by day test_lines.py and test_reply.py have it without a terminal
def test_tab_completes_commands(shell: Terminal) -> None:
    shell.until_asking()
    shell.press("/re\t")
    shell.until_shown("/reset /retry")
    shell.press("s\t")
    shell.until_shown("> /reset")
    shell.press("\r")
    shell.until_shown("the conversation is empty")


@pytest.mark.night  # by day test_lines.py and test_reply.py have it without a terminal
def test_an_unknown_command_is_not_sent(shell: Terminal, server: OpenAIStandIn) -> None:
    assert "/rest is not a command and was not sent; did you mean /reset" in shell.said("/rest")
    assert not server.bodies
    assert shell.said("//etc is?") == "1: /etc is?"


def test_what_the_commands_change_is_sent(shell: Terminal, server: OpenAIStandIn, tmp_path: Path) -> None:
    assert shell.said("/system Be kind.") == "system: Be kind."
    assert shell.said('/set seed=1 stop=["a b"]') == 'seed=1 stop=["a b"]'
    assert "stream cannot be set" in shell.said("/set stream=false")
    assert shell.said("/set seed=") == 'stop=["a b"]'
    assert "top_p is not set" in shell.said("/set top_p=")
    assert shell.said("/params") == 'stop=["a b"]'
    assert "which the server does not list; it lists stand-in" in shell.said("/model other")
    assert shell.said("one") == "2: one"
    assert sent(server) == ["Be kind.", "one"]
    assert (server.bodies[-1]["model"], server.bodies[-1]["stop"]) == ("other", ["a b"])
    assert "seed" not in server.bodies[-1]
    assert shell.said("two") == "4: two"
    assert shell.said("/retry") == "again: two 4: two"
    assert sent(server) == ["Be kind.", "one", "2: one", "two"]
    assert shell.said("/save talk.json") == 'saved: 2 turns, system: Be kind., stop=["a b"]'
    assert shell.said("/undo") == "removed: two"
    assert shell.said('/system ""') == "the system text is removed"
    assert shell.said("three") == "3: three"
    assert shell.said("/reset") == "the conversation is empty"
    assert "nothing" not in shell.said("/params")
    (tmp_path / "damaged.json").write_text((tmp_path / "talk.json").read_text()[:-9])
    assert "is not a conversation: it is not JSON" in shell.said("/load damaged.json")
    assert shell.said("four") == "1: four"
    assert shell.said("/load talk.json") == 'loaded: 2 turns, system: Be kind., stop=["a b"]'
    shell.said("five")
    assert sent(server) == ["Be kind.", "one", "2: one", "two", "4: two", "five"]
    figures = shell.said("/stats")
    assert "answers 1 6" in figures and "cached tokens 3 18" in figures and "output tokens 5 30" in figures


def test_a_refused_question_is_taken_back_and_can_be_asked_again(shell: Terminal, server: OpenAIStandIn) -> None:
    shell.said("one")
    server.script = lambda body: (500, "No.")
    assert shell.said("/retry") == 'again: one error: HTTP 500: "No."'
    server.script = lambda body: (503, {"error": {"message": "Too many\nrequests.", "code": "overloaded"}})
    assert shell.said("two") == "error: HTTP 503: Too many requests."
    server.script = echo
    assert shell.said("three") == "3: three"
    shell.until_asking()
    for line in ("three", "two"):
        shell.recall(line)
    shell.press("\r")
    shell.until_shown("5: two")
    server.script = lambda body: (400, {"error": {"message": "No.", "code": "context_length_exceeded"}})
    assert shell.said("four") == ("error: HTTP 400: No. /reset starts a new conversation, /undo removes the last turn")
    server.script = echo
    assert shell.said("/retry") == "again: four 7: four"


def test_an_answer_that_breaks_is_shown_but_not_kept(shell: Terminal, server: OpenAIStandIn) -> None:
    server.script = lambda body: [text_chunk("Hel"), data({"error": {"message": "It broke."}}), DONE]
    assert shell.said("one") == "Hel error: It broke."
    server.script, server.cut = (lambda body: [text_chunk("Hel")]), True
    assert "Hel error: the stream broke: " in shell.said("two")
    server.script, server.cut = echo, False
    assert shell.said("three") == "1: three"


def test_a_server_that_comes_back_with_another_model_is_asked_for_that(shell: Terminal, server: OpenAIStandIn) -> None:
    shell.said("one")
    server.model, server.script = "other", lambda body: (404, {"error": {"message": "There is no such model."}})
    assert "no such model" in shell.said("two")
    server.script = echo
    shell.said("two")
    assert server.bodies[-1]["model"] == "other"


def test_ctrl_c_ends_the_answer_alone(shell: Terminal, server: OpenAIStandIn) -> None:
    shell.said("one")
    server.gate = hold = Hold()
    shell.enter("two")
    assert hold.has_come.wait(30)
    shell.press("\x03")
    shell.until_shown("stopped before any text; the question is removed (/retry asks it again)")
    hold.may_go_on.set()
    server.gate = None
    assert shell.said("three") == "3: three"
    assert sent(server) == ["one", "1: one", "three"]


def test_what_is_typed_during_an_answer_waits_for_the_prompt(shell: Terminal, server: OpenAIStandIn) -> None:
    server.gate = hold = Hold()
    shell.enter("one")
    assert hold.has_come.wait(30)
    shell.press("/params\rtw")
    hold.may_go_on.set()
    shell.until_shown("> /params no fields are set; the server's defaults apply > tw")
    assert shell.text.count("/params") == 1, "it was not echoed into the answer"


def test_ctrl_c_empties_the_line_and_ctrl_d_leaves(shell: Terminal, server: OpenAIStandIn) -> None:
    shell.until_asking()
    shell.press("never\x03")
    shell.until_asking()
    shell.press("\x04")
    assert shell.ended() == 0
    assert not server.bodies


def test_a_server_that_comes_later_is_found(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with on_a_terminal(["shell", "--url", url], tmp_path, QUIET) as shell:
        shell.until_asking()
        assert shell.lines[0] == f"error: {url} cannot be reached: Connection refused (/help lists the commands)"
        assert shell.said("Hi") == f"error: {url} cannot be reached: Connection refused"
        assert "model other; the server could not confirm it" in shell.said("/model other")
        assert "Connection refused" in shell.said("/model")
        assert b"\x1b[31m" not in shell.sent and b"\x1b[1;31m" not in shell.sent


@pytest.mark.parametrize("place", rest_at_night(["prompt", "search", "answer"]))
def test_sigterm_gives_the_terminal_back_as_it_was(shell: Terminal, server: OpenAIStandIn, place: str) -> None:
    before = termios.tcgetattr(shell.child.child_fd)
    server.gate = hold = Hold()
    shell.until_asking()
    if place == "search":
        shell.press("\x12")
        shell.until_shown("(reverse-i-search)")
    elif place == "answer":
        shell.enter("one")
        assert hold.has_come.wait(30)
    assert termios.tcgetattr(shell.child.child_fd)[3] != before[3]
    shell.child.kill(signal.SIGTERM)
    assert shell.ended() == 143
    hold.may_go_on.set()
    assert termios.tcgetattr(shell.child.child_fd)[3] == before[3]
    assert "Exception" not in shell.text
