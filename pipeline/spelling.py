"""The text of single tokens, as clients see it. Knows how tokenizer.json spells bytes, and no tokenizer.

A vocabulary holds texts, but its tokens stand for bytes: part of a character can be a token. The decoder decides which
text stands for which bytes:

| decoder | the vocabulary has | it stands for |
|---|---|---|
| ByteLevel (Llama 3, Qwen) | `Ġthe`, `ä½` | one byte for each character, by GPT-2's table |
| Replace or Metaspace (SentencePiece) | `▁the` | ` the` |
| ByteFallback (beside them) | `<0xE4>` | that byte |
| any other | `the` | itself |
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def text_of(token_bytes: bytes) -> str:
    """Return a token as clients see it: its text, or `bytes:` and each byte as `\\x..` if the bytes are not UTF-8."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a vocabulary writes the bytes of its tokens."""

    byte_level: bool = False
    byte_fallback: bool = False
    replaced: tuple[tuple[str, str], ...] = ()
    """Pairs (text in the vocabulary, text that it stands for)."""

    @classmethod
    def of(cls, decoder: Mapping[str, Any] | None) -> Spelling:
        """Return the spelling that the `decoder` of a tokenizer.json reads."""
        steps = tuple(steps_of(decoder or {}))
        kinds = {step.get("type") for step in steps}
        replaced = []
        for step in steps:
            if step.get("type") == "Metaspace":
                replaced.append((str(step["replacement"]), " "))
            elif step.get("type") == "Replace" and "String" in step["pattern"]:
                replaced.append((str(step["pattern"]["String"]), str(step["content"])))
        return cls("ByteLevel" in kinds, "ByteFallback" in kinds, tuple(replaced))

    def bytes_of(self, piece: str) -> bytes:
        """Return the bytes of the token that the vocabulary writes as *piece*."""
        if self.byte_level:
            table = _byte_level()
            if all(letter in table for letter in piece):  # else it is an added token, which stands for itself
                return bytes(table[letter] for letter in piece)
            return piece.encode()
        spelled = _BYTE.fullmatch(piece) if self.byte_fallback else None
        if spelled is not None:
            return bytes.fromhex(spelled[1])
        for written, meant in self.replaced:
            piece = piece.replace(written, meant)
        return piece.encode()


def steps_of(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a decoder, in order."""
    if decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from steps_of(step)
    else:
        yield decoder


@functools.cache
def _byte_level() -> Mapping[str, int]:
    """Return character -> byte, GPT-2's table (`bytes_to_unicode` in openai/gpt-2, encoder.py).

    Printable bytes of Latin-1 stand for themselves. The others are the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}
