"""A request as a line of a file, and what is said of lines that hold none."""

from __future__ import annotations

import pytest

from pipeline.log.protocol import Entry
from pipeline.names import SEAL
from pipeline.recording import Recording, UnreadableRecording, decode_recording, encode_recording

FINISHED = Recording(
    "0" * 32,
    (Entry("0-1", {"kind": "submitted", "prompt": 'a "quoted"\nline\u2028 é'}), Entry(SEAL, {"kind": "finished"})),
)


def test_a_recording_is_one_line_and_comes_back_as_it_was() -> None:
    line = encode_recording(FINISHED)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert decode_recording(line) == FINISHED


def test_what_its_file_says_of_a_recording_comes_back_too() -> None:
    told = Recording(FINISHED.uid, FINISHED.entries, {"from": "elsewhere", "ms": 12})
    assert decode_recording(encode_recording(told)) == told


def test_a_recording_without_its_last_entry_is_not_sealed() -> None:
    assert FINISHED.is_sealed
    assert not Recording(FINISHED.uid, FINISHED.entries[:1]).is_sealed
    assert not Recording(FINISHED.uid, ()).is_sealed


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "not JSON"),
        (b'{"v": 1, "uid": "a", "entr', "not JSON"),
        (b"[1]", "expected {"),
        (b'{"uid": "a", "entries": []}', "expected {"),
        (b'{"v": true, "uid": "a", "entries": []}', "expected {"),
        (b'{"v": 2, "uid": "a", "entries": []}', "of version 2"),
        (b'{"v": 1, "uid": "", "entries": []}', "expected a uid"),
        (b'{"v": 1, "uid": "a", "entries": {}}', "a list of entries"),
        (b'{"v": 1, "uid": "a", "entries": [["0-1"]]}', "expected an entry"),
        (b'{"v": 1, "uid": "a", "entries": [["0-1", {"n": 1}]]}', "expected an entry"),
    ],
)
def test_a_line_that_holds_no_recording_is_refused_with_what_was_found(line: bytes, said: str) -> None:
    with pytest.raises(UnreadableRecording, match=said.replace("{", r"\{")):
        decode_recording(line)
