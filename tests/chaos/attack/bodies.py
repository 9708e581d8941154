"""What attackers send: requests as bytes, by the name under which their answers are counted. Sends nothing.

Where one is larger than a limit, another one is as large as the limit allows: it must do no harm either.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

from chaos.attack.wire import CHAT, COMPLETIONS, request

Requests = Mapping[str, Sequence[bytes]]
LARGEST_BODY: Final = 4 << 20
LETTER_A: Final = 64
"""The token of `a` in the model NONSENSE."""
NO_CHARACTER: Final = 187
"""The token of the byte 0xFF, which no text in UTF-8 has."""
LONG: Final = 3800
"""Tokens of a long answer. The context has 4,096."""
STORY_TOKENS: Final = 2000
SAY_HI: Final = b'{"messages":[{"role":"user","content":"Hi"}],'
TEXT: Final = b"all work, and no [play] "


def chat(**fields: object) -> bytes:
    """Return a chat with these fields."""
    return request(CHAT, _json({"messages": [{"role": "user", "content": "Hi"}], **fields}))


def giant_bodies() -> Requests:
    """Most of them have the largest body, or one byte more."""
    message, prompt = b'{"role":"user","content":"%s"},', b'"' + TEXT * 400 + b'",'

    def giant(before: bytes, unit: bytes, after: bytes, most: int = LARGEST_BODY) -> bytes:
        return request(CHAT, filled(before, unit, after, most))

    return {
        "wrong bodies": [
            giant(b'{"max_tokens":1,"messages":[', b"1,", b"1]}"),
            giant(b'{"messages":[', b'{"role":"user","content":""},', b"1]}"),
            giant(SAY_HI + b'"x":[', b"[],", b"1]}"),
            giant(SAY_HI + b'"x":', b"1", b"}"),
            giant(b"", b"[", b""),
            giant(b'{"messages":[{"role":"user","content":"', TEXT, b'"}]}', LARGEST_BODY + 100),
        ],
        "legal bodies": [
            giant(b'{"max_tokens":1,"messages":[', message % (b"a" * 900), message[:-1] % b"a" + b"]}", 3_800_000),
            giant(SAY_HI + b'"max_tokens":1,"x":[', b"1.25e-17,", b"1]}", 2_000_000),
            giant(b'{"max_tokens":1,"messages":[{"role":"user","content":"', TEXT, b'"}]}'),
            giant(b'{"max_tokens":1,"messages":[{"role":"user","content":"', b"\\n", b'"}]}'),
        ],
        "lists of prompts": [
            request(COMPLETIONS, filled(b'{"max_tokens":1,"prompt":[', prompt, b'"a"]}', 1_000_000)),
            request(COMPLETIONS, filled(b'{"max_tokens":8,"prompt":[', b'"Count.",', b'"a"]}', 600)),
            request(COMPLETIONS, b'{"n":4,"max_tokens":1,"prompt":"' + TEXT * 40_000 + b'"}'),
        ],
        "tokenizes": [
            request("/tokenize", filled(b'{"prompt":"', TEXT, b'"}')),
            request("/tokenize", filled(b'{"prompt":"', b"a", b'"}')),
            request("/tokenize", filled(b'{"prompt":"', "中".encode(), b'"}')),
            request("/tokenize", filled(b'{"return_token_strs":true,"prompt":"', TEXT, b'"}', 200_000)),
        ],
    }


def stops() -> Requests:
    """Stop strings that an answer of one letter almost matches, and an answer whose tokens are no characters."""

    def almost(longest: int, others: int) -> bytes:
        """All of the answer is held back by the first stop string. Each beginning of the others is compared with it."""
        texts = [
            "a" * (longest - 1) + "b",
            *("ab" + "a" * (others - 3) + letter for letter in string.ascii_letters[:15]),
        ]
        return chat(max_tokens=LONG, ignore_eos=True, logit_bias={str(LETTER_A): 100}, stop=texts)

    return {
        "stops of 1,800 characters": [almost(1_800, 30_600)],
        "stops of 3,900 characters": [almost(3_900, 3_900)],
        "stops of 1,024 characters": [almost(1_024, 1_024)],
        "answers without a character": [
            chat(max_tokens=LONG, ignore_eos=True, logit_bias={str(NO_CHARACTER): 100}, stop=["b", "c" * 1_024])
        ],
    }


def scores() -> Requests:
    """Prompts whose every token comes back with its alternatives, many times."""
    few, many = [5] * 1_500, [5] * 3_000

    def prompt(**fields: object) -> bytes:
        return request(COMPLETIONS, _json({"max_tokens": 1, **fields}))

    return {
        "prompt_logprobs of 3,840,000 pairs": [prompt(prompt=many, prompt_logprobs=20, n=64)],
        "prompt_logprobs of 900,000 pairs": [
            prompt(prompt=many, prompt_logprobs=20, n=15),
            prompt(prompt="a " * 1_500, prompt_logprobs=20, n=15),
            prompt(prompt=[few] * 30, prompt_logprobs=20),
        ],
        "echo of 900,000 pairs": [prompt(prompt=many, echo=True, logprobs=20, n=15)],
        "logprob_start_len of 900,000 pairs": [
            request(
                "/generate",
                _json(
                    {
                        "input_ids": [many] * 15,
                        "sampling_params": {"max_new_tokens": 1},
                        "return_logprob": True,
                        "logprob_start_len": 0,
                        "top_logprobs_num": 20,
                    }
                ),
            )
        ],
    }


def grammars() -> Requests:
    """Grammars that take long to compile, or to follow."""

    def grammar(text: str) -> bytes:
        return chat(max_tokens=16, guided_grammar=text)

    def pattern(text: str) -> bytes:
        return chat(max_tokens=200, guided_regex=text)

    letters = "".join(f"(.*{letter})?" for letter in string.ascii_lowercase)
    return {
        "60 terminals": [grammar(terminals(range(60))), grammar(terminals(range(60), "a"))],
        "40 terminals": [grammar(terminals(range(40), "a"))],
        "few terminals": [
            *(grammar(terminals(range(number), "a")) for number in (4, 8, 12)),
            *(grammar(terminals(range(number)[::-1])) for number in (4, 8, 12)),
            grammar("start: A\nA: ~/.*a.{12}b.*/ & /[a-z ]{1,200}/\n"),
        ],
        "patterns": [
            pattern("(.*a.{14})+"),
            pattern(f"({letters}){{1,40}}"),
            pattern("((a{0,99}){0,99}){0,99}b"),
            pattern(r"(\p{L}{1,200} ){1,200}"),
        ],
    }


def terminals(places: Sequence[int], letters: str = string.ascii_lowercase) -> str:
    """Return a grammar of intersected terminals: each wants a letter so many places before the end."""
    parts = (f"/.*{letters[place % len(letters)]}.{{{place}}}/" for place in places)
    return f"start: A\nA: {' & '.join(parts)}\n"


def schemas() -> Requests:
    """Tools with schemas whose properties share a large part."""

    def tool(num_properties: int, description: int) -> bytes:
        parameters = {
            "type": "object",
            "properties": {f"p{number}": {"$ref": "#/$defs/d"} for number in range(num_properties)},
            "$defs": {"d": {"type": "string", "description": "d" * description}},
        }
        function = {"name": "f", "strict": True, "parameters": parameters}
        return chat(max_tokens=16, tool_choice="required", tools=[{"type": "function", "function": function}])

    return {
        "2,000 properties of 200 KB": [tool(2_000, 200_000)],
        "properties of 4 MB": [tool(2_000, 4_000_000), tool(20, 4_000_000)],
        "small schemas": [tool(300, 1_000), tool(20, 200_000)],
    }


def labels() -> Requests:
    """Labels, which the log keeps for the retention."""

    def labelled(**fields: object) -> bytes:
        return chat(max_tokens=1, **fields)

    return {
        "labels of 4 MiB": [
            labelled(user="u" * (LARGEST_BODY - 200)),
            labelled(metadata={"k": "m" * (LARGEST_BODY - 200)}),
        ],
        "labels of 64 KB": [labelled(user="u" * 65_000), labelled(metadata={"k": "m" * 64_000})],
    }


def story() -> bytes:
    """Return a request whose history is long."""
    return chat(max_tokens=STORY_TOKENS, ignore_eos=True, logprobs=True, top_logprobs=20)


def filled(before: bytes, unit: bytes, after: bytes, most: int = LARGEST_BODY) -> bytes:
    """Return a body of at most *most* bytes."""
    return before + unit * ((most - len(before) - len(after)) // len(unit)) + after


def _json(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()
