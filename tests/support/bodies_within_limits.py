"""Bodies that no limit of docs/http-api.md refuses at once, each extreme in one or several ways. Knows no server.

A body is a *base*, which is an endpoint with a prompt, and some *extras*, which are fields. Each has a name, so that a
failure says what it was. *share* is how much of a limit it takes: 1 is all of it. `EVILS` are constraints that mean
harm: each is small, and each costs much somewhere on its way to a mask.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from stages.tokenize.constraints.grammars import MOST_OPERATORS

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
GENERATE: Final = "/generate"
TOKENIZE: Final = "/tokenize"
DETOKENIZE: Final = "/detokenize"
MOST_BYTES: Final = 4 << 20
"""A body that would be larger has less of everything."""
LETTERS: Final = 'abcdefgh ijklmn opqr stuvwxyz .,"\\\n\0é中\U0001f600'

Fields = dict[str, Any]
Draw = Callable[[random.Random, float], Fields]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One body."""

    name: str
    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


def text(draw: random.Random, num: int) -> str:
    """Return *num* characters: of one kind, of two that repeat, or of all kinds."""
    some = draw.choice((draw.choice(LETTERS), "ab", "a \n", "".join(draw.choice(LETTERS) for _ in range(97))))
    return (some * (num // len(some) + 1))[:num]


def ids(draw: random.Random, num: int, *, below: int = 256) -> list[int]:
    return [draw.randrange(below)] * num if draw.random() < 0.5 else [draw.randrange(below) for _ in range(num)]


def up_to(most: int, share: float) -> int:
    return max(1, int(most * share))


def schema(draw: random.Random, share: float) -> Fields:
    """Return a schema of at most 64 KiB: wide, deep, with definitions, with long texts or with bounds."""
    num = up_to(1000, share)
    match draw.randrange(6):
        case 0:
            return {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(num)}}
        case 1:
            found: Fields = {"type": "integer"}
            for _ in range(up_to(60, share)):
                found = {"type": "object", "properties": {"a": found, "b": found["type"] and {"type": "null"}}}
            return found
        case 2:
            named = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "null"}]} for i in range(num)}
            return {"$defs": named | {f"d{num}": {"type": "string"}}, "$ref": "#/$defs/d0"}
        case 3:
            return {"enum": [f"{i} {text(draw, 20)}" for i in range(num)]}
        case 4:
            words = {"description": "x" * up_to(50_000, share)}
            return {"$defs": {"d": words}, "properties": {f"k{i}": {"$ref": "#/$defs/d"} for i in range(num // 4)}}
        case _:
            return {
                "type": "array",
                "minItems": num,
                "maxItems": 5 * num,
                "items": {"type": "string", "minLength": num},
            }


def intersected(draw: random.Random, share: float) -> str:
    """Return a small grammar with a terminal that is many at once. llguidance alone needs minutes for the largest."""
    terms = (f"/(.*{chr(97 + i)}.{{{i}}})*/" for i in range(up_to(1 + MOST_OPERATORS, share)))
    return "start: T\nT: " + " & ".join(terms)


def evil(draw: random.Random, share: float) -> Fields:
    kind, value = draw.choice(EVILS)
    return {f"guided_{kind}": value}


def message(content: object, role: str = "user") -> Fields:
    return {"role": role, "content": content}


def parts(draw: random.Random, share: float) -> Fields:
    piece = text(draw, up_to(900, share))
    return {"messages": [message([{"type": "text", "text": piece}] * up_to(4096, share))]}


def calls(draw: random.Random, share: float) -> Fields:
    arguments = json.dumps({"a": text(draw, 200), "b": [1] * up_to(40, share)})
    one = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [one] * up_to(1024, share)}
    return {"messages": [message("Hi"), said, {"role": "tool", "tool_call_id": "a", "content": "b"}]}


def several(draw: random.Random, share: float) -> list[list[int]]:
    return [ids(draw, up_to(200, share)) for _ in range(up_to(1024, share))]


BASES: Final[Mapping[str, tuple[str, Draw]]] = {
    "a short chat": (CHAT, lambda d, s: {"messages": [message("Hi")]}),
    "a chat of one long text": (CHAT, lambda d, s: {"messages": [message(text(d, up_to(4_000_000, s)))]}),
    "a chat of the most messages": (
        CHAT,
        lambda d, s: {"messages": [message(text(d, 900), d.choice(("user", "assistant")))] * up_to(4096, s)},
    ),
    "a chat of the most parts": (CHAT, parts),
    "a chat of the most tool calls": (CHAT, calls),
    "a short prompt": (COMPLETIONS, lambda d, s: {"prompt": "Hi"}),
    "a long prompt": (COMPLETIONS, lambda d, s: {"prompt": text(d, up_to(4_000_000, s))}),
    "a prompt of the most tokens": (COMPLETIONS, lambda d, s: {"prompt": ids(d, up_to(262_000, s))}),
    "a prompt that fills the context": (COMPLETIONS, lambda d, s: {"prompt": ids(d, up_to(4000, s))}),
    "a long prompt that is cut": (
        COMPLETIONS,
        lambda d, s: {"prompt": text(d, up_to(4_000_000, s)), "truncate_prompt_tokens": 5},
    ),
    "the most prompts": (COMPLETIONS, lambda d, s: {"prompt": [text(d, 300)] * up_to(1024, s)}),
    "the most lists of tokens": (COMPLETIONS, lambda d, s: {"prompt": several(d, s)}),
    "SGLang's text": (GENERATE, lambda d, s: {"text": text(d, up_to(4_000_000, s))}),
    "SGLang's tokens": (GENERATE, lambda d, s: {"input_ids": ids(d, up_to(3000, s))}),
    "SGLang's lists of tokens": (GENERATE, lambda d, s: {"input_ids": several(d, s)}),
    "a text to tokenize": (
        TOKENIZE,
        lambda d, s: {"prompt": text(d, up_to(1_000_000, s)), "return_token_strs": d.random() < 0.5},
    ),
    "the most texts to tokenize": (TOKENIZE, lambda d, s: {"prompt": [text(d, 250)] * up_to(1024, s)}),
    "messages to tokenize": (TOKENIZE, parts),
    "tokens to detokenize": (DETOKENIZE, lambda d, s: {"tokens": ids(d, up_to(262_000, s))}),
    "the most lists to detokenize": (DETOKENIZE, lambda d, s: {"tokens": several(d, s)}),
}
EXTRAS: Final[Mapping[str, Draw]] = {
    "the longest stops": lambda d, s: {"stop": [text(d, up_to(1000, s)) for _ in range(16)]},
    "stops that nearly match": lambda d, s: {
        "stop": ["a" * (up_to(900, s) - i) + "b" + "a" * up_to(100, s) for i in range(16)],
        "guided_regex": "a{2000}",
        "max_tokens": up_to(1500, s),
    },
    "output that is no text": lambda d, s: {"allowed_token_ids": [128, 188], "max_tokens": up_to(1500, s)},
    "the most biases": lambda d, s: {"logit_bias": {f"{i}": 1 for i in range(up_to(1024, s))}},
    "biases of the vocabulary": lambda d, s: {"logit_bias": {f"{i}": -1 for i in range(up_to(250, s))}},
    "the most allowed tokens": lambda d, s: {"allowed_token_ids": ids(d, up_to(16_384, s))},
    "the most stop tokens": lambda d, s: {"stop_token_ids": ids(d, up_to(256, s))},
    "the most bad words": lambda d, s: {"bad_words": [f"{i}{text(d, up_to(1000, s))}" for i in range(256)]},
    "the most metadata": lambda d, s: {"metadata": {f"k{i}": "x" * 40 for i in range(up_to(1024, s))}},
    "a long user": lambda d, s: {"user": text(d, up_to(10_000, s))},
    "the most answers": lambda d, s: {"n": up_to(128, s)},
    "scored prompts": lambda d, s: {"n": up_to(64, s), "prompt_logprobs": 20},
    "echoes with scores": lambda d, s: {"n": up_to(64, s), "echo": True, "logprobs": 5},
    "scored answers": lambda d, s: {"n": up_to(64, s), "logprobs": True, "top_logprobs": 20, "max_tokens": 16},
    "ids that are sent back": lambda d, s: {"n": up_to(64, s), "return_token_ids": True},
    "a schema": lambda d, s: {"guided_json": schema(d, s)},
    "a constraint that means harm": evil,
    "an intersection": lambda d, s: {"guided_grammar": intersected(d, s)},
    "the most choices": lambda d, s: {"guided_choice": [f"{i}{text(d, 100)}" for i in range(up_to(4096, s))]},
    "a pattern of all alphabets": lambda d, s: {"guided_regex": r"^[\p{L}\p{N} .'-]{1,50}$"},
    "the most tools": lambda d, s: {
        "tools": [
            {"type": "function", "function": {"name": f"f{i}", "parameters": schema(d, s / 50)}}
            for i in range(up_to(1024, s))
        ]
    },
    "variables of the template": lambda d, s: {"chat_template_kwargs": {"x": [[]] * up_to(49_000, s)}},
    "unknown fields": lambda d, s: {f"unknown {i}": i for i in range(up_to(40_000, s))},
    "a key to repeat it by": lambda d, s: {"Idempotency-Key": text(d, 1).encode().hex() + "k" * up_to(200, s)},
}
ONLY: Final[Mapping[str, str]] = {
    "echoes with scores": COMPLETIONS,
    "scored answers": CHAT,
    "the most tools": CHAT,
    "variables of the template": CHAT,
}
"""Extras of one endpoint."""
SGLANG: Final = {"max_tokens": "max_new_tokens", "guided_json": "json_schema", "guided_regex": "regex"}
"""Names of fields in `sampling_params`."""
KEY: Final = "Idempotency-Key"


def body(draw: random.Random, base: str, *extras: str, share: float = 1.0) -> Drawn:
    """Return the body of *base* with *extras*."""
    while True:
        path, prompt = BASES[base]
        fields = prompt(draw, share)
        if path not in (TOKENIZE, DETOKENIZE):
            fields |= {"max_tokens": 1, "temperature": 0, "stream": draw.random() < 0.5}
        for extra in extras:
            fields |= EXTRAS[extra](draw, share)
        headers = {KEY: fields.pop(KEY)} if KEY in fields else {}
        if path == GENERATE:
            fields = _as_sglang(fields, draw)
        content = json.dumps(fields, ensure_ascii=draw.random() < 0.2).encode()
        if len(content) <= MOST_BYTES:
            return Drawn(" + ".join((base, *extras)), path, content, headers)
        share *= MOST_BYTES / len(content) * 0.95


def _as_sglang(fields: Fields, draw: random.Random) -> Fields:
    beside = ("text", "input_ids", "stream", "user", "metadata")
    own: Fields = {name: fields.pop(name) for name in beside if name in fields}
    if fields.pop("prompt_logprobs", None):
        own |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20}
    return own | {"sampling_params": {SGLANG.get(name, name): value for name, value in fields.items()}}


def any_body(draw: random.Random, share: float = 1.0) -> Drawn:
    """Draw a body of any kind."""
    base = draw.choice([*BASES])
    path, _ = BASES[base]
    fitting = [name for name in EXTRAS if ONLY.get(name, path) == path]
    num = 0 if path in (TOKENIZE, DETOKENIZE) else draw.choice((0, 1, 1, 2, 3))
    return body(draw, base, *draw.sample(fitting, num), share=share)


def _alone() -> tuple[tuple[str, ...], ...]:
    full = ("scored prompts", "echoes with scores", "ids that are sent back", "the most answers")
    found: list[tuple[str, ...]] = [(base,) for base in BASES]
    for name in EXTRAS:
        short = "a short chat" if ONLY.get(name) == CHAT else "a short prompt"
        found.append(("a prompt that fills the context" if name in full else short, name))
    return (*found, ("SGLang's tokens", "scored prompts"))


ALONE: Final = _alone()
"""Each base, and each extra with a prompt that is large enough for it to count: arguments of `body`."""


EVILS: Final[Sequence[tuple[Literal["json", "regex", "grammar"], Any]]] = (
    ("regex", "((a{100}){100}){100}"),
    ("regex", "(a?){500}a{500}"),
    ("grammar", "start: " + " | ".join(f'"{number:05d}"' for number in range(5000))),
    ("json", {"anyOf": [{"properties": {f"k{i}": {"type": "string"} for i in range(j)}} for j in range(60)]}),
    ("grammar", "start: T\nT: /.{0,300}/ & /(.*a.{8}b.*)/ & ~/(.*c.{9}d.*)/ & /.*(e.{10}f).*/"),
    ("regex", "(a|b|c){1000,5000}[^d]*e{500}"),
    ("regex", "(.*a){20}.*b"),
    ("regex", r"((.*)(.*)(.*)(.*)[0-9]){30}"),
    ("regex", r"(.*a.{18}){3}"),
    ("regex", r"(\p{L}{1,50}){50}"),
    ("grammar", 'start: a a a a a a a a\na: "x" | a a | ""'),
    ("grammar", 'start: start start | "a" | ""'),
    ("grammar", 'start: "(" start? ")"'),
    ("grammar", "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(30)), 'r30: "a"'])),
    ("grammar", "\n".join(["start: r0", *(f"r{i}: r{i + 1} | r{i + 1} r{i + 1}" for i in range(20)), 'r20: "a"'])),
    ("grammar", "start: T\nT: /(.|\\n)*/ & ~/(.|\\n)*(a|b).{30}c(.|\\n)*/"),
    ("json", {"type": "string", "pattern": "^(a|aa|aaa|.*b.*c.*d.*e.*f){1,40}$", "minLength": 500, "maxLength": 1000}),
    ("json", {"type": "string", "minLength": 50000, "maxLength": 100000}),
    ("json", {"type": "number", "multipleOf": 0.0001, "minimum": 0.1234567, "maximum": 99999.87654}),
    ("json", {"type": "array", "minItems": 2000, "maxItems": 5000, "items": {"type": "integer", "minimum": -(10**8)}}),
)
REFUSED_AS: Final = ("grammar_too_complex", "unsupported_schema", "invalid_grammar")
"""The codes of errors that one of them may get, with HTTP 400."""
