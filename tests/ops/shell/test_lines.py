"""What a typed line means."""

from __future__ import annotations

import pytest

from ops.shell.chat import Chat
from ops.shell.lines import COMMANDS, Command, Say, Unknown, read_line


@pytest.mark.parametrize("line", ["Hello", "  indented\ncode", "1/2", "a /reset", "C:\\"])
def test_what_does_not_begin_with_a_slash_is_said_as_it_is(line: str) -> None:
    assert read_line(line) == Say(line)


@pytest.mark.parametrize("line", ["", "   ", "\n\n"])
def test_nothing_is_nothing(line: str) -> None:
    assert read_line(line) is None


@pytest.mark.parametrize(
    ("line", "name", "argument"),
    [
        ("/reset", "/reset", ""),
        ("  /reset  ", "/reset", ""),
        ("/quit", "/exit", ""),
        ("/system  You are\n kind. ", "/system", "You are\n kind."),
        ("/set a=1 b=2", "/set", "a=1 b=2"),
    ],
)
def test_a_command_has_a_name_and_what_follows(line: str, name: str, argument: str) -> None:
    assert read_line(line) == Command(name, argument)


@pytest.mark.parametrize(("line", "said"), [("//etc/hosts is?", "/etc/hosts is?"), ("//", "/"), ("///x", "//x")])
def test_two_slashes_say_a_text_that_begins_with_one(line: str, said: str) -> None:
    assert read_line(line) == Say(said)


@pytest.mark.parametrize(
    ("line", "name", "near"),
    [
        ("/rest", "/rest", ("/reset", "/retry", "/set")),
        ("/syst be kind", "/syst", ("/system",)),
        ("/sa", "/sa", ("/save",)),
        ("/RESET", "/RESET", ()),
        ("/etc/passwd", "/etc/passwd", ()),
        ("/", "/", ()),
    ],
)
def test_an_unknown_command_names_what_may_have_been_meant(line: str, name: str, near: tuple[str, ...]) -> None:
    assert read_line(line) == Unknown(name, near)


def test_every_command_but_exit_is_a_method_of_the_chat() -> None:
    assert {name for name in dir(Chat) if name.startswith("do_")} == {f"do_{name[1:]}" for name in COMMANDS} - {
        "do_exit"
    }
