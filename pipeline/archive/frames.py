"""Frames of Zstandard with recorded requests: packs them, and finds them in a file that may be damaged.

No more than `MOST_TEXT_BYTES` of a frame are unpacked, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import BinaryIO, Final

import structlog
import zstandard

from pipeline.recording import MOST_BYTES, Recording, UnreadableRecording, decode_recording, encode_recording

logger = structlog.get_logger()

FRAME_BYTES: Final = 1 << 20
"""Size of text above which a batch becomes several frames, because a reader decompresses a whole frame."""
MOST_TEXT_BYTES: Final = FRAME_BYTES + MOST_BYTES
"""Largest text of a frame. A frame with more is damaged and is not unpacked further."""
_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_CHUNK: Final = 1 << 10
"""Size of a read. Zstandard makes at most 32 MiB of so many bytes at once."""
_LOOK: Final = 1 << 20
_MOST_TRIES: Final = 100
"""Largest number of places after damage that are tried as the beginning of a frame."""


def frames_of(recordings: Sequence[Recording]) -> Iterator[tuple[bytes, list[Recording]]]:
    """Yield compressed frames, and the requests in each. A request that is too long for readers is left out."""
    text, inside = bytearray(), list[Recording]()
    for at, recording in enumerate(recordings, 1):
        line = encode_recording(recording)
        if len(line) <= MOST_BYTES:
            text += line
            inside.append(recording)
        else:
            logger.warning("not_archived", uid=recording.uid, bytes=len(line), reason="it is too long to be read")
        if inside and (at == len(recordings) or len(text) >= FRAME_BYTES):
            yield zstandard.ZstdCompressor(write_checksum=True).compress(bytes(text)), inside
            text, inside = bytearray(), []


def frames_in(file: BinaryIO, offset: int) -> Iterator[tuple[int, int, list[Recording]]]:
    """Yield offset, size and requests of the whole frames from *offset* on, and of damaged parts between them."""
    while True:
        found = _frame_at(file, offset)
        if found is None:
            beyond = _next_frame(file, offset)
            if beyond is None:
                return
            found = beyond - offset, []
        yield offset, *found
        offset += found[0]


def _frame_at(file: BinaryIO, offset: int) -> tuple[int, list[Recording]] | None:
    """Return the size of the frame at *offset* and its requests; None if there is no whole one.

    A whole frame that this version cannot read, perhaps a newer one, has no requests.
    """
    file.seek(offset)
    frame, size, text = zstandard.ZstdDecompressor().decompressobj(), 0, bytearray()
    try:
        while not frame.eof:
            chunk = file.read(_CHUNK)
            if not chunk:
                return None
            text += frame.decompress(chunk)
            size += len(chunk)
            if len(text) > MOST_TEXT_BYTES:
                return None
    except zstandard.ZstdError:
        return None
    size -= len(frame.unused_data)
    try:
        return size, [decode_recording(line) for line in lines_in(bytes(text))]
    except UnreadableRecording:
        return size, []


def only(frame: bytes, uids: Collection[str]) -> bytes:
    """Return *frame* with only the requests *uids*; b"" if it cannot be read."""
    try:
        kept = [line + b"\n" for line in lines_in(text_of(frame)) if decode_recording(line).uid in uids]
    except (zstandard.ZstdError, UnreadableRecording):
        return b""
    return zstandard.ZstdCompressor(write_checksum=True).compress(b"".join(kept))


def text_of(frame: bytes) -> bytes:
    """Return the text in *frame*. Its declared size is checked before it is unpacked. Raise ZstdError."""
    if (size := zstandard.frame_content_size(frame)) > MOST_TEXT_BYTES:
        raise zstandard.ZstdError(f"it would be {size:,} bytes, and at most {MOST_TEXT_BYTES:,} are unpacked")
    return zstandard.ZstdDecompressor().decompress(frame, max_output_size=MOST_TEXT_BYTES)


def lines_in(text: bytes) -> Iterator[bytes]:
    """Yield the lines of *text* that are not empty, one at a time: it may have as many as it has bytes."""
    first = 0
    while first < len(text):
        last = text.find(b"\n", first)
        last = len(text) if last < 0 else last
        if last > first:
            yield text[first:last]
        first = last + 1


def _next_frame(file: BinaryIO, offset: int) -> int | None:
    """Return where the next whole frame after *offset* begins. After too many tries, the rest counts as damaged."""
    num_tries, first = 0, offset + 1
    while True:
        file.seek(first)
        part = file.read(_LOOK)
        at = part.find(_MAGIC)
        while at >= 0:
            if _frame_at(file, first + at) is not None:
                return first + at
            num_tries += 1
            if num_tries == _MOST_TRIES:
                return None
            at = part.find(_MAGIC, at + 1)
        if len(part) < _LOOK:
            return None
        first += len(part) - len(_MAGIC) + 1
