"""Text of others, as a terminal may be given it."""

from __future__ import annotations

import unicodedata

from ops.shell.text import one_line, printable


def test_every_control_character_but_newline_and_tab_is_escaped() -> None:
    everything = "".join(map(chr, range(0x3000)))
    shown = printable(everything)
    assert [char for char in shown if unicodedata.category(char) in ("Cc", "Cs")] == ["\t", "\n"]
    assert printable("a\x1b[31m\r\x07\x9b\x7f\x00") == "a\\x1b[31m\\r\\x07\\x9b\\x7f\\x00"


def test_what_can_be_read_stays_as_it_is() -> None:
    text = "def f():\n\treturn 'ü 你好 \U0001f468\u200d\U0001f469 \\n'"
    assert printable(text) == text


def test_half_a_character_does_not_end_an_answer() -> None:
    assert printable("\ud83d").encode() == b"\\ud83d"


def test_one_line_is_one() -> None:
    assert one_line("a\n\tb\x85") == "a\\n\\tb\\x85"
