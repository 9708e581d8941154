"""What a reader finds in an answer does not depend on the portions in which its text comes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

import pytest
from support.marked_texts import CHANNELS, FAMILIES, Written, written
from support.selection import by_night

from pipeline.events import Calls, Markup
from pipeline.markup import ToolFormat
from stages.tokenize.markup import MARKERS
from web.wire.markup.reader import Piece, Reader, tools_of

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {
                    "what": {"type": "string"},
                    "n": {"type": "integer"},
                    "may": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "any": {},
                    "deep": {"$ref": "#/$defs/D"},
                },
                "$defs": {"D": {"$ref": "#/$defs/E"}, "E": {"type": "array"}},
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
THINK = ("<think>", "</think>")
NUM_TEXTS = by_night(3, 200)


def markup_of(family: ToolFormat, **more: Any) -> Markup:
    return Markup(tools=family, channels=family == "harmony", **more)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Return *pieces* with those put together that follow each other and are alike."""
    found: list[Piece] = []
    for piece in pieces:
        if found and piece.kind != "call" and found[-1][::2] == piece[::2]:
            found[-1] = Piece(piece.kind, found[-1].text + piece.text, piece.call)
        else:
            found.append(piece)
    return found


def read(answer: Written, portions: Iterable[str]) -> list[Piece]:
    reader = Reader(answer.markup, Calls(), tools_of(answer.tools))
    pieces = [piece for portion in portions for piece in reader.take(portion, 1)]
    return joined([*pieces, *reader.finish()])


def told(text: str, markup: Markup, calls: Calls | None = None, *, cut: bool = False) -> list[tuple[str, str]]:
    """Return the kinds and the texts of what a reader finds in *text*, whichever way that is divided.

    *cut*: the limit of its length ended the answer, which is then read whole and character by character alone.
    """

    def of(portions: Sequence[str]) -> list[Piece]:
        reader = Reader(markup, calls or Calls(), tools_of(TOOLS))
        pieces = [piece for portion in portions for piece in reader.take(portion, 1)]
        return joined([*pieces, *reader.finish(cut=cut)])

    whole = of([text])
    assert of(text) == whole, "character by character"
    for place in range(1, 0 if cut else len(text)):
        assert of([text[:place], text[place:]]) == whole, place
    return [piece[:2] for piece in whole]


def call(name: str, arguments: str) -> list[tuple[str, str]]:
    return [("call", name), *([("arguments", arguments)] if arguments else [])]


def content(text: str) -> list[tuple[str, str]]:
    return [("content", text)]


def at_random(text: str, random: Random) -> list[str]:
    """Return *text* in portions of up to eight characters."""
    portions, place = [], 0
    while place < len(text):
        portions.append(text[place : (place := place + random.randint(1, 8))])
    return portions


def bare(text: str) -> str:
    """Return *text* without its whitespace."""
    return "".join(text.split(" ")).replace("\n", "")


@pytest.mark.parametrize("seed", range(NUM_TEXTS))
@pytest.mark.parametrize("family", FAMILIES)
def test_any_portions_of_a_text_have_the_same_calls(family: ToolFormat, seed: int) -> None:
    answer = written(family, seed)
    pieces = read(answer, [answer.text])
    said = {kind: "".join(each.text for each in pieces if each.kind == kind) for kind in ("content", "reasoning")}
    assert (bare(said["content"]), said["reasoning"]) == (bare(answer.content), answer.reasoning), answer.text
    arguments = [
        "".join(each.text for each in pieces if (each.kind, each.call) == ("arguments", index))
        for index in range(len(answer.calls))
    ]
    names = [each.text for each in pieces if each.kind == "call"]
    assert [*zip(names, map(json.loads, arguments), strict=True)] == list(answer.calls), answer.text
    assert not answer.arguments or arguments == list(answer.arguments), "the model's own text"
    for place in range(1, len(answer.text)):
        assert read(answer, [answer.text[:place], answer.text[place:]]) == pieces, (answer.text, place)
    random = Random(seed)
    for _ in range(10):
        assert read(answer, portions := at_random(answer.text, random)) == pieces, portions
    assert read(answer, answer.text) == pieces, "character by character"


FIND = '<tool_call>{"name": "find", "arguments": {"n": 1}}</tool_call>'
FOUND = call("find", '{"n": 1}')
FINAL = "<|channel|>final<|message|>"
ODD: Sequence[tuple[ToolFormat, str, list[tuple[str, str]]]] = (
    # without an end marker, or with more than JSON before it
    ("hermes", FIND.removesuffix("</tool_call>"), FOUND),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"n": 1}</tool_call> ok', [*FOUND, *content("ok")]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"n": 1}, "id": [3, "x"]}</tool_call>', FOUND),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"n": 1}} so </tool_call>',
     [*FOUND, *content("so </tool_call>")]),
    # arguments that are not an object, or none
    ("hermes", '<tool_call>{"name": "find", "arguments": "{\\"n\\": 1}"}</tool_call>', FOUND),
    ("hermes", '<tool_call>{"name": "find", "arguments": "no"}</tool_call>', call("find", "no")),
    ("hermes", '<tool_call>{"name": "find", "arguments": null}</tool_call>', call("find", "{}")),
    ("hermes", '<tool_call>{"name": "find", "arguments": ""}</tool_call>', call("find", "{}")),
    ("hermes", '<tool_call>{"name": "find", "arguments": }</tool_call>', call("find", "{}")),
    ("hermes", '<tool_call>{"name": "find", "arguments": 12}</tool_call>', call("find", "12")),
    ("hermes", '<tool_call>{"name": "find", "arguments": [1]}</tool_call>', call("find", "[1]")),
    ("hermes", '<tool_call>{"name": "find"}</tool_call>', call("find", "{}")),
    ("hermes", '<tool_call>{"name": "find", "name": "stop", "arguments": {}, "parameters": 1}', call("find", "{}")),
    # arguments that end too early, or never
    ("hermes", '<tool_call>{"name": "find", "arguments": {"n": 1</tool_call>!',
     [*call("find", '{"n": 1'), *content("!")]),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"n": "1</tool_call>', call("find", '{"n": "1</tool_call>')),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"n": [1', call("find", '{"n": [1')),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"n": 1</tool_c', call("find", '{"n": 1')),
    ("hermes", '<tool_call>{"name": "find", "arguments": ', call("find", "")),
    ("hermes", '<tool_call>{"name": "find", "arguments": "{\\"n\\": 1', call("find", '{"n": 1')),
    ("hermes", '<tool_call>{"name": "find", "arguments": "{\\"n\\": \\"\\ud83d\\ude4', call("find", '{"n": "')),
    ("hermes", '<tool_call>{"name": "find", "arguments": "', call("find", "")),
    ("hermes", f"{FIND.removesuffix('ool_call>')}", FOUND),
    ("hermes", "<tool_call>{'name': 'find'}</tool_call>", content("<tool_call>{'name': 'find'}</tool_call>")),
    # what only looks like a call
    ("hermes", '<tool_call>{"name": "fin', content('<tool_call>{"name": "fin')),
    ("hermes", '<tool_call>{"name": "\\ud800"}', content('<tool_call>{"name": "\\ud800"}')),
    ("hermes", '<tool_call>{"name": 1, "arguments": {}}', content('<tool_call>{"name": 1, "arguments": {}}')),
    ("hermes", '<tool_call>{"arguments": {"n": 1}}', content('<tool_call>{"arguments": {"n": 1}}')),
    ("hermes", "<tool_call>\n<tool_call>", content("<tool_call>\n<tool_call>")),
    ("hermes", f"<tool_call> {FIND}", [*content("<tool_call>"), *FOUND]),
    ("hermes", "a <tool_cal", content("a <tool_cal")),
    ("hermes", " \n", content(" \n")),
    ("hermes", f" One.\n\n{FIND}\n{FIND}\nTwo.\n", [*content(" One."), *FOUND, *FOUND, *content("\n\n\n\nTwo.\n")]),
    ("qwen3_coder", "<function=find>\n<parameter=n>\n1\n</parameter>\n</function>", FOUND),
    ("qwen3_coder", "<function=seek>", content("<function=seek>")),
    ("qwen3_coder", "<tool_call>\n<function=seek>\n</function>\n</tool_call>", call("seek", "{}")),
    ("qwen3_coder", "<tool_call>\n<function=a\nb>", content("<tool_call>\n<function=a\nb>")),
    ("qwen3_coder", "<tool_call><function=stop><parameter=x>1</parameter>", call("stop", '{"x": "1"')),
    ("qwen3_coder", "<tool_call><function=stop><parameter=x", call("stop", "")),
    ("qwen3_coder", "<tool_call><function=find><parameter=what>a\nb\n</param",
     call("find", '{"what": "a\\nb')),
    ("qwen3_coder", "<tool_call><function=find><parameter=n>12</param", call("find", "")),
    ("qwen3_coder", "<tool_call><function=find></tool_call>", call("find", "{}")),
    ("qwen3_coder", "<tool_call><function=find>then</function>", [*call("find", "{}"), *content("then</function>")]),
    *(
        (
            "qwen3_coder",
            f"<tool_call><function=find><parameter={key}>\n{value}\n</parameter></function></tool_call>",
            call("find", f'{{"{key}": {expected}}}'),
        )
        for key, value, expected in (
            ("n", "many", '"many"'),
            ("n", " 7 ", "7"),
            ("n", "True", "true"),
            ("may", "null", "null"),
            ("may", "5", '"5"'),
            ("any", "5", "5"),
            ("any", "{'a': None}", '{"a": null}'),
            ("any", "five", '"five"'),
            ("deep", "[1,  2]", "[1,  2]"),
            ("deep", "(1, 'x')", '[1, "x"]'),
            ("what", "5", '"5"'),
            ("what", "", '""'),
            ("other", "\n5\n", '"\\n5\\n"'),
        )
    ),
    ("llama3_json", '{"name": "seek", "parameters": {}}', content('{"name": "seek", "parameters": {}}')),
    ("llama3_json", '<|python_tag|>{"name": "seek", "parameters": {}}', call("seek", "{}")),
    ("llama3_json", '<|python_tag|>seek(1)', content('<|python_tag|>seek(1)')),
    ("llama3_json", '{"name": "find"}', content('{"name": "find"}')),
    ("llama3_json", '{"name": "find", "age": 3, "parameters": {}}',
     content('{"name": "find", "age": 3, "parameters": {}}')),
    ("llama3_json", 'So {"name": "find", "parameters": {}}', content('So {"name": "find", "parameters": {}}')),
    ("llama3_json", '{"name": "find", "parameters": {}}; {"x": 1}', [*call("find", "{}"), *content('; {"x": 1}')]),
    ("llama3_json", '\n{"name": "find", "parameters": {"n": 1}}\n{"name": "stop", "parameters": {}}',
     [*FOUND, *call("stop", "{}")]),
    ("mistral", '[TOOL_CALLS] {"name": "find", "arguments": {"n": 1}}', FOUND),
    ("mistral", '[TOOL_CALLS] [{"name": "find", "arguments": {"n": 1}}', FOUND),
    ("mistral", '[TOOL_CALLS][{"name": "find", "arguments": {"n": 1}}, 5]', [*FOUND, *content(", 5]")]),
    ("mistral", "[TOOL_CALLS] [1]", content("[TOOL_CALLS] [1]")),
    ("mistral", "[TOOL_CALLS] none", content("[TOOL_CALLS] none")),
    ("mistral", '[TOOL_CALLS]find{"n": 1}', FOUND),
    ("mistral", '[TOOL_CALLS]find[ARGS] {"n": 1', call("find", '{"n": 1')),
    ("mistral", '[TOOL_CALLS]find[ARGS]{"n": [[TOOL_CALLS]stop[ARGS]{}',
     [*call("find", '{"n": ['), *call("stop", "{}")]),
    ("pythonic", "[find(n=1)", FOUND),
    ("pythonic", "[find(n=1), ", FOUND),
    ("pythonic", "[find(n=1), 5]", [*FOUND, *content(", 5]")]),
    ("pythonic", "[find(n=1, what='a", call("find", '{"n": 1')),
    ("pythonic", "[find(n=1,)]", FOUND),
    ("pythonic", "[find(,)]", call("find", "{}")),
    ("pythonic", "[find(, n=1)]", FOUND),
    ("pythonic", "[find('a', 1)]", call("find", '{"what": "a", "n": 1}')),
    ("pythonic", "[stop(1)]", call("stop", '{"0": 1}')),
    ("pythonic", "[find(n=f'{x}', what=r'\\d')]", call("find", '{"n": "f\'{x}\'", "what": "r\'\\\\d\'"}')),
    ("pythonic", "[find(what='\\d\\x41\\u00e9\\101\\'\\n')]", call("find", '{"what": "\\\\dAéA\'\\n"}')),
    ("pythonic", "[find(n=g(1, 2), any={1: 2}, may=0x10)]",
     call("find", '{"n": "g(1, 2)", "any": "{1: 2}", "may": "0x10"}')),
    ("pythonic", "[seek(n=1)]", content("[seek(n=1)]")),
    ("pythonic", "<|python_start|>[seek(n=1)]<|python_end|>", content("<|python_start|>[seek(n=1)]<|python_end|>")),
    ("pythonic", "So [find(n=1)]", content("So [find(n=1)]")),
    ("lfm2", "<|tool_call_start|>[find(what='a b')]<|tool_call_end|> So.",
     [*call("find", '{"what": "a b"}'), *content("So.")]),
    ("lfm2", "<|tool_call_start|>[find(n=1)<|tool_call_end|> So.", [*FOUND, *content("So.")]),
    ("lfm2", "[find(n=1)]", content("[find(n=1)]")),
    ("minicpm", '<|tool_call_start|>find(n=1,what="a")\nstop()<|tool_call_end|> So.',
     [*call("find", '{"n": 1, "what": "a"}'), *call("stop", "{}"), *content("So.")]),
    ("minicpm", "<|tool_call_start|>\n```python\nfind(any=true,n=None)\n```", call("find", '{"any": true, "n": null}')),
    ("minicpm", "<|tool_call_start|>\n```python\nseek()\n```", content("<|tool_call_start|>\n```python\nseek()\n```")),
    ("glm", "<tool_call>find<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>", FOUND),
    ("glm", "<tool_call>find\n<arg_key>what</arg_key>\n<arg_value>\na\n</arg_value>\n</tool_call> ok",
     [*call("find", '{"what": "\\na\\n"}'), *content("ok")]),
    ("glm", "<tool_call>find\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>", call("find", '{"n": 1')),
    ("glm", "<tool_call>find\n<arg_key>n</arg_key>\nno", [*call("find", ""), *content("no")]),
    ("glm", "<tool_call>find\n<arg_key>n", call("find", "")),
    ("glm", "<tool_call> is a tag.", content("<tool_call> is a tag.")),
    ("glm", "<tool_call>find it</tool_call>", content("<tool_call>find it</tool_call>")),
    ("kimi_k2", '<|tool_call_begin|>find<|tool_call_argument_begin|>{"n": 1}', FOUND),
    ("kimi_k2", '<|tool_call_begin|>functions.find:12<|tool_call_argument_begin|>{"n": 1<|tool_call_end|>!',
     [*call("find", '{"n": 1'), *content("!")]),
    ("kimi_k2", "<|tool_call_begin|>functions.a.b:2<|tool_call_argument_begin|> <|tool_call_end|>", call("a.b", "{}")),
    ("kimi_k2", "<|tool_calls_section_begin|> none", content("<|tool_calls_section_begin|> none")),
    ("kimi_k2", "<|tool_call_begin|>find{}", content("<|tool_call_begin|>find{}")),
    ("deepseek", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n{"n": 1}', FOUND),
    ("deepseek", '<｜tool▁call▁begin｜>find<｜tool▁sep｜>{"n": 1<｜tool▁call▁end｜>!',
     [*call("find", '{"n": 1'), *content("!")]),
    ("deepseek", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{"n": [\n```<｜tool▁call▁end｜>!',
     [*call("find", '{"n": [\n'), *content("!")]),
    ("deepseek", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>{"n": 1}', call("function", '{"n": 1}')),
    ("deepseek", "<｜tool▁call▁begin｜>find<｜tool▁sep｜>1", content("<｜tool▁call▁begin｜>find<｜tool▁sep｜>1")),
    ("apertus", '<|tools_prefix|>[{"find": {"n": 1}}', FOUND),
    ("apertus", '<|tools_prefix|>[{"find": {"n": 1}<|tools_suffix|>!', [*FOUND, *content("!")]),
    ("apertus", '<|tools_prefix|>[{"find": {"n": 1}}, 5]', [*FOUND, *content(", 5]")]),
    ("apertus", "<|tools_prefix|>[]", content("<|tools_prefix|>[]")),
    ("harmony", '<|channel|>commentary to=functions.find<|message|>{"n": 1}', FOUND),
    ("harmony", ' to=functions.find<|channel|>commentary json<|message|>{"n": 1}<|call|>', FOUND),
    ("harmony", '<|channel|>analysis to=find code<|message|>{"n": 1<|end|> ', call("find", '{"n": 1')),
    ("harmony", "<|channel|>commentary to=functions.stop<|message|><|call|>", call("stop", "{}")),
    ("harmony", f'<|channel|>commentary to=functions.a.b<|message|>{{"n": 1}}<|start|>assistant{FINAL}So',
     [*call("a.b", '{"n": 1}'), *content("So")]),
    ("harmony", "<|channel|>commentary to=python<|message|>1<|call|>", content("1")),
    ("harmony", "<|channel|>final<|message|>a <|end|> b", content("a <|end|> b")),
    ("harmony", "<|message|>So.", content("So.")),
    ("harmony", "to find it", content("to find it")),
    ("harmony", "to=functions.find", content("to=functions.find")),
    ("harmony", "<|channel|>final", content("<|channel|>final")),
    ("harmony", f"<|channel|>final{'.' * 300}<|message|>So.", content(f"<|channel|>final{'.' * 300}\n\nSo.")),
)  # fmt: skip
"""What models write amiss, and what is made of it: a call as far as it is one, else content."""


@pytest.mark.parametrize(("family", "text", "expected"), ODD, ids=[f"{odd[0]}-{odd[1]}" for odd in ODD])
def test_what_is_written_amiss_is_a_call_as_far_as_it_is_one_and_else_content(
    family: ToolFormat, text: str, expected: list[tuple[str, str]]
) -> None:
    assert told(text, markup_of(family)) == expected


CALLS: Mapping[ToolFormat, str] = {
    "hermes": f'So {FIND}\n<tool_call>\n{{"name": "stop", "arguments": {{}}}}\n</tool_call>',
    "qwen3_coder": "So <tool_call>\n<function=find>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    "llama3_json": '<|python_tag|>{"name": "find", "parameters": {"n": 1}}; {"name": "stop", "parameters": {}}',
    "mistral": 'So [TOOL_CALLS]find[CALL_ID]abc12DEF9[ARGS]{"n": 1}[TOOL_CALLS] [{"name": "stop", "arguments": {}}]',
    "pythonic": "<|python_start|>[find(n=1), stop()]<|python_end|>",
    "minicpm": "So <|tool_call_start|>\n```python\nfind(n=1)\nstop()\n```\n<|tool_call_end|>",
    "lfm2": "So <|tool_call_start|>[find(n=1), stop()]<|tool_call_end|>",
    "glm": "So <tool_call>find\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
    "<tool_call>stop\n</tool_call>",
    "kimi_k2": "So <|tool_calls_section_begin|><|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>"
    '{"n": 1}<|tool_call_end|><|tool_call_begin|>functions.stop:1<|tool_call_argument_begin|>{}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
    "deepseek": 'So <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find\n```json\n{"n": 1}\n```'
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "apertus": 'So <|tools_prefix|>[{"find": {"n": 1}}, {"stop": {}}]<|tools_suffix|>',
    "harmony": 'So <|channel|>commentary to=functions.find <|constrain|>json<|message|>{"n": 1}<|call|>'
    "<|start|>assistant to=functions.stop<|channel|>commentary json<|message|>{}<|call|>",
}
"""Two calls, of `find` with n=1 and of `stop` without arguments. Before them is `So`, or nothing."""


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_is_cut_anywhere_shows_no_part_of_a_marker_and_as_much_of_its_calls_as_came(
    family: ToolFormat,
) -> None:
    text = CALLS[family]
    begun = text.index("<" if "<" in text else "[")
    for place in range(1, len(text) + 1):
        said = told(text[:place], markup_of(family), cut=True)
        shown = "".join(piece for kind, piece in said if kind == "content")
        assert shown.strip() == text[: min(place, begun)].strip(), text[:place]
        calls = _calls_of(said)
        assert [name for name, _ in calls] == ["find", "stop"][: len(calls)], text[:place]
        for (_, arguments), whole in zip(calls, ('{"n": 1}', "{}"), strict=False):
            assert whole.startswith(arguments), text[:place]
        assert all(arguments == '{"n": 1}' for _, arguments in calls[:-1])
    assert calls == [("find", '{"n": 1}'), ("stop", "{}")]


def _calls_of(said: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the names and the arguments of calls."""
    calls: list[tuple[str, str]] = []
    for kind, text in said:
        if kind == "call":
            calls.append((text, ""))
        elif kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return calls


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        ("hermes", "Let a <", content("Let a ")),
        ("hermes", "Let a < b", content("Let a < b")),
        ("hermes", "It is <b>", content("It is <b>")),
        ("hermes", "<tool_call>\n", []),
        ("hermes", '<tool_call>{"name": "fin', []),
        ("hermes", '<tool_call>{"name": "find"', call("find", "")),
        ("hermes", '<tool_call>{"name": "find"}', call("find", "{}")),
        ("hermes", '<tool_call>{"name": "seek", "arguments": {"n": "<', call("seek", '{"n": "<')),
        ("hermes", '<tool_call>{"arguments": {"n": 1}, "name": "fi', []),
        ("hermes", "<tool_call>{'name': 'fi", content("<tool_call>{'name': 'fi")),
        ("hermes", "<thi", []),
        ("hermes", "<think>Well. </thi", [("reasoning", "Well.")]),
        ("hermes", "<think>Well. <tool_call>{", [("reasoning", "Well.")]),
        ("mistral", "[TOOL_CALLS]find", []),
        ("mistral", "[TOOL_CALLS]find[ARGS]", call("find", "")),
        ("mistral", '[TOOL_CALLS]find[ARGS]{"n": [', call("find", '{"n": [')),
        ("mistral", '[TOOL_CALLS]find[ARGS]{"n": 1[TOOL', call("find", '{"n": 1')),
        ("qwen3_coder", "<tool_call>\n<function=find>\n<", call("find", "")),
        ("qwen3_coder", "<function=fin", []),
        ("llama3_json", '{"name": "find"', call("find", "")),
        ("llama3_json", '{"name": "find", "age": ', content('{"name": "find", "age": ')),
        ("llama3_json", '{"name": "Fi', content('{"name": "Fi')),
        ("pythonic", "[fi", content("[fi")),
        ("harmony", " to=functions.fin", []),
        ("harmony", " to=functions.find<|chan", call("find", "")),
        ("harmony", "<|channel|>commentary to=functions.find <|cons", call("find", "")),
        ("harmony", "<|channel|>final<|message|>So.<|en", content("So.")),
        ("harmony", "<|channel|>final<|mess", []),
    ],
)  # fmt: skip
def test_what_begins_a_call_and_is_cut_is_left_out_until_its_name_is_there(
    family: ToolFormat, text: str, expected: list[tuple[str, str]]
) -> None:
    assert told(text, markup_of(family, think=THINK), cut=True) == expected


@pytest.mark.parametrize(("family", "text"), [("llama3_json", '{"name": "Fi'), ("pythonic", "[fi")])
def test_a_required_call_without_a_marker_is_left_out_too_until_its_name_is_there(
    family: ToolFormat, text: str
) -> None:
    assert told(text, markup_of(family), Calls(choice="required"), cut=True) == []


def reasoning(text: str) -> list[tuple[str, str]]:
    return [("reasoning", text)]


@pytest.mark.parametrize(
    ("text", "opens", "expected"),
    [
        ("<think>\nWell.\n</think>\n\nYes.\n", False, [*reasoning("Well."), *content("Yes.\n")]),
        ("Well.</think>Yes.", True, [*reasoning("Well."), *content("Yes.")]),
        ("<think>Well.</think>Yes.", True, [*reasoning("Well."), *content("Yes.")]),
        ("Well. <thi", True, reasoning("Well. <thi")),
        ("\n\n</think>\n\nYes.", True, content("Yes.")),
        ("Yes. <think> </think>", False, content("Yes. <think> </think>")),
        ("\n<think>A</think>\n<think>B</think>C", False, [*reasoning("AB"), *content("C")]),
        ("Well.", False, content("Well.")),
        (f"Well {FIND} so</think>Yes.", True, [*reasoning("Well"), *FOUND, *reasoning("  so"), *content("Yes.")]),
        (f"Well <tool_call> </think> {FIND}", True, [*reasoning("Well <tool_call>"), *FOUND]),
        (f"<think>Well.</think>\n{FIND}\n", False, [*reasoning("Well."), *FOUND]),
    ],
)
def test_reasoning_is_what_the_markers_enclose_also_where_the_prompt_opened_it(
    text: str, opens: bool, expected: list[tuple[str, str]]
) -> None:
    assert told(text, Markup(tools="hermes", think=THINK, opens_thinking=opens)) == expected


HARMONY = Markup(tools="harmony", think=CHANNELS, channels=True)
THOUGHT = "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THOUGHT}{FINAL} Yes.\n<|return|>", [*reasoning("Well."), *content("Yes.\n")]),
        (f"{THOUGHT}{THOUGHT}{FINAL} Yes.\n<|return|>", [*reasoning("Well.\n\nWell."), *content("Yes.\n")]),
        (f"{THOUGHT}{PREAMBLE}{FINAL} Yes.\n<|return|>", [*reasoning("Well."), *content("I look.\n\n Yes.\n")]),
        (f"{PREAMBLE}{THOUGHT}{FINAL}Yes.", [*content("I look."), *reasoning("Well."), *content("\n\nYes.")]),
        (f"{THOUGHT}{CALLS['harmony'].removeprefix('So ')}", [*reasoning("Well."), *FOUND, *call("stop", "{}")]),
        ("<|channel|>analysis<|message|>Well.<|start|>assistant<|channel|>final<|message|>Yes",
         [*reasoning("Well."), *content("Yes")]),
        ("<|channel|>analysis code<|message|>Well.", reasoning("Well.")),
        ("there.<|end|><|start|>assistant<|channel|>final<|message|>So.", content("there.\n\nSo.")),
    ],
)  # fmt: skip
def test_the_channel_of_a_message_says_whether_it_is_reasoning_or_content(
    text: str, expected: list[tuple[str, str]]
) -> None:
    assert told(text, HARMONY) == expected
    if text.startswith(THOUGHT):
        opened = HARMONY.model_copy(update={"opens_thinking": True})
        assert told(text.removeprefix(CHANNELS[0]), opened) == expected
    without_calls = [piece for piece in expected if piece[0] in ("reasoning", "content")]
    if len(without_calls) == len(expected):
        assert told(text, HARMONY.model_copy(update={"tools": ""})) == expected


def test_messages_are_content_alone_where_the_client_wants_no_calls_and_its_reasoning_there() -> None:
    plain = Markup(channels=True)
    assert told(f"{THOUGHT}{FINAL} Yes.\n<|return|>", plain) == content("Well.\n\n Yes.\n")
    assert told(CALLS["harmony"], plain) == content('So \n\n{"n": 1}\n\n{}')


def test_only_the_text_of_messages_of_thinking_is_counted_as_reasoning() -> None:
    reader = Reader(HARMONY, Calls(), {})
    marks = ["<|channel|>", "analysis", "<|message|>", "We", "ll", "<|end|>", "<|start|>", "assistant"]
    for portion in (*marks, *marks, "<|channel|>", "final", "<|message|>", "Yes"):
        reader.take(portion, 1)
    reader.finish()
    assert reader.reasoning_tokens == 4


@pytest.mark.parametrize(
    ("portions", "opens", "expected"),
    [
        (["Well", ".", "</think>", "Yes"], True, 2),
        (["<think>", "Well", "", ".", "</think>", "\n\n", "Yes"], False, 3),
        (["</think>", "Yes"], True, 0),
        (["Well", " </", "think", ">", "Yes"], True, 1),
        (["a </", "thin", "k", "s"], True, 4),
        (["a", " <", "/thi"], True, 3),
        (["So", *FIND, "x", "</think>", "Yes"], True, 2),
        (["Well", " <", "</think>", "Yes"], True, 2),
        (["Well", "</", "t", "</", "think>", "Yes"], True, 3),
        (["Well", "<", "tool_", "</think>", "Yes"], True, 3),
        (["Well", "<", "<tool_call>", *FIND.removeprefix("<tool_call>"), "x", "</think>"], True, 3),
        (["Yes", "<think>"], False, 0),
    ],
)
def test_tokens_of_reasoning_are_those_between_the_markers(portions: list[str], opens: bool, expected: int) -> None:
    reader = Reader(Markup(tools="hermes", think=THINK, opens_thinking=opens), Calls(), {})
    for portion in portions:
        reader.take(portion, 1)
    reader.finish()
    assert reader.reasoning_tokens == expected


def test_a_client_that_wants_one_call_gets_the_first() -> None:
    text = f"{FIND}{FIND} So."
    assert told(text, Markup(tools="hermes"), Calls(parallel=False)) == [*FOUND, *content("So.")]


@pytest.mark.parametrize(("family", "text"), [("hermes", FIND), ("pythonic", "[find(n=1)]")])
def test_a_call_of_a_tool_that_is_not_allowed_is_content(family: ToolFormat, text: str) -> None:
    assert told(text, markup_of(family), Calls(names=("stop",))) == content(text)
    assert told(text, markup_of(family), Calls(names=("stop", "find"))) == FOUND


def test_text_is_shown_as_soon_as_it_can_no_longer_be_a_marker() -> None:
    reader = Reader(Markup(tools="hermes", think=THINK), Calls(), {})
    shown = [[piece.text for piece in reader.take(text, 1)] for text in ("Hel", "lo <", "too", "l_call", "s>", " x")]
    assert shown == [["Hel"], ["lo"], [], [], [" <tool_calls>"], [" x"]]
    portions = ('<tool_call>{"name": "f", "arg', 'uments": {"a"', ": [1", "]}}")
    assert [[piece[:2] for piece in reader.take(text, 1)] for text in portions] == [
        [],
        [("call", "f"), ("arguments", '{"a"')],
        [("arguments", ": [1")],
        [("arguments", "]}")],
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_text_is_too_odd_for_a_reader(family: ToolFormat) -> None:
    random = Random(family)
    scraps = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|python_tag|>",
        "<function=find>",
        "<parameter=n>",
        *(marker for name in ("lfm2", "glm", "kimi_k2", "deepseek", "apertus", "harmony") for marker in MARKERS[name]),
    ]
    scraps += [
        '{"name": "find", ',
        '"arguments": ',
        '"parameters": ',
        "</parameter>",
        "[find(",
        "n=",
        "<think>",
        "</think>",
    ]
    scraps += [*"{}[]()<>\"'\\,:;= \n1aé🙂", "null", "</function>"]
    for _ in range(by_night(20, 1_000)):
        text = "".join(random.choices(scraps, k=random.randint(1, 25)))
        told(text, markup_of(family, think=THINK, opens_thinking=random.random() < 0.3))


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": 5, "enum": 3, "anyOf": {}, "$ref": 1},
        {"type": [1, {"a": 2}], "const": []},
        {"enum": []},
        {"$ref": "#/$defs/A"},
        {"allOf": [[], None, {"$ref": "#/nothing"}]},
    ],
)
def test_a_schema_that_says_nothing_of_a_type_lets_any_value_be(schema: Any) -> None:
    many = {"anyOf": [{"$ref": "#/$defs/A"}] * 100}
    parameters = {"properties": {"x": schema}, "$defs": {"A": many}, "definitions": 5}
    tools = tools_of([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    reader = Reader(Markup(tools="qwen3_coder"), Calls(), tools)
    pieces = reader.take("<function=f><parameter=x>[1]</parameter><parameter=y>[1]</parameter></function>", 1)
    assert [piece.text for piece in pieces] == ["f", '{"x": [1], "y": "[1]"}']


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_answer_that_looks_like_calls_all_along_is_read_to_its_end(family: ToolFormat) -> None:
    openings = (
        "<tool_call>",
        '<tool_call>{"arguments": {"a": ',
        "[TOOL_CALLS] [",
        '{"name": "find", "x": ',
        "[find(n=[",
        '<|tool_call_begin|>find:0<|tool_call_argument_begin|>{"a',
        '<|tools_prefix|>[{"a": {"b": ',
        "<tool_call>find<arg_key>a",
        "<|channel|>",
        '<|start|>assistant to=find<|message|>{"a": <',
        "<|end|>x",
        "to=",
        "[[",
        " \n",
    )
    for opening in openings:
        reader = Reader(markup_of(family, think=THINK), Calls(), tools_of(TOOLS))
        read = sum(len(piece.text) for _ in range(by_night(1000, 4000)) for piece in reader.take(opening, 1))
        read += sum(len(piece.text) for piece in reader.finish())
        assert 0 < read <= 4000 * len(opening) * 2 or (opening.isspace() and family == "harmony"), opening
