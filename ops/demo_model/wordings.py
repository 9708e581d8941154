"""Reads what the demo model's conversations are made of, from `wordings.toml`. Knows no grammar and no chance.

A `Wording` has the sentences of one request, those of training and those that the evaluation alone asks with.
"""

from __future__ import annotations

import functools
import itertools
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from zlib import crc32

FILE: Final = Path(__file__).with_suffix(".toml")
HELD_OUT_OF: Final = 8
"""One sentence in so many is held out, and one value."""
POLITE_BEFORE: Final = ("Please ", "Could you ", "Can you ", "Now ", "Okay, ", "Would you ")
"""What may come before a request that is an order; after it the order begins with a small letter."""
POLITE_AFTER: Final = (", please", " for me", " now")


@dataclass(frozen=True, slots=True)
class Wording:
    """The ways to ask one thing. No sentence is in both lists, not even with other punctuation."""

    trained: tuple[str, ...]
    held_out: tuple[str, ...]


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def names() -> tuple[str, ...]:
    """Return the names of all wordings."""
    return tuple(_tables()["wordings"])


@functools.cache
def wording(name: str) -> Wording:
    """Return the sentences called *name*; where none are held out by name, one in eight that brackets make is.

    A sentence is not held out if a word of it is in no other sentence: the model takes unknown words for values. A
    sentence that is `bare` the same as a trained one is in neither list.
    """
    tables = _tables()
    lines = _lines(tables["wordings"][name])
    if name in tables["held_out"]:
        return _divided(lines, _lines(tables["held_out"][name]))
    sentences = list(dict.fromkeys(sentence for line in lines for sentence in expanded(line)))
    cores = dict.fromkeys(map(core, sentences))
    times = Counter(word for key in cores for word in set(key.split()))
    out = set[str]()
    for key in sorted(cores.keys() - set(map(core, lines)), key=lambda key: crc32(key.encode())):
        if len(out) < len(cores) / HELD_OUT_OF and all(times[word] > 1 for word in key.split()):
            out.add(key)
            times.subtract(set(key.split()))
    trained, held = (tuple(one for one in sentences if (core(one) in out) is side) for side in (False, True))
    return _divided(trained, held)


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


def _divided(trained: tuple[str, ...], held_out: tuple[str, ...]) -> Wording:
    known = set(map(bare, trained))
    return Wording(trained, tuple(sentence for sentence in held_out if bare(sentence) not in known))


def answer(name: str) -> tuple[str, str]:
    """Return the answer to the wording *name*, and the same in one word; empty where there is none."""
    text, word = _tables()["answers"][name]
    return text, word


def answers() -> tuple[str, ...]:
    """Return all answers."""
    return tuple(text for name in _tables()["answers"] for text in answer(name))


@functools.cache
def values(name: str) -> tuple[str, ...]:
    """Return the list of values called *name*."""
    return tuple(_tables()["values"][name].split())


def is_held_out(value: object) -> bool:
    """Return whether *value* is for the evaluation alone, in capitals or not."""
    return crc32(str(value).casefold().encode()) % HELD_OUT_OF == 0


def core(sentence: str) -> str:
    """Return *sentence* without polite words and the end mark: sentences with the same core mean the same."""
    text = sentence.lower().rstrip(".?!").replace("favorite", "favourite").replace("'", "")
    while before := next((before for before in POLITE_BEFORE if text.startswith(before.lower())), None):
        text = text.removeprefix(before.lower())
    for after in POLITE_AFTER:
        text = text.removesuffix(after)
    return text


def bare(sentence: str) -> str:
    """Return the `core` of a sentence without quotes, colons, commas, and the spaces around signs."""
    return " ".join(re.sub(r" ?([-+]) ?", r"\1", re.sub('[":,;]', " ", core(sentence))).split())


def expanded(pattern: str) -> list[str]:
    """Return the sentences that a line with alternatives in brackets stands for."""
    parts = re.split(r"\[([^]]*)\]", pattern)
    choices = [part.split("|") if place % 2 else [part] for place, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]
