"""A conversation: what is sent of it, and how it is kept in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ops.shell.conversation import KIND, Conversation, NotKept, Turn, load, save

TALK = Conversation(
    "Be kind.",
    {"temperature": 0.2, "stop": ["a b"], "seed": 2**70},
    [Turn("你好\n\n", "Hi \x1b[2J!"), Turn("again", "half \ud83d", cut=True)],
)


def test_a_request_has_the_system_text_all_turns_and_the_question() -> None:
    body = TALK.body("m", "why?", TALK.turns)
    said = [(message["role"], message["content"]) for message in body.pop("messages")]
    assert said == [
        ("system", "Be kind."),
        ("user", "你好\n\n"),
        ("assistant", "Hi \x1b[2J!"),
        ("user", "again"),
        ("assistant", "half \ud83d"),
        ("user", "why?"),
    ]
    assert body == {"model": "m", "stream": True, "stream_options": {"include_usage": True}, **TALK.params}


def test_without_a_system_text_there_is_no_such_message() -> None:
    assert Conversation().body("m", "q", ())["messages"] == [{"role": "user", "content": "q"}]


def test_what_was_saved_is_loaded_and_may_be_saved_again(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    save(Conversation(), path)
    save(TALK, path)
    assert load(path) == TALK
    assert [file.name for file in tmp_path.iterdir()] == ["talk.json"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("talk.json")
    save(TALK, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and load(tmp_path / "talk.json") == TALK


def good() -> dict[str, Any]:
    return {"kind": KIND, "system": "", "params": {}, "turns": [{"question": "q", "answer": "a"}]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "other"}, "expected an object with"),
        ({"system": None}, "`system` should be of another type"),
        ({"params": []}, "`params` should be of another type"),
        ({"params": {"stream": False}}, "params: stream cannot be set"),
        ({"turns": {}}, "`turns` should be of another type"),
        ({"turns": ["q"]}, "turn 1 is not an object"),
        ({"turns": [{"question": "q"}]}, "turn 1: `answer` is missing"),
        ({"turns": [{"question": "q", "answer": 5}]}, "turn 1: `answer` should be of another type"),
        ({"turns": [{"question": "q", "answer": "a", "cut": 1}]}, "turn 1: `cut` should be of another type"),
        ({"more": 1}, "`more` is unknown"),
    ],
)
def test_what_is_damaged_is_refused_with_what_is_wrong(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(good()))
    assert load(path).turns == [Turn("q", "a")]
    path.write_text(json.dumps(good() | change))
    with pytest.raises(NotKept, match=said):
        load(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"5", b"\xff\xfe", b'{"x": NaN}', 100_000 * b"[", b"text"],
    ids=lambda content: repr(content[:9]),
)
def test_what_is_no_conversation_is_neither_loaded_nor_written_over(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(NotKept):
        load(path)
    with pytest.raises(NotKept, match="already exists"):
        save(TALK, path)
    assert path.read_bytes() == content


def test_a_file_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotKept, match=r"absent\.json"):
        load(tmp_path / "absent.json")
    with pytest.raises(NotKept):
        load(tmp_path)
    with pytest.raises(NotKept, match="already exists"):
        save(TALK, tmp_path)
    with pytest.raises(NotKept, match=r"t\.json"):
        save(TALK, tmp_path / "absent" / "t.json")
