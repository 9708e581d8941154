"""Templates and encoding, on a tokenizer trained on the spot and loaded as a server loads it."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import BOS, END, START, STOP, TEXT, train_tokenizer
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

import stages.tokenize.prompts
from pipeline.errors import ConfigError, RequestError
from pipeline.events import Replay, SamplingParams, Submitted, Task, Templating
from stages.tokenize.prompts import (
    LARGEST_PART_BYTES,
    LONG_TEXT,
    PromptEncoder,
    Rendered,
    is_cut,
    limit_too_high,
    tokens_kept,
)
from stages.tokenize.templates import NO_VARIABLES

TOOL_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}{{ '<|im_start|>tools\\n' }}
{%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role }}
{%- if message.tool_call_id %}{{ ' ' + message.tool_call_id }}{% endif %}{{ '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' + call.id + ' ' + call.function.name }}
{%- for name, value in call.function.arguments.items() %}{{ ' ' + name + '=' + value | tojson }}{% endfor %}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"""
"""What the templates of Qwen, Llama and Mistral have in common: tools, calls whose arguments are objects, a switch."""
ARGUMENTS = {"at": "你好", "deep": [1, None, {"a": True}], "big": 10**20}
TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {"type": "object", "default": None}}},)
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": json.dumps(ARGUMENTS)}}
CONVERSATION = (
    {"role": "system", "content": "Look."},
    {"role": "user", "content": "What is there?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, {**CALL, "id": "c2"}]},
    {"role": "tool", "content": "A sea.", "tool_call_id": "c1"},
    {"role": "assistant", "content": "There is a"},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that adds a BOS token, and whose template writes one too."""
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(480, with_bos=True).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def encoder(folder: Path) -> PromptEncoder:
    return PromptEncoder(folder)


@pytest.fixture(scope="module")
def tool_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools")
    tokenizer = train_tokenizer(480, with_bos=True)
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def asked(task: Task = "generate", **fields: Any) -> Submitted:
    return Submitted(endpoint="e", frontend="f", task=task, **{"sampling": SamplingParams(), **fields})


def chat(*contents: str, **fields: Any) -> Submitted:
    """Return a conversation of the user alone."""
    return asked(messages=tuple({"role": "user", "content": content} for content in contents), **fields)


def plain(text: str, **fields: Any) -> Submitted:
    return asked(prompt=text, **fields)


def sampled(**sampling: Any) -> Submitted:
    return plain("a", sampling=SamplingParams(**sampling))


def refused(match: str, work: Callable[..., object], *arguments: object, **options: object) -> RequestError:
    """Return the error with which *work* refuses."""
    with pytest.raises(RequestError, match=match) as raised:
        work(*arguments, **options)
    return raised.value


def copied(folder: Path, to: Path, *more: str, **config: object) -> Path:
    """Copy the tokenizer in *folder*, and *more* files; *config* changes its tokenizer_config.json."""
    for name in ("tokenizer.json", "tokenizer_config.json", *more):
        (to / name).write_bytes((folder / name).read_bytes())
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    (to / "tokenizer_config.json").write_text(json.dumps(fields | config))
    return to


@contextmanager
def largest_memory() -> Iterator[Callable[[], int]]:
    """Yield what says by how many bytes this process has grown since then, at most."""

    def largest() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    Path("/proc/self/clear_refs").write_text("5")
    before = largest()
    yield lambda: largest() - before


def encoded(encoder: PromptEncoder, event: Submitted) -> tuple[int, ...]:
    (ids,) = encoder.encode([encoder.render(event)])
    return tuple(ids)


def test_a_tokenizer_tells_which_text_it_puts_before_a_prompt(encoder: PromptEncoder, tmp_path: Path) -> None:
    train_tokenizer(300, with_bos=False).save_pretrained(tmp_path)
    assert (encoder.bos, PromptEncoder(tmp_path).bos) == (BOS, "")


def test_a_batch_of_all_kinds_is_encoded_as_each_would_be_alone(encoder: PromptEncoder) -> None:
    """Token ids stay as they are."""
    events = (plain("one"), chat("two"), asked(prompt_ids=(7, 5, 7)), plain("three is longer"))
    batch = encoder.encode([encoder.render(event) for event in events])
    assert batch == [encoded(encoder, event) for event in events] and batch[2] == (7, 5, 7)


def test_a_template_that_refuses_is_quoted(encoder: PromptEncoder) -> None:
    error = refused("roles must alternate", encoder.render, chat("one", "two"))
    assert (error.status, error.code, error.param) == (400, "template_error", "messages")


def test_without_a_template_messages_are_refused_and_prompts_are_not(folder: Path, tmp_path: Path) -> None:
    bare = PromptEncoder(copied(folder, tmp_path))
    refused("no chat template", bare.render, chat("hello"))
    assert encoded(bare, plain("hello")) and json.loads(bare.describe())["chat_template"] is None


def test_a_template_in_the_tokenizer_config_is_used(folder: Path, tmp_path: Path) -> None:
    copied(folder, tmp_path, chat_template="{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    assert PromptEncoder(tmp_path).render(chat("hello")).text == "[hello]"


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(encoder: PromptEncoder) -> None:
    error = refused("64 tokens", encoder.refuse_too_long, Rendered("x" * 1_000_000, True, "prompt"), context=64)
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    encoder.refuse_too_long(Rendered("x" * 63, True, "prompt"), context=64)


@pytest.mark.parametrize("letter", ["a", " ", "\n", "ß"])
def test_a_long_text_that_cannot_be_cut_is_refused_before_it_is_encoded(encoder: PromptEncoder, letter: str) -> None:
    most = LARGEST_PART_BYTES // len(letter.encode())
    for refuse in (encoder.refuse_too_large, encoder.refuse_too_long):
        error = refused(str(LARGEST_PART_BYTES), refuse, Rendered(letter * (most + 1), True, "prompt"), context=1 << 30)
        assert (error.code, error.param, error.status) == ("request_too_large", "prompt", 413)
        refuse(Rendered(letter * most, True, "prompt"), context=1 << 30)
        refuse(Rendered(f"{letter * (most - 99)} and more. " * 5, True, "prompt"), context=1 << 30)


def test_another_template_is_another_fingerprint(folder: Path, tmp_path: Path, encoder: PromptEncoder) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert PromptEncoder(tmp_path).fingerprint == encoder.fingerprint
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert PromptEncoder(tmp_path).fingerprint != encoder.fingerprint


@pytest.mark.parametrize("special", [True, False])
def test_a_token_that_only_the_tokenizer_config_adds_is_one_of_the_dialect(
    folder: Path, tmp_path: Path, special: bool
) -> None:
    copied(folder, tmp_path, added_tokens_decoder={"480": {"content": "<my_tool>", "special": special}})
    encoder = PromptEncoder(tmp_path)
    assert encoder.dialect.added.ids["<my_tool>"] == 480
    assert (480 in encoder.dialect.added.special) is special
    assert encoded(encoder, plain("a<my_tool>"))[-1] == 480


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        PromptEncoder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        PromptEncoder(tmp_path)


@pytest.mark.parametrize(
    ("param", "sampling"),
    [
        ("logit_bias", {"logit_bias": ((3, 1.0), (480, 1.0))}),
        ("allowed_token_ids", {"allowed_token_ids": (3, 480, 9999)}),
    ],
)
def test_a_token_that_the_model_does_not_have_is_refused_by_its_number(
    encoder: PromptEncoder, param: str, sampling: dict[str, Any]
) -> None:
    said = f"{param}: this model has no token 480; its tokens go from 0 to 479"
    error = refused(said, encoder.render, sampled(**sampling))
    assert (error.status, error.param) == (400, param)


# what a template is given


@pytest.mark.parametrize(
    "templating",
    [
        Templating(),
        Templating(add_generation_prompt=False),
        Templating(add_generation_prompt=False, continue_final_message=True),
        Templating(tools=TOOLS),
        Templating(variables={"enable_thinking": False, "unheard_of": {"a": [1]}}),
        Templating(variables={"enable_thinking": False, "bos_token": "", "kwargs": 1}),
    ],
    ids=["as it is", "no answer opened", "continued", "tools", "variables", "a variable of the tokenizer's"],
)
def test_a_template_is_given_what_transformers_gives_it(tool_folder: Path, templating: Templating) -> None:
    event = asked(messages=CONVERSATION, templating=templating)
    called = [{**CALL, "id": name, "function": {"name": "look", "arguments": ARGUMENTS}} for name in ("c1", "c2")]
    messages = [{**message, "tool_calls": called} if "tool_calls" in message else message for message in CONVERSATION]
    expected = PreTrainedTokenizerFast.from_pretrained(tool_folder).apply_chat_template(
        messages,
        tools=list(templating.tools) or None,
        add_generation_prompt=templating.add_generation_prompt,
        continue_final_message=templating.continue_final_message,
        return_dict=True,
        **templating.variables,
    )
    encoder = PromptEncoder(tool_folder)
    assert encoded(encoder, event) == tuple(expected["input_ids"])
    text = encoder.render(event).text
    assert 'c2 look at="你好" deep=[1, null, {"a": true}] big=100000000000000000000' in text
    assert ("<think></think>" in text) == bool(templating.variables)
    assert ('"default": null' in text) == bool(templating.tools)
    assert text.endswith("There is a") == templating.continue_final_message
    assert event.messages == CONVERSATION, "what was submitted is not changed"


def test_a_call_without_arguments_has_none(tool_folder: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": ""}}
    event = asked(messages=({"role": "assistant", "content": "", "tool_calls": [call]},))
    assert "c1 look<|im_end|>" in PromptEncoder(tool_folder).render(event).text


def test_both_an_opened_answer_and_a_continued_one_are_refused(encoder: PromptEncoder) -> None:
    event = chat("a", templating=Templating(continue_final_message=True))
    assert refused("cannot be combined", encoder.render, event).param == "continue_final_message"


def test_every_argument_of_our_own_call_is_no_variable_of_a_clients(encoder: PromptEncoder) -> None:
    taken = {"messages", "tokenize", "return_dict", "chat_template", "conversation", "self", "tools", "max_length"}
    signature = inspect.signature(PreTrainedTokenizerFast.apply_chat_template)
    assert taken <= NO_VARIABLES and set(signature.parameters) - {"kwargs"} <= NO_VARIABLES
    for name in NO_VARIABLES:
        event = chat("a", templating=Templating(variables={"fine": 1, name: "x"}))
        error = refused(f"`{name}`", encoder.render, event)
        assert (error.status, error.param) == (400, "chat_template_kwargs")


def test_what_transformers_says_of_a_conversation_is_not_all_of_it(encoder: PromptEncoder, tmp_path: Path) -> None:
    templating = Templating(add_generation_prompt=False, continue_final_message=True)
    tokenizer = train_tokenizer(300, with_bos=False)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content | replace('x', 'y') }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    event = chat("x" * 10_000, templating=templating)
    assert len(refused("does not appear in the chat", PromptEncoder(tmp_path).render, event).message) < 500


@pytest.mark.parametrize("add", [None, False, True])
def test_special_tokens_are_added_as_it_is_asked_for(folder: Path, encoder: PromptEncoder, add: bool | None) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = tokenizer(["hello"], add_special_tokens=add is not False)["input_ids"][0]
    assert encoded(encoder, plain("hello", add_special_tokens=add)) == tuple(text)
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer([rendered], add_special_tokens=add is True)["input_ids"][0]
    assert encoded(encoder, chat("hello", add_special_tokens=add)) == tuple(ids) and ids.count(ids[0]) == (
        2 if add else 1
    )


# truncation


@pytest.fixture(scope="module")
def surrounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that puts two tokens before a text and one after it."""
    tokenizer = train_tokenizer(480, with_bos=True)
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (BOS, START, END)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} {START} $A {END}", special_tokens=ids
    )
    path = tmp_path_factory.mktemp("surrounded")
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 17, 100_000])
def test_the_tokens_of_one_side_are_kept_beside_those_that_the_tokenizer_adds_as_in_transformers(
    folder: Path, surrounded: Path, num_tokens: int, side: str
) -> None:
    for path in (folder, surrounded):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path, truncation_side=side)
        encoder = PromptEncoder(path)
        num_added = tokenizer.num_special_tokens_to_add()
        for special in (True, False):
            rendered = encoder.render(plain(TEXT[:300], add_special_tokens=special))
            (ids,) = encoder.encode([rendered])
            kept = encoder.keep(num_tokens, rendered, ids, first=side == "right")
            if special and num_tokens <= num_added:  # where transformers refuses, or keeps nothing of the text
                assert kept == (ids[-num_tokens:] if side == "left" else ids[:num_tokens])
            else:
                expected = tokenizer(TEXT[:300], add_special_tokens=special, truncation=True, max_length=num_tokens)[
                    "input_ids"
                ]
                assert kept == tuple(expected)


@pytest.mark.parametrize("special", [True, False])
def test_a_long_text_has_the_tokens_that_it_has_as_a_whole_and_the_special_ones_once(
    folder: Path, surrounded: Path, special: bool
) -> None:
    text = TEXT * (LONG_TEXT // len(TEXT) + 1)
    for path in (folder, surrounded):
        tokenizer, encoder = PreTrainedTokenizerFast.from_pretrained(path), PromptEncoder(path)
        rendered = encoder.render(plain(text, add_special_tokens=special))
        expected = tokenizer(text, add_special_tokens=special)["input_ids"]
        (alone,), (between, brief) = encoder.encode([rendered]), encoder.encode([rendered, Rendered("a", False, "")])
        assert [*alone] == [*between] == expected and len(brief) == 1
        assert encoder.keep(len(expected), rendered, alone) == tuple(expected)


def test_memory_for_a_long_text_is_that_of_a_part(encoder: PromptEncoder) -> None:
    """A process has more than this test, so only what it takes at most is looked at."""
    rendered = Rendered("the quick brown fox. " * 100_000, False, "prompt")
    with largest_memory() as grown:
        (token_ids,) = encoder.encode([rendered])
    assert len(token_ids) > 400_000 and grown() < 30 << 20


def test_of_tokens_that_came_as_such_and_of_conversations_the_last_are_kept(encoder: PromptEncoder) -> None:
    for event in (asked(prompt_ids=(7, 5, 9)), chat("hello")):
        rendered = encoder.render(event)
        (ids,) = encoder.encode([rendered])
        assert encoder.keep(2, rendered, ids) == ids[-2:]
        assert encoder.keep(2, rendered, ids, first=True) == ids[:2]
        assert encoder.keep(0, rendered, ids) == encoder.keep(0, rendered, ids, first=True) == ()


@pytest.mark.parametrize(
    ("truncate", "max_tokens", "kept"),
    [(None, 5, None), (3, 5, 3), (200, None, 200), (-1, None, 99), (-1, 1, 99), (-1, 60, 40), (-1, 99, 1)],
)
def test_minus_1_is_all_that_there_is_room_for_beside_the_answer(
    truncate: int | None, max_tokens: int | None, kept: int | None
) -> None:
    limit, sampling = "max_tokens" if max_tokens else "", SamplingParams(max_tokens=max_tokens)
    event = plain("x", limit=limit, truncate_prompt_tokens=truncate, sampling=sampling)
    assert tokens_kept(event, context=100) == kept


@pytest.mark.parametrize(("max_tokens", "kept"), [(None, 99), (5, 95), (50, 50), (60, 50), (100, 50), (32_000, 50)])
def test_an_answer_that_need_not_fit_takes_at_most_half_of_the_context_from_a_prompt_that_is_too_long(
    max_tokens: int | None, kept: int
) -> None:
    event = plain("x", truncate_prompt_tokens=-1, sampling=SamplingParams(max_tokens=max_tokens))
    assert tokens_kept(event, context=100) == kept
    assert [is_cut(event, num_tokens, 100) for num_tokens in (1, 99, 100, 1000)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("limit", "max_tokens", "fits"),
    [("max_tokens", 60, True), ("max_tokens", 61, False), ("max_tokens", None, True), ("", 61, True)],
)
def test_a_limit_that_the_client_set_must_fit_beside_the_prompt(limit: str, max_tokens: int | None, fits: bool) -> None:
    event = plain("x", limit=limit, sampling=SamplingParams(max_tokens=max_tokens))
    error = limit_too_high(40, event, 100)
    assert (error is None) is fits
    if error is not None:
        assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "max_tokens")
        assert {"100", "40", "61", "60"} <= set(re.findall(r"\d+", error.message))


def test_an_answer_that_leaves_no_room_for_a_prompt_is_refused() -> None:
    event = plain("x", limit="max_tokens", truncate_prompt_tokens=-1, sampling=SamplingParams(max_tokens=100))
    error = refused("no room for a prompt", tokens_kept, event, context=100)
    assert (error.status, error.param) == (400, "max_tokens")


def test_a_text_that_need_not_fit_is_refused_for_its_size_in_bytes_alone(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages.tokenize.prompts, "LARGEST_TEXT_BYTES", 3000)
    fits = Rendered("你" * 1000, True, "prompt")
    encoder.refuse_too_large(fits, context=16)
    larger = Rendered(fits.text + "a", True, "prompt")
    error = refused("3001 bytes", encoder.refuse_too_large, larger, context=16)
    assert (error.status, error.code, error.param) == (413, "request_too_large", "prompt")
    encoder.refuse_too_large(larger, context=1001)  # as a prompt it might fit


# bad words


def vllms_bad_words(tokenizer: PreTrainedTokenizerFast, words: list[str]) -> list[list[int]]:
    """Return what vLLM makes of them (SamplingParams.update_from_tokenizer), as its documentation has it."""
    found: list[list[int]] = []
    for word in words:
        alone, spaced = (tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False) for prefix in ("", " "))
        found.append(alone)
        if len(alone) == len(spaced) and alone[0] != spaced[0]:
            found.append(spaced)
    return found


def test_a_bad_word_is_meant_at_the_beginning_of_a_text_and_after_a_space(folder: Path, encoder: PromptEncoder) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    words = ["sea", " sea", "log", "the log", "你好", "x", "shells sea", STOP]
    expected = vllms_bad_words(tokenizer, words)
    for event in (plain("a"), chat("a"), asked(prompt_ids=(5,))):
        event = event.model_copy(update={"sampling": SamplingParams(bad_words=tuple(words))})
        assert encoder.render(event).bad_words == tuple(dict.fromkeys(map(tuple, expected)))
    # some have both forms, some one, and what comes twice is there once
    assert len(words) < len(expected) < 2 * len(words) and len(encoder.render(event).bad_words) < len(expected)
    assert encoder.render(plain("a")).bad_words == ()


@pytest.mark.parametrize("word", ["", " ", "\n\t"])
def test_a_bad_word_of_nothing_but_space_is_refused(encoder: PromptEncoder, word: str) -> None:
    error = refused("only space", encoder.render, sampled(bad_words=("fine", word)))
    assert (error.status, error.param) == (400, "bad_words")


def test_a_replay_has_its_recorded_tokens_and_bad_words_which_are_not_encoded_again(encoder: PromptEncoder) -> None:
    event = asked(prompt_ids=(5, 6)).model_copy(
        update={"sampling": SamplingParams(bad_words=(" ",)), "replay": Replay(of="u", bad_words=((7,), (8, 9)))}
    )
    rendered = encoder.render(event)
    assert (rendered.bad_words, encoder.encode([rendered])) == (((7,), (8, 9)), [(5, 6)])


def test_bad_words_that_are_a_book_are_refused(encoder: PromptEncoder) -> None:
    refused("characters together", encoder.render, sampled(bad_words=("x" * 40_000, "y" * 40_000)))


# token ids


def test_token_ids_that_the_model_has_no_embedding_for_are_refused_by_their_number(
    folder: Path, encoder: PromptEncoder, tmp_path: Path
) -> None:
    refused(
        "prompt: this model has no token 480; its tokens go from 0 to 479", encoder.render, asked(prompt_ids=(480,))
    )
    refused("no token -1;", encoder.render, asked(prompt_ids=(3, -1)))
    copied(folder, tmp_path)
    for config in ({"vocab_size": 512}, {"text_config": {"vocab_size": 512}}):  # which has more than the tokenizer
        (tmp_path / "config.json").write_text(json.dumps(config))
        padded = PromptEncoder(tmp_path)
        assert padded.render(asked(prompt_ids=(480, 511))).token_ids == (480, 511)
        refused("no token 512; its tokens go from 0 to 511", padded.render, asked(prompt_ids=(480, 512)))


@pytest.mark.parametrize("skip", [False, True])
def test_token_ids_become_the_text_that_transformers_decodes(folder: Path, encoder: PromptEncoder, skip: bool) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = (*encoded(encoder, chat(TEXT)), *encoded(encoder, plain("🙂"))[:2])  # the last is half a character
    sampling = SamplingParams(skip_special_tokens=skip)
    text = encoder.decode(asked("detokenize", prompt_ids=ids, sampling=sampling))
    assert text == tokenizer.decode(list(ids), skip_special_tokens=skip)
    assert TEXT in text and (START in text) is not skip
    assert encoder.decode(asked("detokenize")) == ""


def test_the_text_of_unknown_tokens_is_refused_by_their_number(encoder: PromptEncoder) -> None:
    for token in (480, -1, 2**31, 2**40):
        event = asked("detokenize", prompt_ids=(3, token, 9999))
        error = refused(f"tokens: this model has no token {token}", encoder.decode, event)
        assert (error.status, error.param) == (400, "tokens")


def test_token_ids_that_stand_for_too_much_text_are_not_decoded(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages.tokenize.prompts, "LARGEST_DECODED_BYTES", 26)
    bos, kept = encoded(encoder, plain("")), SamplingParams(skip_special_tokens=False)
    assert encoder.decode(asked("detokenize", prompt_ids=bos, sampling=kept)) == BOS  # of 17 bytes
    error = refused("34 bytes", encoder.decode, asked("detokenize", prompt_ids=bos * 2, sampling=kept))
    assert (error.status, error.param) == (413, "tokens")


def test_the_pieces_of_a_text_are_its_tokens_as_the_vocabulary_writes_them(encoder: PromptEncoder) -> None:
    ids = encoded(encoder, plain("The sea ☃"))
    first, *pieces = encoder.pieces(ids)
    assert first == BOS and pieces[:2] == ["The", "Ġsea"] and len(pieces) == len(ids) - 1
    assert "".join(pieces) == "TheĠseaĠâĺĥ", "GPT-2's table, byte by byte"


# what a tokenizer is like


def test_a_tokenizer_tells_what_a_client_needs_to_do_without_it(folder: Path, encoder: PromptEncoder) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    told = json.loads(encoder.describe())
    assert (told["bos_token"], told["eos_token"], told["pad_token"], told["unk_token"]) == (BOS, STOP, END, None)
    assert told["chat_template"] == tokenizer.chat_template
    assert told["tokenizer_class"] == json.loads((folder / "tokenizer_config.json").read_text())["tokenizer_class"]
    assert told["model_max_length"] is None
    added = {int(token): fields["content"] for token, fields in told["added_tokens_decoder"].items()}
    assert added == {token: each.content for token, each in tokenizer.added_tokens_decoder.items()}
    assert all(fields["special"] for fields in told["added_tokens_decoder"].values())


def test_a_tokenizer_tells_nothing_of_the_machine_and_no_secret(folder: Path, tmp_path: Path) -> None:
    secret = "hf_a-word-that-must-not-come-out"
    hidden = {"token": secret, "auto_map": secret, "vocab_file": f"/{secret}", "add_prefix_space": secret}
    shown = {"model_max_length": 4096, "add_bos_token": True, "chat_template": "{{ messages }}"}
    text = PromptEncoder(copied(folder, tmp_path, **hidden, **shown)).describe()
    told = json.loads(text)
    assert secret not in text and str(tmp_path) not in text and "name_or_path" not in told
    assert told.items() >= shown.items()


def test_a_tokenizer_with_several_templates_tells_the_one_that_is_used(folder: Path, tmp_path: Path) -> None:
    copied(folder, tmp_path)
    (tmp_path / "chat_template.jinja").write_text("plain {{ messages[0].content }}")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ messages[0].content }}")
    both = PromptEncoder(tmp_path)
    assert json.loads(both.describe())["chat_template"] == "plain {{ messages[0].content }}"
    assert both.render(chat("a")).text == "plain a"
    assert both.render(chat("a", templating=Templating(tools=TOOLS))).text == "tools a"
