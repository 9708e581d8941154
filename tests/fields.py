"""Every field of a chat request that is honoured: what it takes, and a request that shows what it does.

The rows are run against a server by `tests/end_to_end/test_fields.py`, what they refuse by `tests/web/test_fields.py`.
The README's table is made of them: `python tests/fields.py` prints it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
WILD = {"temperature": 2, "seed": 5, "max_tokens": 24, "ignore_eos": True}
FEW = {"allowed_token_ids": list(range(100, 140)), "max_tokens": 64, "temperature": 1, "seed": 3, "ignore_eos": True}
"""So few tokens that some come again."""
EOS = "the end-of-sequence token"
"""Stands for its id."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a request was answered with."""

    text: str
    token_ids: list[int]
    reason: str

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_different(self) -> int:
        return len(set(self.token_ids))

    @property
    def most_of_one(self) -> int:
        return max(Counter(self.token_ids).values())


Fields = Mapping[str, Any]
Shown = Callable[[Said, Said], bool]


@dataclass(frozen=True, slots=True)
class Field:
    """One field, and what is sent to show it: `base` without it, then with it."""

    name: str
    takes: str
    default: str
    effect: str
    """What the answer is like with the field, as against the one without."""
    base: Fields
    value: Any
    shows: Shown
    """Whether the answer without (first) and the one with the field are as `effect` says."""
    refused: Any
    """A value that gets a 400."""
    more: Callable[[Said], Fields] = field(default=lambda said: {})
    """What else is sent with the field, or instead of `value`, where it depends on the answer without it."""


FIELDS = (
    Field(
        "max_completion_tokens", "whole number from 1", "rest of the context", "ends after so many tokens (`length`)",
        GREEDY, 5, lambda a, b: b.token_ids == a.token_ids[:5] and b.reason == "length", 0,
    ),
    Field(
        "max_tokens", "the same; `max_completion_tokens` wins", "rest of the context", "the same",
        {"temperature": 0, "ignore_eos": True}, 7,
        lambda a, b: b.num_tokens == 7 < a.num_tokens and b.reason == "length", "7",
    ),
    Field(
        "min_tokens", "whole number from 0", "0", "what would end the answer does not come before so many tokens",
        {**GREEDY, "logit_bias": {"50": 100}, "stop_token_ids": [50]}, 6,
        lambda a, b: a.num_tokens == 1 and b.num_tokens == 7 and 50 not in b.token_ids[:6], -1,
    ),
    Field(
        "stop", "a text, or up to 16", "none", "ends before that text, which is not sent (`stop`)",
        GREEDY, None, lambda a, b: a.text.startswith(b.text) and b.text != a.text and b.reason == "stop", "",
        lambda said: {"stop": said.text[3:5]},
    ),
    Field(
        "stop_token_ids", "up to 256 token ids", "none", "ends with such a token, whose text is not sent (`stop`)",
        GREEDY, None,
        lambda a, b: b.token_ids == a.token_ids[: a.token_ids.index(a.token_ids[4]) + 1] and b.reason == "stop", [-1],
        lambda said: {"stop_token_ids": [said.token_ids[4]]},
    ),
    Field(
        "ignore_eos", "true or false", "false", "an end-of-sequence token does not end the answer",
        {"temperature": 0, "max_tokens": 9, "logit_bias": {EOS: 100}}, True,
        lambda a, b: (a.num_tokens, a.reason, b.num_tokens, b.reason) == (1, "stop", 9, "length"), "true",
    ),
    Field(
        "temperature", "0 to 2", "1", "0 always takes the most probable token; the higher, the more others come",
        {**WILD, "temperature": 0}, 1.5, lambda a, b: a.token_ids != b.token_ids, 2.1,
    ),
    Field(
        "top_p", "above 0, to 1", "1", "only the most probable tokens that together reach it: near 0, one",
        WILD, 1e-9, lambda a, b: a.token_ids != b.token_ids, 0,
    ),
    Field(
        "top_k", "whole number from -1", "0", "only so many of the most probable tokens; -1 and 0: all",
        WILD, 1, lambda a, b: a.token_ids != b.token_ids, -2,
    ),
    Field(
        "min_p", "0 to 1", "0", "only tokens at least so probable, as a share of the most probable one",
        WILD, 1, lambda a, b: a.token_ids != b.token_ids, 1.1,
    ),
    Field(
        "seed", "whole number of 64 bits", "drawn", "the same seed gives the same answer, another one another",
        WILD, 6, lambda a, b: a.token_ids != b.token_ids, "6",
    ),
    Field(
        "presence_penalty", "-2 to 2", "0", "taken from the logit of tokens that the answer has: more different ones",
        FEW, 2, lambda a, b: b.num_different > a.num_different, 2.1,
    ),
    Field(
        "frequency_penalty", "-2 to 2", "0", "the same, times how often it has them: no token comes as often",
        FEW, 2, lambda a, b: b.most_of_one < a.most_of_one, -2.1,
    ),
    Field(
        "repetition_penalty", "above 0, to 2", "1",
        "divides the logits of tokens that prompt or answer have: above 1, more different ones",
        FEW, 2, lambda a, b: b.num_different > a.num_different, 0,
    ),
    Field(
        "logit_bias", "token id: -100 to 100, up to 1,024", "none", "added to logits: with 100 a token comes always",
        GREEDY, {"77": 100}, lambda a, b: set(b.token_ids) == {77} != set(a.token_ids), {"a": 1},
    ),
    Field(
        "allowed_token_ids", "up to 16,384 token ids", "all", "no other token comes",
        GREEDY, [90, 91, 92], lambda a, b: set(b.token_ids) <= {90, 91, 92} and not set(a.token_ids) <= {90, 91, 92},
        [],
    ),
)  # fmt: skip


def table() -> str:
    """Return the README's table."""
    rows = [f"| `{one.name}` | {one.takes} | {one.default} | {one.effect} |" for one in FIELDS]
    return "\n".join(["| field | takes | default | what it does |", "|---|---|---|---|", *rows])


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
