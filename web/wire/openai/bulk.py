"""Limits how much a JSON text holds, before it is parsed. Knows no field.

Once parsed, a value takes up to a hundred times its bytes: `[[],[],..]` of 4 MB takes 100 MB. So commas, brackets and
quotes are counted first, which takes milliseconds. Those inside of texts do not count.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from pipeline.errors import RequestError

MOST_VALUES: Final = 262_144
"""Most values and members of a body: room for a prompt of as many token ids."""
MOST_LARGE: Final = 50_000
"""Most texts, names of members, objects and lists of a body: each takes more than a number does."""
MOST_LARGE_OF_AGENTS: Final = 2 * MOST_LARGE
"""The same of agents' bodies: enough for a conversation with 2,000 calls of 300 tools."""
_MARKS: Final = b',[{"'
_OTHERS: Final = bytes(byte for byte in range(256) if byte not in _MARKS)


class Bulk(NamedTuple):
    """How much a JSON text holds."""

    values: int
    """Values of any kind."""
    large: int
    """Texts, names of members, objects and lists."""


def refuse_bulk(body: bytes, most_large: int = MOST_LARGE) -> None:
    """Refuse a body with more values than can be parsed and checked in a short time, and in little memory.

    *most_large*: of texts, objects and lists.

    Raises:
        RequestError: It has too many.
    """
    if len(body) <= most_large:
        return
    found = _with_texts(body)
    if found.values > MOST_VALUES or found.large > most_large:
        found = bulk_of(body)
    if found.values > MOST_VALUES:
        message = f"The body has more than {MOST_VALUES} values; send fewer, or a long prompt as text."
        raise RequestError(message, code="too_many_values")
    if found.large > most_large:
        message = f"The body has more than {most_large} texts, objects and lists; send fewer."
        raise RequestError(message, code="too_many_values")


def bulk_of(text: bytes) -> Bulk:
    """Return how much a JSON text holds. Of a text that is not valid, the parser reads no more than that."""
    bare = text.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in text else text  # faster at the same length
    marks = bare.translate(None, _OTHERS)  # now each quote begins or ends a text
    num_texts = marks.count(b'"') // 2
    if num_texts > 2 * MOST_LARGE:  # too many to look between them
        return Bulk(num_texts, num_texts)
    outside = _with_texts(b"".join(marks.split(b'"')[::2]))
    return Bulk(outside.values, outside.large + num_texts)


def _with_texts(text: bytes) -> Bulk:
    """As bulk_of, but the marks inside of texts count, too."""
    marks = text.translate(None, _OTHERS)
    opened = marks.count(b"[") + marks.count(b"{")
    return Bulk(marks.count(b",") + opened + 1, opened + marks.count(b'"') // 2)
