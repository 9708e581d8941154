"""Digests of beginnings of prompts. An engine publishes those of its cache, a tokenizer looks for those of a prompt.

A digest covers a prompt up to the end of a page. It is keyed by the namespace, so namespaces do not share digests.
"""

from __future__ import annotations

import base64
import functools
import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Final

PUBLISHED_BYTES: Final = 4
"""Bytes of a digest that are published. A wrong match only sends a request to an engine without its prefix."""

MOST_PAGES: Final = 4096
"""Pages of a prompt that are looked at: this takes some milliseconds."""


def int32_bytes(numbers: Sequence[int]) -> bytes:
    """Return numbers as little-endian 32-bit ones."""
    return little(array("i", numbers)).tobytes()


def little(numbers: array[int]) -> array[int]:
    """Return this machine's numbers as little-endian ones, or the other way round."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def next_digest(before: bytes, page: bytes, namespace: str) -> bytes:
    """Return the digest up to a page with the tokens *page*, as bytes; *before*: that up to the page before it."""
    return blake2b(before + page, digest_size=8, key=_key(namespace)).digest()


@functools.cache
def _key(namespace: str) -> bytes:
    return blake2b(namespace.encode()).digest()


def prompt_digests(token_ids: Sequence[int], page_size: int, namespace: str) -> list[bytes]:
    """Return the published digest up to each full page of a prompt, of the first MOST_PAGES at most. The last token is
    computed in any case."""
    num_pages = min((len(token_ids) - 1) // page_size, MOST_PAGES)
    tokens, digest, found = int32_bytes(token_ids[: num_pages * page_size]), b"", list[bytes]()
    for first in range(0, num_pages * page_size * 4, 4 * page_size):
        digest = next_digest(digest, tokens[first : first + 4 * page_size], namespace)
        found.append(digest[:PUBLISHED_BYTES])
    return found


def packed(digests: Iterable[bytes]) -> str:
    """Return digests as the text of a status."""
    return base64.b64encode(b"".join(digests)).decode()


def unpacked(text: str) -> set[bytes]:
    """Return the digests in a status; none if the text is something else."""
    try:
        joined = base64.b64decode(text, validate=True)
    except ValueError:
        return set()
    return {joined[at : at + PUBLISHED_BYTES] for at in range(0, len(joined), PUBLISHED_BYTES)}
