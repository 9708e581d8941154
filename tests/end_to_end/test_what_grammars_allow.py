"""Whatever the grammar of an answer allows, the web process reads as calls and content that are as asked for.

The answers are random walks through the grammars, with the tokenizers of all families and no model.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.dialects import make_tokenizer
from support.selection import by_night
from tokenizers import Tokenizer

from pipeline.events import Calls, Markup, SamplingParams, Submitted, Templating
from pipeline.grammars import parser_limits
from pipeline.sampling import Constraint
from stages.detokenize.text import IncrementalText
from stages.detokenize.worker import load_decoder
from stages.generate.loop.grammars import _Spelled
from stages.tokenize.constraints.answers import answer_grammar
from stages.tokenize.prompts import PromptEncoder
from web.wire.markup.reader import Reader, reader_for, tools_of

pytestmark = pytest.mark.slow

NUM_WALKS: Final = by_night(4, 100)
MOST_TOKENS: Final = 400
QWEN: Final = ("qwen3", "qwq", "hermes", "qwen3_coder")
OTHERS: Final = ("lfm2", "minicpm", "glm", "kimi_k2", "deepseek_v3", "deepseek_v31", "apertus", "harmony")
TEMPLATES: Final = (*QWEN, "mistral_list", "mistral_names", "pythonic", "llama3_json", *OTHERS)
NUMBER: Final = {
    "type": "object",
    "properties": {"n": {"type": "boolean"}},
    "required": ["n"],
    "additionalProperties": False,
}
SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "look": {
        "type": "object",
        "properties": {"at": {"type": "string", "maxLength": 20}, "times": {"$ref": "#/$defs/count"}},
        "required": ["at", "times"],
        "additionalProperties": False,
        "$defs": {"count": {"enum": [1, 2, 30]}},
    },
    "wait": {
        "type": "object",
        "properties": {
            "text": {"type": "string", "minLength": 1, "maxLength": 5},
            "kind": {"enum": ["a b", 3, None, True]},
            "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        },
        "required": ["kind"],
        "additionalProperties": False,
    },
}
TOOLS: Final = tuple(
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
)
MARKERS: Final = (
    "</think>",
    "[/THINK]",
    "<tool_call>",
    "[TOOL_CALLS]",
    "<|im_end|>",
    "<|end|>",
    "<|message|>",
    "<|thought_end|>",
)
"""Random walks hardly ever come to these tokens, so they are chosen more often."""


class Family:
    """A tokenizer, and what every stage makes of it."""

    def __init__(self, folder: Path, template: str) -> None:
        make_tokenizer(folder, template)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.encoder, self.decoder = PromptEncoder(folder), load_decoder(folder)
        self.eos = tokenizer.encode("<|im_end|>", add_special_tokens=False).ids[0]
        self.markers = {tokenizer.encode(text, add_special_tokens=False).ids[0] for text in MARKERS}
        spelled = _Spelled.of(folder, self.eos, tokenizer.get_vocab_size())
        self.vocabulary = LLTokenizer(spelled, None, [self.eos])  # type: ignore[arg-type]

    def walk(self, grammar: str, draw: random.Random) -> list[int]:
        """Return the tokens of a random answer; empty if it does not come to its end."""
        matcher = LLMatcher(self.vocabulary, grammar, log_level=0, limits=parser_limits())
        token_ids: list[int] = []
        while len(token_ids) < MOST_TOKENS:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, bitorder="little").nonzero()[0].tolist()
            marked = [token for token in allowed if token in self.markers]
            token = draw.choice(marked if marked and draw.random() < 0.3 else allowed)
            if token == self.eos:
                return token_ids
            assert matcher.consume_token(token), matcher.get_error()
            token_ids.append(token)
        return []

    def read(self, event: Submitted, markup: Markup, token_ids: Sequence[int]) -> tuple[Reader | None, str, list[Any]]:
        """Return the reader of an answer, its content, and its calls."""
        decode = self.decoder.keeping(markup.tokens) if markup.tokens else self.decoder.plain
        text = IncrementalText(decode, (1, 2, 3))
        portions = [*((text.push(token), 1) for token in token_ids), (text.flush(), 0)]
        reader = reader_for(markup, event, lambda: tools_of(event.templating.tools))
        if reader is None:
            return None, "".join(portion for portion, _ in portions), []
        pieces = [piece for portion, count in portions for piece in reader.take(portion, count)]
        pieces += reader.finish()
        calls: dict[int, list[str]] = {}
        for piece in pieces:
            if piece.kind == "call":
                calls[piece.call] = [piece.text, ""]
            elif piece.kind == "arguments":
                calls[piece.call][1] += piece.text
        content = "".join(piece.text for piece in pieces if piece.kind == "content")
        return reader, content, [(name, json.loads(written)) for name, written in calls.values()]


def request(**more: Any) -> Submitted:
    schema = more.pop("schema", None)
    constraint = None if schema is None else Constraint(kind="json", text=json.dumps(schema), param="response_format")
    calls = more.pop("calls", None)
    return Submitted(
        endpoint="e",
        frontend="f",
        messages=({"role": "user", "content": "Where?"},),
        sampling=SamplingParams(),
        calls=calls,
        templating=Templating(tools=copy.deepcopy(TOOLS) if calls else ()),
        constraint=constraint,
        **more,
    )


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("family"), request.param)


@pytest.mark.parametrize(
    ("asked", "least_calls"),
    [
        (request(calls=Calls(choice="required")), 1),
        (request(calls=Calls(choice="required", parallel=False)), 1),
        (request(calls=Calls()), 0),
        (request(schema=NUMBER, thinking_budget=6), 0),
    ],
    ids=["required", "one", "strict", "schema"],
)
def test_what_a_grammar_allows_is_read_as_it_was_asked_for(family: Family, asked: Submitted, least_calls: int) -> None:
    rendered = family.encoder.render(asked)
    assert rendered.asked is not None
    grammar = answer_grammar(rendered.asked, family.encoder.dialect)
    num_ended = 0
    for seed in range(NUM_WALKS):
        token_ids = family.walk(grammar, random.Random(seed))
        if not token_ids:
            continue
        num_ended += 1
        reader, content, calls = family.read(asked, rendered.markup, token_ids)
        assert len(calls) >= least_calls and (not least_calls or not content.strip()), content
        for name, values in calls:
            jsonschema.validate(values, SCHEMAS[name], cls=jsonschema.Draft202012Validator)
        if asked.calls is not None and not asked.calls.parallel:
            assert len(calls) == 1
        if asked.constraint is not None:
            jsonschema.validate(json.loads(content), NUMBER)
            assert reader is None or reader.reasoning_tokens <= 6
    assert num_ended >= NUM_WALKS // 2
