"""What the tests of detokenizers have in common: a token is a character, and tokens above 200 are special."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.events import Admitted, EventRow, FinishReason, TokenRow
from stages.detokenize.text import Decoder


def plain(token_ids: Sequence[int]) -> str:
    return special([token for token in token_ids if token < 200])


def special(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


DECODER = Decoder(plain, special, chr, frozenset(range(200, 256)))


def token_row(uid: str, n: int, letter: str = "x", end: FinishReason | None = None, chunks: int = 0) -> TokenRow:
    return TokenRow(uid=uid, n=n, token=ord(letter), end=end, chunks=chunks)


def admitted(uid: str, n: int = 0, cached: int = 0) -> EventRow:
    event = Admitted(engine="generate-0", epoch=1, step=1, fingerprint="f", cached_tokens=cached)
    return EventRow(uid=uid, n=n, event=event)
