"""One grammar of thinking, tool calls and a constraint: what it accepts, and what is refused and how."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from llguidance import LLMatcher, LLTokenizer
from support.calls import noted
from support.dialects import make_tokenizer
from support.selection import rest_at_night
from tokenizers import Tokenizer

from pipeline.errors import RequestError
from pipeline.events import Calls, SamplingParams, Submitted, Templating
from pipeline.grammars import parser_limits, with_stack
from pipeline.sampling import Constraint
from pipeline.vocabulary import AddedTokens
from stages.generate.loop.grammars import _Spelled
from stages.tokenize.constraints import calls as call_writer
from stages.tokenize.constraints.answers import answer_grammar
from stages.tokenize.constraints.grammars import LARGEST_GRAMMAR_BYTES, TOO_LARGE
from stages.tokenize.constraints.literals import Rules
from stages.tokenize.markup import Dialect
from stages.tokenize.prompts import PromptEncoder

LOOK: Final = {
    "type": "object",
    "properties": {
        "at": {"type": "string", "maxLength": 20},
        "times": {"$ref": "#/$defs/count"},
        "deep": {"type": "boolean"},
    },
    "required": ["at", "times"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer"}},
}
NUMBER: Final = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
CALLED: Final = "<|channel|>commentary to=functions."
FINAL: Final = "<|channel|>final<|message|>"
FORMATS: Final = {
    "hermes": ("", '<tool_call>\n{"name": "NAME", "arguments": JSON}\n</tool_call>', "\n", ""),
    "qwen3_coder": ("", "<tool_call>\n<function=NAME>\nPARAMETERS</function>\n</tool_call>", "\n", ""),
    "llama3_json": ("", '{"name": "NAME", "parameters": JSON}', "; ", ""),
    "mistral_list": ("[TOOL_CALLS] [", '{"name": "NAME", "arguments": JSON}', ", ", "]"),
    "mistral_names": ("", "[TOOL_CALLS]NAME[ARGS]JSON", "", ""),
    "pythonic": ("[", "NAME(PYTHON)", ", ", "]"),
    "lfm2": ("<|tool_call_start|>[", "NAME(PYTHON)", ", ", "]<|tool_call_end|>"),
    "minicpm": ("<|tool_call_start|>\n```python\n", "NAME(PYTHON)", "\n", "\n```\n<|tool_call_end|>"),
    "glm": ("", "<tool_call>NAME\nKEYS</tool_call>", "\n", ""),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>JSON<|tool_call_end|>",
        "",
        "<|tool_calls_section_end|>",
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "apertus": ("<|tools_prefix|>[", '{"NAME": JSON}', ", ", "]<|tools_suffix|>"),
}
"""What comes before all calls of a family, how it writes a call, what is between two, and what comes after them."""
TEMPLATES: Final = tuple(FORMATS)
MARKED: Final = ("lfm2", "minicpm", "glm", "kimi_k2", "deepseek_v3", "deepseek_v31", "apertus")


def call_of(pattern: str, name: str, arguments: dict[str, Any]) -> str:
    tags = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    for word, text in {
        "NAME": name,
        "JSON": json.dumps(arguments),
        "PYTHON": ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items()),
        "PARAMETERS": "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in tags.items()),
        "KEYS": "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in tags.items()),
    }.items():
        pattern = pattern.replace(word, text)
    return pattern


def calls_of(*calls: tuple[str, dict[str, Any]]) -> dict[str, str]:
    """Return template -> how it writes these calls."""
    return {
        template: begin + between.join(call_of(pattern, *each) for each in calls) + end
        for template, (begin, pattern, between, end) in FORMATS.items()
    }


SEE, WAIT = ("look", {"at": "sea", "times": 2}), ("wait", dict[str, Any]())
LOOKS, WAITS, BOTH = calls_of(SEE), calls_of(WAIT), calls_of(SEE, WAIT)


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    described = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **described, **more}}


TOOLS: Final = (tool("look", LOOK), tool("wait"))


class Family:
    """A tokenizer of a family, and a matcher for its grammars."""

    def __init__(self, folder: Path, template: str, *, added: bool = True) -> None:
        make_tokenizer(folder, template, added=added)
        self.encoder = PromptEncoder(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.eos = int(self.tokenizer.token_to_id("<|im_end|>") or 0)
        spelled = _Spelled.of(folder, self.eos, self.tokenizer.get_vocab_size())
        self._vocabulary = LLTokenizer(spelled, None, [self.eos])  # type: ignore[arg-type]

    def grammar(self, **asked: Any) -> str:
        wanted = self.encoder.render(request(**asked)).asked
        return "" if wanted is None else with_stack(lambda: answer_grammar(wanted, self.encoder.dialect))

    def matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=parser_limits())
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def letters(self, text: str) -> list[int]:
        """Return the tokens of a text whose markers are spelled letter by letter."""
        return [token for letter in text for token in self.ids(letter)]

    def takes(self, grammar: str, text: str | Sequence[int]) -> bool:
        """Return whether *text* is a whole answer, going token by token as an engine does."""
        matcher = self.matcher(grammar)
        for token in self.ids(text) if isinstance(text, str) else text:
            bits = matcher.compute_bitmask()
            if not bits[token // 8] >> token % 8 & 1:
                return False
            assert matcher.consume_token(token), matcher.get_error()
        return matcher.is_accepting()

    def wrong(self, grammar: str, *texts: str | Sequence[int], good: bool) -> list[str | Sequence[int]]:
        """Return the texts that it takes although they are not *good*, or the other way round."""
        return [text for text in texts if self.takes(grammar, text) is not good]


def request(
    *, tools: Sequence[dict[str, Any]] = (), calls: Calls | None = None, schema: Any = None, **more: Any
) -> Submitted:
    constraint = None if schema is None else Constraint(kind="json", text=json.dumps(schema), param="response_format")
    variables = more.pop("variables", {})
    return Submitted(
        endpoint="e",
        frontend="f",
        messages=({"role": "user", "content": "Where?"},),
        sampling=SamplingParams(),
        calls=calls,
        templating=Templating(tools=tuple(tools), variables=variables),
        **{"constraint": constraint} | more,
    )


GetFamily = Callable[..., Family]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> GetFamily:
    @functools.cache
    def made(template: str, *, added: bool = True) -> Family:
        return Family(tmp_path_factory.mktemp(template), template, added=added)

    return made


def refused(work: Callable[[], object]) -> tuple[str, str, str]:
    with pytest.raises(RequestError) as raised:
        work()
    return raised.value.code or "", raised.value.param or "", raised.value.message


# tool calls


@pytest.mark.parametrize("added", rest_at_night([True, False]), ids=["tokens", "texts"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_required_calls_are_of_the_tools_and_their_schemas(family: GetFamily, template: str, added: bool) -> None:
    model, look, wait, both = family(template, added=added), LOOKS[template], WAITS[template], BOTH[template]
    several = model.grammar(tools=TOOLS, calls=Calls(choice="required"))
    bad = ("", "so", f"so {look}", look[:-1], look.replace("look", "hook"), look.replace("2", '"2"'))
    assert model.wrong(several, look, wait, both, good=True) == []
    assert model.wrong(several, *bad, f"{look} so", look.replace("sea", "a long way to the sea"), good=False) == []
    spaced = (look.replace(", ", " , "), look.replace('": ', '":\n'))
    assert (
        template in ("pythonic", "qwen3_coder", "lfm2", "minicpm", "glm")
        or model.wrong(several, *spaced, good=False) == []
    )
    one = model.grammar(tools=TOOLS, calls=Calls(choice="required", parallel=False))
    assert model.wrong(one, look, wait, good=True) == model.wrong(one, both, good=False) == []
    named = model.grammar(tools=TOOLS, calls=Calls(choice="required", names=("wait",)))
    assert model.wrong(named, wait, good=True) == model.wrong(named, look, both, good=False) == []


@pytest.mark.parametrize("added", [True, False], ids=["tokens", "texts"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_with_strict_functions_text_is_free_until_a_call_begins(family: GetFamily, template: str, added: bool) -> None:
    model, look, wait = family(template, added=added), LOOKS[template], WAITS[template]
    grammar = model.grammar(tools=(tool("look", LOOK, strict=True), tool("wait")), calls=Calls())
    assert model.wrong(grammar, "", "It is there.", "a < b\n\n{", look, wait, BOTH[template], good=True) == []
    assert model.wrong(grammar, look.replace("2", '"2"'), look.replace("look", "hook"), good=False) == []
    free = wait.replace("{}", '{"any": [1]}').replace("()", "(any=[1, True])")
    free = free.replace("=wait>\n", "=wait>\n<parameter=any>\n[1]\n</parameter>\n")
    free = free.replace(">wait\n<", ">wait\n<arg_key>any</arg_key>\n<arg_value>[1]</arg_value>\n<")
    assert free != wait and model.takes(grammar, free)
    if template not in ("llama3_json", "pythonic"):
        assert model.wrong(grammar, f"I look. {look}", f"{wait}\nI wait.", good=True) == []
        assert not model.takes(grammar, f"I look. {look.replace('2', 'null')}")
        assert not model.takes(grammar, model.letters(look.replace("look", "hook")))
    if tag := {"llama3_json": "<|python_tag|>", "pythonic": "<|python_start|>"}.get(template):
        assert not model.takes(grammar, model.letters(f"So {tag}{look.replace('look', 'hook')}"))
    if template == "qwen3_coder":
        assert not model.takes(grammar, look.replace("look", "hook").replace("<tool_call>\n", ""))


@pytest.mark.parametrize("template", TEMPLATES)
def test_under_auto_the_tools_can_be_fewer_and_the_calls_one(family: GetFamily, template: str) -> None:
    model, look, wait = family(template), LOOKS[template], WAITS[template]
    few = model.grammar(tools=TOOLS, calls=Calls(names=("wait",)))
    assert model.wrong(few, "", "no", wait, good=True) == model.wrong(few, look, good=False) == []
    one = model.grammar(tools=TOOLS, calls=Calls(names=("look", "wait"), parallel=False))
    assert model.wrong(one, "", "no", look, wait, good=True) == model.wrong(one, BOTH[template], good=False) == []
    assert model.grammar(tools=TOOLS, calls=Calls()) == model.grammar(tools=TOOLS, calls=Calls(parallel=False)) == ""
    assert model.grammar(tools=TOOLS, calls=Calls(choice="none", parallel=False)) == ""


def test_a_tool_call_or_an_answer_by_the_schema_is_one_grammar(family: GetFamily) -> None:
    for template in ("hermes", "qwen3_coder", "mistral_list", "mistral_names", *MARKED):
        model = family(template)
        grammar = model.grammar(tools=TOOLS, calls=Calls(), schema=NUMBER)
        assert model.wrong(grammar, '{"n":1}', LOOKS[template], good=True) == []
        assert model.wrong(grammar, "no", '{"n":"1"}', '{"n":1}' + LOOKS[template], good=False) == []
    for template, added in (("llama3_json", True), ("pythonic", True), ("hermes", False)):
        code, param, message = refused(
            functools.partial(family(template, added=added).grammar, tools=TOOLS, calls=Calls(), schema=NUMBER)
        )
        assert (code, param) == ("unsupported_parameter", "response_format") and "tool_choice" in message


def test_a_schema_that_cannot_be_enforced_is_refused_only_where_that_was_asked_for(family: GetFamily) -> None:
    model = family("hermes")
    tools = (tool("wait"), tool("odd", {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}))
    assert model.grammar(tools=tools, calls=Calls()) == ""
    assert model.grammar(tools=tools, calls=Calls(names=("odd",)))
    assert model.grammar(tools=tools, calls=Calls(choice="required", names=("wait",)))
    code, param, message = refused(lambda: model.grammar(tools=tools, calls=Calls(choice="required")))
    assert (code, param) == ("unsupported_schema", "tools.1.function.parameters") and "not" in message
    strict = (tools[0], tool("odd", tools[1]["function"]["parameters"], strict=True))
    assert refused(lambda: model.grammar(tools=strict, calls=Calls()))[1] == "tools.1.function.parameters"
    text = (tool("odd", {"type": "string"}),)
    assert refused(lambda: model.grammar(tools=text, calls=Calls(choice="required")))[0] == "unsupported_schema"
    huge = (tool("odd", {"type": "object", "properties": {"k" * 500 + str(n): {} for n in range(200)}}),)
    assert refused(lambda: model.grammar(tools=huge, calls=Calls(choice="required")))[0] == "unsupported_schema"


def test_tools_that_are_too_large_together_are_refused_before_each_is_checked(
    family: GetFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = noted(monkeypatch, call_writer, "checked")
    schema = {"type": "object", "properties": {"k" * 400 + str(n): {} for n in range(50)}}
    large = [tool(f"f{number}", schema) for number in range(64)]
    told = refused(lambda: family("hermes").grammar(tools=large, calls=Calls(choice="required")))
    assert told[:2] == ("unsupported_schema", "tools") and TOO_LARGE in told[2]
    assert 1 < len(asked) < 8


@pytest.mark.parametrize("template", ["hermes", "qwen3_coder", "pythonic"])
def test_many_tools_with_long_descriptions_can_be_required(family: GetFamily, template: str) -> None:
    told: dict[str, Any] = {"title": "A title", "description": "d" * 200, "default": None}
    schemas: list[dict[str, Any]] = [
        {"type": "string"},
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"enum": ["a", "b"]},
    ]
    properties = {f"parameter_{n}": schemas[n % 3] | told for n in range(4)}
    parameters = {"type": "object", "description": "e" * 200, "properties": properties, "required": ["parameter_0"]}
    tools = [tool(f"tool_{number}", parameters, strict=True) for number in range(80)]
    assert len(json.dumps(tools)) > LARGEST_GRAMMAR_BYTES
    required = family(template).grammar(tools=tools, calls=Calls(choice="required"))
    assert "tool_79" in required and "ddd" not in required and "eee" not in required
    assert family(template).grammar(tools=tools, calls=Calls())


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"calls": Calls(choice="required")}, "tools"),
        ({"calls": Calls(), "thinking_budget": 4}, "thinking_token_budget"),
        ({"calls": Calls(choice="none"), "thinking_budget": 4}, "thinking_token_budget"),
        ({"calls": Calls(names=("wait",)), "thinking_budget": 4}, "tools"),
        ({"calls": Calls(), "schema": NUMBER}, "response_format"),
    ],
)
def test_the_field_that_asks_for_a_grammar_is_named(family: GetFamily, asked: dict[str, Any], param: str) -> None:
    wanted = family("qwen3").encoder.render(request(tools=TOOLS, **asked)).asked
    assert wanted is not None and wanted.param == param and family("qwen3").grammar(tools=TOOLS, **asked)


def test_calls_that_this_model_cannot_write_cannot_be_required(family: GetFamily) -> None:
    model = family("plain")
    code, param, message = refused(lambda: model.grammar(tools=TOOLS, calls=Calls(choice="required")))
    assert (code, param) == ("unsupported_parameter", "tool_choice") and "--tool-parser" in message
    assert model.grammar(tools=TOOLS, calls=Calls(names=("wait",))) == ""


PATTERN: Final = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a$"}}}


@pytest.mark.parametrize(
    ("template", "parameters", "word"),
    [
        ("qwen3_coder", PATTERN, "pattern"),
        ("pythonic", PATTERN, "pattern"),
        ("pythonic", {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}}, "minimum"),
        ("pythonic", {"type": "object", "properties": {"a b": {}}}, "name in Python"),
        ("qwen3_coder", {"type": "object", "properties": {"a>": {}}}, "tag"),
        ("qwen3_coder", {"type": "object", "properties": {"a": {"type": ["string", "object"]}}}, "beside objects"),
        ("qwen3_coder", {"type": "object", "anyOf": [{"required": ["a"]}]}, "anyOf"),
        ("pythonic", {"type": "object", "properties": {"a": {"$ref": "#/$defs/no"}}}, "does not lead"),
        ("pythonic", {"type": "object", "properties": {}, "required": ["b"]}, "`b`"),
        ("qwen3_coder", {"type": "object", "properties": {"a": 3}}, "no object"),
        ("qwen3_coder", {"type": "object", "properties": {"a": {"type": "string", "maxLength": 1001}}}, "above 1000"),
    ],
)
def test_what_cannot_be_enforced_outside_of_json_is_refused_by_name(
    family: GetFamily, template: str, parameters: Any, word: str
) -> None:
    tools = (tool("f", parameters),)
    code, param, message = refused(lambda: family(template).grammar(tools=tools, calls=Calls(choice="required")))
    assert (code, param) == ("unsupported_schema", "tools.0.function.parameters") and word in message, message


RICH: Final = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 1, "maxLength": 5},
        "kind": {"enum": ["a b", 3, None, True]},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "tree": {"$ref": "#/$defs/tree"},
        "ratio": {"type": "number"},
    },
    "required": ["kind"],
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"v": {"type": "null"}, "next": {"$ref": "#/$defs/tree"}},
            "required": ["v"],
            "additionalProperties": False,
        }
    },
}


def test_pythonic_arguments_are_literals_of_python(family: GetFamily) -> None:
    model = family("pythonic")
    grammar = model.grammar(tools=(tool("f", RICH), tool("g", RICH)), calls=Calls(choice="required"))
    good = (
        '[f(kind="a b")]',
        '[f(kind=3), g(kind=3, tree={"v": None})]',
        "[f(kind=None, maybe=None)]",
        '[f(text="é\\n", kind=True, maybe=-3, list=[True, False], tree={"v": None, "next": {"v": None}}, ratio=0.5)]',
        "[f(kind=3, list=[])]",
    )
    bad = (
        "[f()]",
        "[f(kind=null)]",
        '[f(text="", kind=3)]',
        '[f(text="123456", kind=3)]',
        "[f(kind=3, list=[True, True, True])]",
        '[f(kind=3, tree={"next": {"v": None}})]',
        "[f(kind=3, other=1)]",
        "[f(maybe=1, kind=3)]",
    )
    assert model.wrong(grammar, *good, good=True) == model.wrong(grammar, *bad, good=False) == []


def test_tagged_arguments_are_texts_or_json(family: GetFamily) -> None:
    def call(**values: str) -> str:
        written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
        return f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"

    model = family("qwen3_coder")
    grammar = model.grammar(tools=(tool("f", RICH),), calls=Calls(choice="required"))
    good = (
        call(kind="a b"),
        call(text="a\nb", kind="null", maybe="null", list="[true, false]", tree='{"v": null}', ratio="1.5"),
        call(kind="true", tree='{"v": null, "next": {"v": null}}'),
    )
    bad = (call(), call(kind='"a b"'), call(text="", kind="3"), call(kind="3", list="[1]"), call(kind="3", maybe="x"))
    assert model.wrong(grammar, *good, good=True) == model.wrong(grammar, *bad, call(kind="3", x="1"), good=False) == []


# harmony


def thought(text: str = "So.") -> str:
    return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"


@pytest.fixture
def harmony(family: GetFamily) -> Family:
    return family("harmony")


HARMONY_LOOK: Final = f'{CALLED}look <|constrain|>json<|message|>{{"at": "sea", "times": 2}}'
HARMONY_WAIT: Final = f"{CALLED}wait json<|message|>{{}}"


def test_required_calls_of_harmony_come_directly_or_after_thinking(harmony: Family) -> None:
    grammar = harmony.grammar(tools=TOOLS, calls=Calls(choice="required"))
    good = (HARMONY_LOOK, HARMONY_WAIT, HARMONY_LOOK.replace(" <|constrain|>json", ""), thought() + HARMONY_LOOK)
    bad = (
        "",
        "so",
        HARMONY_LOOK[:-1],
        HARMONY_LOOK.replace("2", '"2"'),
        HARMONY_LOOK.replace(".look", ".hook"),
        f"{FINAL}So.",
        thought() + FINAL,
        HARMONY_WAIT.replace(" json", "json"),
        thought(HARMONY_WAIT) + HARMONY_WAIT,
    )
    assert harmony.wrong(grammar, *good, good=True) == harmony.wrong(grammar, *bad, good=False) == []
    named = harmony.grammar(tools=TOOLS, calls=Calls(choice="required", names=("wait",)))
    assert harmony.wrong(named, HARMONY_WAIT, good=True) == harmony.wrong(named, HARMONY_LOOK, good=False) == []


def test_strict_functions_of_harmony_are_called_after_text_or_there_is_a_final_message(harmony: Family) -> None:
    grammar = harmony.grammar(tools=(tool("look", LOOK, strict=True), tool("wait")), calls=Calls())
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    good = (
        f"{FINAL}It is.",
        thought() + preamble + HARMONY_LOOK,
        preamble + preamble + f"{FINAL}a < b <|end",
        HARMONY_WAIT,
    )
    bad = (
        "It is.",
        preamble,
        thought() + HARMONY_LOOK.replace("2", "null"),
        f"{FINAL}So<|end|><|start|>assistant{HARMONY_LOOK}",
    )
    assert harmony.wrong(grammar, *good, good=True) == harmony.wrong(grammar, *bad, good=False) == []
    assert not harmony.takes(grammar, harmony.ids(FINAL) + harmony.letters(f"<|start|>assistant{HARMONY_WAIT}"))


def test_a_schema_binds_the_final_message_of_harmony_beside_calls_too(harmony: Family) -> None:
    alone = harmony.grammar(schema=NUMBER)
    final = FINAL + '{"n":1}'
    good = (final, thought() + final, final.replace("final<", "final <|constrain|>json<"))
    bad = ('{"n":1}', thought() + FINAL + "{}", final + "<|end|>", HARMONY_WAIT, thought() + thought() + final)
    assert harmony.wrong(alone, *good, good=True) == harmony.wrong(alone, *bad, good=False) == []
    either = harmony.grammar(tools=TOOLS, calls=Calls(), schema=NUMBER)
    assert harmony.wrong(either, *good, HARMONY_WAIT, thought() + HARMONY_WAIT, good=True) == []
    assert harmony.wrong(either, f"{FINAL}So.", thought() + "So.", good=False) == []


@pytest.mark.parametrize(
    ("kind", "text"), [("regex", "yes|no"), ("choice", '["yes", "no"]'), ("grammar", 'start: A | "no"\nA: "y" "es"')]
)
def test_other_constraints_bind_the_final_message_of_harmony_too(harmony: Family, kind: Any, text: str) -> None:
    constraint = Constraint(kind=kind, text=text, param="field")
    for asked in ({}, {"tools": TOOLS, "calls": Calls()}):
        grammar = harmony.grammar(constraint=constraint, **asked)
        assert harmony.wrong(grammar, f"{FINAL}yes", f"{thought()}{FINAL}no", good=True) == []
        assert harmony.wrong(grammar, "yes", f"{FINAL}maybe", f"{FINAL} yes", good=False) == []
        assert harmony.takes(grammar, HARMONY_WAIT) is bool(asked)


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_thinking_of_harmony_has_a_budget_and_calls_stay_allowed(harmony: Family, budget: int) -> None:
    grammar = harmony.grammar(tools=TOOLS, calls=Calls(), thinking_budget=budget)
    begin, letters, end = thought("|||").partition("|||")
    for after in (f"{FINAL}It is.", HARMONY_WAIT.replace("{}", '{"any": 1}')):
        texts = [[*harmony.ids(begin), *harmony.letters("a" * n), *harmony.ids(end + after)] for n in range(1, 6)]
        assert [harmony.takes(grammar, text) for text in texts] == [n <= budget for n in range(1, 6)], letters
        assert harmony.takes(grammar, after)


def test_an_answer_of_harmony_that_has_begun_is_the_constraint_and_has_no_calls(harmony: Family) -> None:
    begun = {"role": "assistant", "content": '{"n":'}
    options = Templating(tools=TOOLS, add_generation_prompt=False, continue_final_message=True)

    def grammar(**asked: Any) -> str:
        event = request(**asked)
        event = event.model_copy(update={"messages": (*event.messages, begun), "templating": options})
        wanted = harmony.encoder.render(event).asked
        assert wanted is not None
        return with_stack(lambda: answer_grammar(wanted, harmony.encoder.dialect))

    assert harmony.takes(grammar(calls=Calls(), schema=NUMBER), '{"n":1}')
    code, param, _ = refused(lambda: grammar(calls=Calls(choice="required")))
    assert (code, param) == ("unsupported_parameter", "tools")


def test_harmony_without_its_tokens_is_read_but_not_enforced(family: GetFamily) -> None:
    model = family("harmony", added=False)
    for asked, param in (({"schema": NUMBER}, "response_format"), ({"thinking_budget": 3}, "thinking_token_budget")):
        code, found, message = refused(functools.partial(model.grammar, **asked))
        assert (code, found) == ("unsupported_parameter", param) and "<|channel|>" in message
    assert model.grammar(tools=TOOLS, calls=Calls()) == ""


# thinking


def think(text: str = "So.", after: str = "\n\n") -> str:
    return f"<think>\n{text}\n</think>{after}"


def test_thinking_comes_before_the_answer_that_is_enforced(family: GetFamily) -> None:
    model = family("qwen3")
    grammar = model.grammar(schema=NUMBER)
    good = ('{"n":1}', think() + '{"n":1}', think("x < y {", "") + '{"n": 1}', think("<tool_call>"[:-1]) + '{"n":1}')
    bad = ("So.", think(), think() + "{}", "<think>" + '{"n":1}', think() + think() + '{"n":1}')
    assert model.wrong(grammar, *good, good=True) == model.wrong(grammar, *bad, good=False) == []
    spelled = [*model.ids("<think>"), *model.letters("So</think>"), *model.ids('</think>{"n":1}')]
    assert not model.takes(grammar, spelled)
    never = model.grammar(schema=NUMBER, variables={"enable_thinking": False})
    assert model.wrong(never, '{"n":1}', good=True) == model.wrong(never, think() + '{"n":1}', good=False) == []


def test_an_answer_that_begins_inside_thinking_ends_it_first(family: GetFamily) -> None:
    model = family("deepseek_r1")
    grammar = model.grammar(schema=NUMBER)
    assert model.wrong(grammar, 'So.</think>\n\n{"n":1}', '</think>{"n":1}', good=True) == []
    assert model.wrong(grammar, '{"n":1}', "So.</think>", "<think>So</think>" + '{"n":1}', good=False) == []


def test_thinking_and_tool_calls_are_one_grammar(family: GetFamily) -> None:
    model, look = family("qwen3"), LOOKS["hermes"]
    must = model.grammar(tools=TOOLS, calls=Calls(choice="required"))
    assert model.wrong(must, look, think() + look, good=True) == []
    assert model.wrong(must, think() + "It is.", think(look) + look, think() + look + "!", good=False) == []
    may = model.grammar(tools=(tool("look", LOOK, strict=True),), calls=Calls())
    assert model.wrong(may, "It is.", think() + "It is.", think() + f"I look: {look}", look, good=True) == []
    assert model.wrong(may, think() + look.replace("2", "null"), look + think(), good=False) == []
    either = model.grammar(tools=TOOLS, calls=Calls(), schema=NUMBER)
    assert model.wrong(either, think() + look, think() + '{"n":1}', good=True) == []
    assert model.wrong(either, think() + "It is.", good=False) == []


@pytest.mark.parametrize("kind", ["regex", "choice", "grammar"])
def test_other_constraints_come_directly_after_thinking(family: GetFamily, kind: Any) -> None:
    model = family("deepseek_r1")
    text = {"regex": "yes|no", "choice": '["yes", "no"]', "grammar": 'start: A | "no"\nA: "y" "es"'}[kind]
    constraint = Constraint(kind=kind, text=text, param="field")
    grammar = model.grammar(constraint=constraint)
    assert model.wrong(grammar, "So.</think>yes", "</think>no", good=True) == []
    assert model.wrong(grammar, "yes", "</think>maybe", "</think>\n\nyes", good=False) == []
    bad = Constraint(kind=kind, text={"regex": "(", "choice": '[""]', "grammar": "start: b"}[kind], param="field")
    if kind != "choice":
        assert refused(lambda: model.grammar(constraint=bad))[:2] == ("invalid_grammar", "field")


def test_one_of_many_texts_comes_after_thinking_or_in_place_of_a_call(family: GetFamily) -> None:
    texts = json.dumps([f"a{number}" for number in range(4096)])
    constraint = Constraint(kind="choice", text=texts, param="field")
    thinks, calls = family("deepseek_r1"), family("hermes")
    thought = thinks.grammar(constraint=constraint)
    assert thinks.wrong(thought, "So.</think>a1", "</think>a4095", good=True) == []
    assert thinks.wrong(thought, "</think>a", "</think>a4096", "</think>a1a1", good=False) == []
    called = calls.grammar(constraint=constraint, tools=TOOLS, calls=Calls())
    assert calls.wrong(called, "a0", "a4095", LOOKS["hermes"], good=True) == []
    assert calls.wrong(called, "a", "a4096", "a0" + LOOKS["hermes"], good=False) == []


@pytest.mark.parametrize("budget", rest_at_night([0, 1, 5, 2, 3, 4, 16], first=3))
@pytest.mark.parametrize("bound", [True, False], ids=["schema", "free"])
def test_thinking_has_as_many_tokens_as_its_budget_and_no_more(family: GetFamily, bound: bool, budget: int) -> None:
    answer = '{"n":1}' if bound else "It is."
    for template in ("qwen3", "deepseek_r1"):
        model = family(template)
        grammar = model.grammar(schema=NUMBER if bound else None, thinking_budget=budget)
        begin, end, rest = (model.ids(text) for text in ("<think>", "</think>", answer))
        begin = [] if template == "deepseek_r1" else begin
        for letters in ("aaaaaaaaaaaaaaaaaaaaaaaaaa", "𝄞𝄞𝄞𝄞𝄞𝄞"):
            thought = model.letters(letters)
            if budget or template == "deepseek_r1":
                counts = [n for n in range(len(thought)) if model.takes(grammar, [*begin, *thought[:n], *end, *rest])]
                assert counts[-1] == budget, counts
        assert model.takes(grammar, [*begin, *end, *rest]) is (budget > 0 or template == "deepseek_r1")
        assert model.takes(grammar, rest) is (template == "qwen3")


def test_an_engine_that_takes_over_counts_the_tokens_of_thinking_that_there_are(family: GetFamily) -> None:
    model = family("deepseek_r1")
    grammar = model.grammar(schema=NUMBER, thinking_budget=9)
    for text in ("abcdef", "a𝄞", "abc</think>", 'abcdef</think>{"n":'):
        ids = model.letters(text) if "</think>" not in text else model.ids(text)
        for place in range(len(ids) + 1):
            one, other = model.matcher(grammar), model.matcher(grammar).deep_copy()
            for token in ids[:place]:
                one.compute_bitmask()
                assert one.consume_token(token)
            assert other.consume_tokens(ids[:place])
            assert one.compute_bitmask() == other.compute_bitmask(), (text, place)


def test_a_budget_leaves_the_answer_free_and_all_its_tokens_allowed(family: GetFamily) -> None:
    model = family("deepseek_r1")
    grammar = model.grammar(thinking_budget=4)
    assert model.wrong(grammar, "</think>", "a</think>It <tool_response> is", "</think>{", good=True) == []
    assert family("plain").grammar(thinking_budget=4) == family("qwen3").grammar() == ""


@pytest.mark.parametrize(
    ("template", "of", "before"),
    [("qwen3", "hermes", "<think>a</think>"), ("mistral_names", "mistral_names", "[THINK]a[/THINK]")],
)
def test_a_budget_leaves_the_model_its_calls(family: GetFamily, template: str, of: str, before: str) -> None:
    model = family(template)
    grammar = model.grammar(tools=TOOLS, calls=Calls(), thinking_budget=4)
    free = LOOKS[of].replace("2", '"2"')
    assert model.wrong(grammar, "It is.", "{", free, f"I look.{free}", before + free, good=True) == []
    assert not model.takes(grammar, before.replace("a", "aaaaaaaa") + free)
    assert family("hermes").grammar(tools=TOOLS, calls=Calls(), thinking_budget=4) == "", "it does not think"


def test_markers_of_thinking_that_are_texts_work_but_are_not_counted(family: GetFamily) -> None:
    model = family("deepseek_r1", added=False)
    grammar = model.grammar(schema=NUMBER)
    assert model.wrong(grammar, 'So < </think>\n{"n":1}', '</think>{"n":1}', good=True) == []
    assert model.wrong(grammar, '{"n":1}', "So</think></think>" + '{"n":1}', good=False) == []
    assert model.takes(model.grammar(schema=NUMBER, thinking_budget=0), '</think>{"n":1}')
    code, param, _ = refused(lambda: model.grammar(thinking_budget=5))
    assert (code, param) == ("unsupported_parameter", "thinking_token_budget")
    opening = family("qwen3", added=False)
    grammar = opening.grammar(schema=NUMBER)
    assert opening.wrong(grammar, think() + '{"n":1}', good=True) == opening.wrong(grammar, think(), good=False) == []


def test_a_completion_is_bound_as_before(family: GetFamily) -> None:
    model = family("deepseek_r1")
    event = request(schema=NUMBER).model_copy(update={"messages": (), "prompt": "a"})
    wanted = model.encoder.render(event).asked
    assert wanted is not None
    grammar = answer_grammar(wanted, model.encoder.dialect)
    assert model.takes(grammar, '{"n":1}') and not model.takes(grammar, '</think>{"n":1}')


def written(defs: dict[str, Any], of: Any, count: int) -> Rules:
    """Return the rules of a call with *count* arguments in the format of Qwen3-Coder, as far as they are written."""
    parameters = {"type": "object", "properties": {f"p{number}": of for number in range(count)}, "$defs": defs}
    rules = Rules()
    with contextlib.suppress(ValueError):
        call_writer._Writer(Dialect("qwen3_coder", False, (), AddedTokens({}, frozenset())), rules).tagged(
            call_writer.CallableTool(0, "f", parameters, True)
        )
    return rules


@pytest.mark.parametrize(
    "definition",
    [
        {"type": "integer", "description": "x" * 200_000},
        {"enum": ["y" * 60_000]},
        {"type": "array", "items": {"$ref": "#/$defs/b"}},
    ],
    ids=["described", "large", "nested"],
)
def test_a_definition_that_many_properties_refer_to_is_not_copied_beyond_the_limit(definition: dict[str, Any]) -> None:
    others = {"b": {"type": "object", "properties": {f"{'n' * 100}{i}": {} for i in range(500)}}, "c": {"enum": ["z"]}}
    rules = written({"a": definition, **others}, {"$ref": "#/$defs/a"}, 2000)
    assert sum(map(len, rules.lines)) < 2 * LARGEST_GRAMMAR_BYTES and "z" not in "".join(rules.lines)


def test_only_definitions_that_are_reached_are_copied_and_none_of_their_descriptions() -> None:
    defs = {
        "a": {"type": "array", "items": {"$ref": "#/$defs/b~1c"}, "description": "of a", "title": "A"},
        "b/c": {"type": "object", "properties": {"description": {"$ref": "#/$defs/a", "examples": [1]}}},
        "unused": {"type": "integer"},
    }
    (line,) = [line for line in written(defs, {"$ref": "#/$defs/a"}, 1).lines if "%json" in line]
    schema = json.loads(line.partition("%json ")[2].rpartition(" ")[0])
    assert schema["$defs"] == {
        "a": {"type": "array", "items": {"$ref": "#/$defs/b~1c"}},
        "b/c": {"type": "object", "properties": {"description": {"$ref": "#/$defs/a"}}},
    }
