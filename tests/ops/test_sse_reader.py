"""Server-sent events, however the bytes come."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.sse_reader import Frame, FrameReader

STREAM = (
    ": waiting\n\nid: 1-0\ndata: {}\n\ndata: a\ndata:b\n\nevent: error\ndata: ü€\U0001f600\n\n\n\nretry: 3\n\n"
    "data: [DONE]\n\n"
).encode()
FRAMES = [Frame("{}", "1-0"), Frame("a\nb"), Frame("ü€\U0001f600", kind="error"), Frame("[DONE]")]


def read(*pieces: bytes) -> list[Frame]:
    reader = FrameReader()
    return [frame for piece in pieces for frame in reader.feed(piece)]


@given(st.lists(st.integers(0, len(STREAM))), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_frames_are_the_same_however_the_bytes_are_cut_and_lines_end(cuts: list[int], line_break: bytes) -> None:
    stream = STREAM.replace(b"\n", line_break) + b": more\n"
    ends = [0, *sorted(cuts), len(stream)]
    pieces = [stream[start:end] for start, end in itertools.pairwise(ends)]
    assert read(*pieces) == FRAMES


@pytest.mark.parametrize("torn", [b"data: half", b"data: half\n", b"id: 1-0\ndata: half\n"])
def test_a_frame_that_was_not_ended_never_comes(torn: bytes) -> None:
    assert read(STREAM, torn) == FRAMES
