"""How a model writes tool calls and thinking, found in what its chat template writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from support.dialects import make_encoder
from transformers import PreTrainedTokenizerFast

from pipeline.events import Calls, Markup, Replay, SamplingParams, Submitted, Templating
from pipeline.markup import ToolFormat
from stages.generate.model.checkpoint import DEMO_FOLDER
from stages.tokenize.config import TOOL_FORMATS
from stages.tokenize.markup import CHANNELS, MARKERS
from stages.tokenize.prompts import PromptEncoder

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
AUTO = Calls()
THINK = ("<think>", "</think>")
THOUGHT = ("<|thought_start|>", "<|thought_end|>")
USER = {"role": "user", "content": "Where is it?"}


def chat(*messages: dict[str, Any], calls: Calls | None = AUTO, **templating: Any) -> Submitted:
    return Submitted(
        endpoint="e",
        frontend="f",
        messages=messages or (USER,),
        sampling=SamplingParams(),
        calls=calls,
        templating=Templating(**{"tools": (TOOL,) if calls else ()} | templating),
    )


def markup(encoder: PromptEncoder, *messages: dict[str, Any], **more: Any) -> Markup:
    return encoder.render(chat(*messages, **more)).markup


@pytest.mark.parametrize(
    ("template", "tools", "think", "opens", "special"),
    [
        ("hermes", "hermes", (), False, ()),
        ("qwen3", "hermes", THINK, False, ()),
        ("qwq", "hermes", THINK, True, ()),
        ("qwen3_coder", "qwen3_coder", (), False, ()),
        ("llama3_json", "llama3_json", (), False, ("<|python_tag|>",)),
        ("mistral_list", "mistral", (), False, ("[TOOL_CALLS]", "[ARGS]")),
        ("mistral_names", "mistral", ("[THINK]", "[/THINK]"), False, ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")),
        ("pythonic", "pythonic", (), False, ()),
        ("lfm2", "lfm2", (), False, ("<|tool_call_start|>", "<|tool_call_end|>")),
        ("minicpm", "minicpm", THOUGHT, False, ("<|tool_call_start|>", "<|tool_call_end|>")),
        ("glm", "glm", THINK, False, ()),
        ("kimi_k2", "kimi_k2", (), False, ("<|tool_call_end|>",)),
        ("deepseek_v3", "deepseek", (), False, ()),
        ("deepseek_v31", "deepseek", (), False, ()),
        ("deepseek_original", "deepseek", THINK, True, ()),
        ("apertus", "apertus", (), False, ("<|tools_prefix|>", "<|tools_suffix|>")),
        ("harmony", "harmony", CHANNELS, False, MARKERS["harmony"]),
        ("deepseek_r1", "", THINK, True, ()),
        ("plain", "", (), False, ()),
        ("writes_of_all", "", (), False, ()),
    ],
)
def test_a_template_tells_its_family(
    tmp_path: Path, template: str, tools: str, think: tuple[str, ...], opens: bool, special: tuple[str, ...]
) -> None:
    found = markup(make_encoder(tmp_path, template))
    ids = PreTrainedTokenizerFast.from_pretrained(tmp_path).convert_tokens_to_ids(list(special))
    expected = Markup(tools=tools, think=think, opens_thinking=opens, tokens=tuple(sorted(ids)))  # type: ignore[arg-type]
    assert found == expected.model_copy(update={"channels": tools == "harmony"})


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("hermes", '{"name": "look", "arguments": {"at": "sea"}}'),
        ("deepseek_v3", 'function<｜tool▁sep｜>look\n```json\n{"at":"sea"}\n```'),
        ("deepseek_original", 'function<｜tool▁sep｜>look\n```json\n{"at":"sea"}\n```'),
        ("deepseek_v31", 'look<｜tool▁sep｜>{"at":"sea"}<'),
        ("apertus", '[{"look": {"at":"sea"}}]'),
        ("kimi_k2", 'functions.look:0<|tool_call_argument_begin|>{"at": "sea"}<'),
        ("glm", "look\n<arg_key>at</arg_key>\n<arg_value>sea</arg_value>"),
        ("lfm2", "[look(at='sea')]"),
        ("minicpm", '<|tool_call_start|>\n```python\nlook(at="sea")\n```\n<|tool_call_end|>'),
        ("harmony", ' to=functions.look<|channel|>commentary json<|message|>{"at": "sea"}<|call|>'),
    ],
)
def test_a_template_gets_old_arguments_as_it_takes_them(tmp_path: Path, template: str, expected: str) -> None:
    function = {"name": "look", "arguments": '{"at":"sea"}'}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "functions.look:0", "type": "function", "function": function}],
    }
    assert expected in make_encoder(tmp_path, template).render(chat(USER, called)).text


def test_the_demo_model_writes_calls_as_hermes() -> None:
    assert markup(PromptEncoder(DEMO_FOLDER)) == Markup(tools="hermes")


def test_the_flag_has_every_format() -> None:
    assert tuple(name for name in get_args(ToolFormat) if name) == TOOL_FORMATS


def test_the_format_can_be_named_and_switched_off(tmp_path: Path) -> None:
    assert markup(make_encoder(tmp_path, "writes_of_all", "pythonic")).tools == "pythonic"
    assert markup(make_encoder(tmp_path, "hermes", "none")) == Markup()


def test_an_answer_without_calls_and_thinking_has_no_markup(tmp_path: Path) -> None:
    encoder = make_encoder(tmp_path, "hermes")
    assert markup(encoder, calls=None) == markup(encoder, calls=Calls(choice="none")) == Markup()
    assert (
        encoder.render(Submitted(endpoint="e", frontend="f", prompt="a", sampling=SamplingParams())).markup == Markup()
    )


def test_a_prompt_says_whether_its_answer_begins_inside_thinking(tmp_path: Path) -> None:
    qwen3 = make_encoder(tmp_path / "qwen3", "qwen3")
    plain, opened = Markup(), Markup(think=THINK, opens_thinking=True)
    assert markup(qwen3, calls=None) == Markup(think=THINK)
    assert markup(qwen3, calls=None, variables={"enable_thinking": False}) == plain
    assert markup(qwen3, USER | {"content": "What is <think>"}, calls=None) == Markup(think=THINK)
    assert markup(qwen3, USER | {"content": "What is </think>"}, calls=None) == Markup(think=THINK)
    forced = make_encoder(tmp_path / "r1", "deepseek_r1")
    assert markup(forced, USER | {"content": "Why </think>?"}, calls=None) == opened
    assert markup(forced, calls=None, add_generation_prompt=False).opens_thinking is False


def test_answers_of_channels_have_their_markup_with_calls_and_without(tmp_path: Path) -> None:
    encoder = make_encoder(tmp_path, "harmony")
    called = markup(encoder)
    uncalled = called.model_copy(update={"tools": ""})
    assert markup(encoder, calls=None) == markup(encoder, calls=Calls(choice="none")) == uncalled
    assert markup(encoder, calls=None, add_generation_prompt=False) == uncalled
    assert markup(make_encoder(tmp_path, "harmony", "none")) == uncalled
    assert markup(make_encoder(tmp_path, "plain", "harmony")) == called
    options = {"calls": None, "add_generation_prompt": False, "continue_final_message": True}
    begun = {"role": "assistant", "content": "So"}
    assert markup(encoder, USER, begun, **options) == uncalled.model_copy(update={"think": ()})


@pytest.mark.parametrize(("channel", "changed"), [("final", {"think": ()}), ("analysis", {"opens_thinking": True})])
def test_a_prompt_of_channels_says_in_which_message_its_answer_begins(
    tmp_path: Path, channel: str, changed: dict[str, Any]
) -> None:
    usual = markup(make_encoder(tmp_path, "harmony"))
    template = tmp_path / "chat_template.jinja"
    end = "'<|start|>assistant' }}{%- endif %}"
    written = template.read_text()
    assert written.count(end) == 1
    template.write_text(written.replace(end, f"'<|start|>assistant<|channel|>{channel}<|message|>' }}}}{{%- endif %}}"))
    assert markup(PromptEncoder(tmp_path)) == usual.model_copy(update=changed)


@pytest.mark.parametrize(
    ("begun", "expected"),
    [("<think>\nIt may", Markup(think=THINK, opens_thinking=True)), ("So", Markup()), ("", Markup(think=THINK))],
)
def test_an_answer_that_is_continued_says_it_by_its_beginning(tmp_path: Path, begun: str, expected: Markup) -> None:
    encoder = make_encoder(tmp_path, "qwen3")
    message = {"role": "assistant", "content": begun}
    options = {"calls": None, "add_generation_prompt": False, "continue_final_message": True}
    assert markup(encoder, USER, message, **options) == expected


def test_a_replay_has_the_recorded_markup(tmp_path: Path) -> None:
    recorded = Markup(tools="hermes", think=THINK, tokens=(3,))
    event = chat().model_copy(update={"messages": (), "prompt_ids": (1, 2), "replay": Replay(of="u", markup=recorded)})
    assert make_encoder(tmp_path, "plain").render(event).markup == recorded
