"""Messages between a tokenizer and its process for grammars, over pipes: a length, and as many bytes."""

from __future__ import annotations

from typing import IO, Final

LENGTH_BYTES: Final = 8


def write_frame(pipe: IO[bytes], message: bytes) -> None:
    """Write one message."""
    pipe.write(len(message).to_bytes(LENGTH_BYTES, "big") + message)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """Return the next message; None: the other side has ended."""
    head = pipe.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    length = int.from_bytes(head, "big")
    message = pipe.read(length)
    return message if len(message) == length else None
