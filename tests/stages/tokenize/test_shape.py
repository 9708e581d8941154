"""Conversations in the shape that a chat template takes, which is found by rendering small ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.checkpoints import train_tokenizer
from support.dialects import TEMPLATES

from pipeline.errors import ConfigError, RequestError
from pipeline.events import SamplingParams, Submitted, Templating
from stages.tokenize.shape import SYSTEM_NOTE, Shape
from stages.tokenize.templates import conversation_text

LINE = "{{ '<' + message.role + '>' }}"
TEXTS = "{% for message in messages %}" + LINE + "{{ message.content }}{{ '\\n' }}{% endfor %}"
FIRST_PART = "{% for message in messages %}" + LINE + "{{ message['content'][0]['text'] }}{{ '\\n' }}{% endfor %}"
ALL_PARTS = (
    "{% for message in messages %}" + LINE + "{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}"
)
PARTS_OF_USERS = (
    "{% for message in messages %}" + LINE + "{% if message.role == 'user' %}{{ message.content[0].text }}"
    "{% else %}{{ message.content + '' }}{% endif %}{{ '\\n' }}{% endfor %}"
)
EITHER = (
    "{% for message in messages %}" + LINE + "{% if message.content is string %}{{ message.content }}"
    "{% else %}{{ message.content[0].text }}{% endif %}{{ '\\n' }}{% endfor %}"
)
AFTER_A_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('Begin with the rules.') }}{% endif %}"
CALLS = (
    "{% for message in messages %}" + LINE + "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name + '(' }}PRINTED{{ ')' }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
)
ARGUMENTS = "call.function.arguments"
AS_OBJECT = CALLS.replace("PRINTED", f"{{{{ {ARGUMENTS} | tojson }}}}")
AS_ITEMS = CALLS.replace(
    "PRINTED", f"{{% for name, value in {ARGUMENTS}.items() %}}{{{{ name + '=' + value | tojson }}}}{{% endfor %}}"
)
AS_TEXT = CALLS.replace("PRINTED", f"{{{{ '`' + {ARGUMENTS} + '`' }}}}")
AS_IT_IS = CALLS.replace("PRINTED", f"{{{{ {ARGUMENTS} }}}}")
AS_BOTH = CALLS.replace("PRINTED", f"{{{{ {ARGUMENTS} if {ARGUMENTS} is string else {ARGUMENTS} | tojson }}}}")
SYSTEM_FIRST = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('A system message comes first.') }}{% endif %}"
    + LINE
    + "{{ message.content }}{{ '\\n' }}{% endfor %}"
)
LAST_SYSTEM = (
    "{% for message in messages if message.role == 'system' %}{% if loop.last %}{{ message.content }}\n{% endif %}"
    "{% endfor %}{% for message in messages if message.role != 'system' %}" + LINE + "{{ message.content }}\n"
    "{% endfor %}"
)
ALTERNATING = (
    "{% for message in messages %}{% if message.role != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('Users and assistants take turns.') }}{% endif %}"
    + LINE
    + "{{ message.content }}{{ '\\n' }}{% endfor %}"
)
SILENT = (
    "{% for message in messages if message.role != 'system' %}" + LINE + "{{ message.content }}{{ '\\n' }}{% endfor %}"
)  # without a word about those that it leaves out

Text = Callable[..., str]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(300, with_bos=False)


@pytest.fixture
def shape(tokenizer: Any) -> Callable[[str], Shape]:
    def of(template: str) -> Shape:
        tokenizer.chat_template = template
        return Shape.of(tokenizer)

    return of


@pytest.fixture
def text(tokenizer: Any, shape: Callable[[str], Shape]) -> Text:
    """Return what a template makes of a conversation."""

    def of(template: str, *messages: dict[str, Any], **templating: Any) -> str:
        given = Templating(**{"add_generation_prompt": False} | templating)
        event = Submitted(endpoint="e", frontend="f", messages=messages, templating=given, sampling=SamplingParams())
        return conversation_text(tokenizer, shape(template), event)

    return of


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


# content


TURNS = (said("system", "r"), said("user", "q"), said("assistant", "a"), said("user", "w"))


@pytest.mark.parametrize("template", [TEXTS, FIRST_PART, ALL_PARTS, PARTS_OF_USERS, EITHER])
def test_content_is_given_as_the_template_reads_it(text: Text, template: str) -> None:
    assert text(template, *TURNS) == "<system>r\n<user>q\n<assistant>a\n<user>w\n"


@pytest.mark.parametrize("template", [TEXTS, EITHER, "{{ messages }}"])
def test_a_template_that_reads_texts_gets_them(shape: Callable[[str], Shape], template: str) -> None:
    assert shape(template).parts == frozenset()


def test_an_answer_in_parts_can_be_continued(text: Text) -> None:
    assert text(FIRST_PART, said("user", "q"), said("assistant", "So"), continue_final_message=True).endswith(">So")


def test_a_template_that_wants_a_system_message_shows_users_all_the_same(text: Text) -> None:
    assert text(AFTER_A_SYSTEM + FIRST_PART, *TURNS[:2]) == "<system>r\n<user>q\n"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for message in messages %}" + LINE + "{% endfor %}", "list of parts; "),
        ("{{ messages[0].content.body.upper() }}", r"list of parts \(.* has no attribute 'body'\); "),
        ("{% for message in messages %}{{ message.content[:3] }}{% endfor %}", "list of parts; "),
    ],
    ids=["nothing", "something else", "the beginning"],
)
def test_a_template_that_shows_no_user_is_refused_at_the_start(
    shape: Callable[[str], Shape], template: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        shape(template)


def test_templates_that_need_tools_are_not_looked_at_without_them(tokenizer: Any) -> None:
    tokenizer.chat_template = {"tool_use": FIRST_PART, "rag": "{{ nothing }}"}
    assert Shape.of(tokenizer) == Shape()


DEEPSEEK = dict.fromkeys(("deepseek_v3", "deepseek_v31", "deepseek_original"), "text")
PRINTED = {"kimi_k2": "both", "apertus": "text", **DEEPSEEK}
"""How the templates print arguments that do not take objects alone."""


def test_templates_of_known_families_take_what_they_took(shape: Callable[[str], Shape]) -> None:
    for path in TEMPLATES.glob("*.jinja"):
        found = shape(path.read_text())
        assert found.parts == frozenset(), path.name
        assert found.arguments == PRINTED.get(path.stem, "object"), path.name
    assert shape((TEMPLATES / "mistral_list.jinja").read_text()).systems == "nowhere"
    assert shape((TEMPLATES / "qwen3.jinja").read_text()).systems == "anywhere"


# arguments of calls


def calling(arguments: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("template", "printed"),
    [
        (AS_OBJECT, '{"at": "it"}'),
        (AS_ITEMS, 'at="it"'),
        (AS_TEXT, '`{"at":"it"}`'),
        (AS_IT_IS, '{"at":"it"}'),
        (AS_BOTH, '{"at": "it"}'),
    ],
)
def test_arguments_are_an_object_where_the_template_takes_one(text: Text, template: str, printed: str) -> None:
    assert text(template, said("user", "q"), calling('{"at":"it"}')) == f"<user>q\n<assistant>look({printed})\n"


BAD = ['{"city": "Pa', "null", "[]", "3", "Paris", '{"a": NaN}', '{"a": "\\ud800"}', '{"a":' * 100_000]


@pytest.mark.parametrize("arguments", BAD, ids=lambda text: text[:12])
def test_arguments_that_are_no_object_are_an_empty_one_or_the_text_as_it_is(text: Text, arguments: str) -> None:
    for template, printed in ((AS_OBJECT, "{}"), (AS_ITEMS, ""), (AS_TEXT, f"`{arguments}`"), (AS_BOTH, arguments)):
        given = text(template, said("user", "q"), calling(arguments), said("user", "And?"))
        assert given == f"<user>q\n<assistant>look({printed})\n<user>And?\n"


@pytest.mark.parametrize("template", [AS_OBJECT, AS_TEXT, AS_BOTH])
def test_no_arguments_are_an_empty_object(text: Text, template: str) -> None:
    assert "look({})" in text(template, said("user", "q"), calling("")).replace("`", "")


# messages with calls and more


def calls(*ids: str, **more: str) -> dict[str, Any]:
    called = [{"id": each, "type": "function", "function": {"name": each, "arguments": "{}"}} for each in ids]
    return {**said("assistant", ""), "tool_calls": called, **more}


def result(of: str) -> dict[str, Any]:
    return {"role": "tool", "content": f"of {of}", "tool_call_id": of}


def family(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


OUTPUT = "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>of f<｜tool▁output▁end｜>"


def test_calls_that_a_template_shows_only_without_content_are_a_message_of_their_own(text: Text) -> None:
    given = text(family("deepseek_original"), said("user", "q"), calls("f", content="So."), result("f"))
    assert given.startswith("<｜User｜>q<｜Assistant｜>So.<｜end▁of▁sentence｜><｜Assistant｜><｜tool▁calls▁begin｜>")
    assert given.endswith("｜>f\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>" + OUTPUT)
    assert text(family("deepseek_original"), said("user", "q"), calls("f", "g")).count("<｜Assistant｜>") == 1


CALLED_ONCE = "<|start|>assistant to=functions.{0}<|channel|>commentary json<|message|>{{}}<|call|>"
ANSWERED = '<|start|>functions.{0} to=assistant<|channel|>commentary<|message|>"of {0}"<|end|>'


def test_calls_of_a_message_come_one_by_one_with_their_results_where_the_template_shows_one(text: Text) -> None:
    begun = (said("user", "q"), calls("f", "g", "h"))
    given = text(family("harmony"), *begun, result("h"), result("f"), result("g"), said("user", "w"))
    told = "".join(CALLED_ONCE.format(each) + ANSWERED.format(each) for each in "fgh")
    assert given.endswith(f"q<|end|>{told}<|start|>user<|message|>w<|end|>")
    assert text(family("harmony"), *begun).endswith("".join(map(CALLED_ONCE.format, "fgh")))
    odd = text(family("harmony"), *begun, result("f"), result("x"), calls("i"), result("i"))
    places = [odd.index(each) for each in ("to=functions.f", "of f", ".g<", ".h<", "of x", "to=functions.i", "of i")]
    assert places == sorted(places)
    assert text(family("hermes"), *begun).count("<tool_call>") == 3


def test_a_thought_and_content_before_a_call_are_one_where_the_template_refuses_both(text: Text) -> None:
    both = calls("f", content="I look.", reasoning_content="Well.")
    thought = "<|start|>assistant<|channel|>analysis<|message|>Well.\n\nI look.<|end|>"
    assert text(family("harmony"), said("user", "q"), both).endswith(thought + CALLED_ONCE.format("f"))
    alone = calls("f", reasoning_content="Well.")
    assert "analysis<|message|>Well.<|end|>" in text(family("harmony"), said("user", "q"), alone)


def test_a_long_conversation_of_calls_and_results_is_shaped_at_once(shape: Callable[[str], Shape]) -> None:
    of_harmony = shape(family("harmony"))
    many = [calls(*(f"c{number}" for number in range(1000))), *(result(f"c{number}") for number in range(4000))]
    assert len(of_harmony.shaped([said("user", "q"), *many])) == 1 + 1000 + 4000


# system messages


FEW = (said("system", "r1"), said("system", "r2"), said("user", "q"))


@pytest.mark.parametrize("template", [TEXTS, SYSTEM_FIRST, FIRST_PART])
def test_system_messages_at_the_beginning_are_one(text: Text, template: str) -> None:
    assert text(template, *FEW) == "<system>r1\n\nr2\n<user>q\n"


LATER = (said("system", "r1"), said("user", "q"), said("assistant", "a"), said("system", "r2"), said("user", "w"))


def test_a_later_system_message_stays_where_the_template_takes_it(text: Text) -> None:
    assert text(TEXTS, *LATER) == "<system>r1\n<user>q\n<assistant>a\n<system>r2\n<user>w\n"


@pytest.mark.parametrize("template", [SYSTEM_FIRST, LAST_SYSTEM])
def test_another_later_system_message_is_text_of_the_user_that_says_so(text: Text, template: str) -> None:
    turns = f"<user>q\n<assistant>a\n<user>{SYSTEM_NOTE}r2\n\nw\n"
    assert text(template, *LATER).removeprefix("<system>") == f"r1\n{turns}"
    ends = (*LATER[:2], said("system", "r2"))
    assert text(template, *ends).endswith(f"<user>q\n\n{SYSTEM_NOTE}r2\n")
    alone = (*LATER[:3], said("system", "r2"))
    assert text(template, *alone).endswith(f"<assistant>a\n<user>{SYSTEM_NOTE}r2\n")


@pytest.mark.parametrize("template", [ALTERNATING, SILENT])
def test_a_template_without_system_messages_gets_all_of_them_as_text_of_the_user(text: Text, template: str) -> None:
    assert text(template, *LATER) == (f"<user>{SYSTEM_NOTE}r1\n\nq\n<assistant>a\n<user>{SYSTEM_NOTE}r2\n\nw\n")
    assert text(template, *FEW) == f"<user>{SYSTEM_NOTE}r1\n\nr2\n\nq\n"


def test_turns_that_a_client_sent_are_never_joined(text: Text) -> None:
    with pytest.raises(RequestError, match="take turns"):
        text(ALTERNATING, said("user", "one"), said("user", "two"))
    ends = (said("user", "q"), said("assistant", "a"), said("user", "w"), said("user", "v"))
    assert text(SYSTEM_FIRST, *ends).endswith("<user>w\n<user>v\n")
