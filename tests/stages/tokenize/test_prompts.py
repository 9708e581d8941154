"""Templates and encoding, on a tokenizer trained on the spot and loaded as a server loads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import BOS, train_tokenizer
from transformers import PreTrainedTokenizerFast

from pipeline.errors import ConfigError, RequestError
from pipeline.events import SamplingParams, Submitted
from stages.tokenize.prompts import PromptEncoder, Rendered


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that adds a BOS token, and whose template writes one too."""
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(480, with_bos=True).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def encoder(folder: Path) -> PromptEncoder:
    return PromptEncoder(folder)


def chat(*turns: tuple[str, str]) -> Submitted:
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return Submitted(endpoint="chat", frontend="web-0", messages=messages, sampling=SamplingParams())


def plain(text: str) -> Submitted:
    return Submitted(endpoint="chat", frontend="web-0", prompt=text, sampling=SamplingParams())


def test_a_conversation_gives_the_ids_that_transformers_gives(folder: Path, encoder: PromptEncoder) -> None:
    event = chat(("system", "Be brief."), ("user", "你好, how are you? 🙂"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = tokenizer.apply_chat_template(
        [dict(message) for message in event.messages], add_generation_prompt=True, return_dict=True
    )
    assert encoder.encode([encoder.render(event)]) == [tuple(expected["input_ids"])]


@pytest.mark.parametrize("event", [chat(("user", "hello")), plain("hello")], ids=["template", "plain"])
def test_a_prompt_begins_with_one_bos_token_and_not_two(folder: Path, encoder: PromptEncoder, event: Submitted) -> None:
    bos = PreTrainedTokenizerFast.from_pretrained(folder).convert_tokens_to_ids(BOS)
    (ids,) = encoder.encode([encoder.render(event)])
    assert ids[0] == bos and ids.count(bos) == 1


def test_a_batch_of_both_kinds_is_encoded_as_each_would_be_alone(encoder: PromptEncoder) -> None:
    prompts = [encoder.render(event) for event in (plain("one"), chat(("user", "two")), plain("three is longer"))]
    assert encoder.encode(prompts) == [encoder.encode([prompt])[0] for prompt in prompts]


def test_token_ids_stay_as_they_are_beside_texts_that_are_encoded(encoder: PromptEncoder) -> None:
    ids = Submitted(endpoint="e", frontend="f", prompt_ids=(7, 5, 7), sampling=SamplingParams())
    prompts = [encoder.render(event) for event in (plain("one"), ids, chat(("user", "two")))]
    assert encoder.encode(prompts) == [
        *encoder.encode(prompts[:1]),
        (7, 5, 7),
        *encoder.encode(prompts[2:]),
    ]


def test_a_template_that_refuses_is_quoted(encoder: PromptEncoder) -> None:
    with pytest.raises(RequestError, match="roles must alternate") as raised:
        encoder.render(chat(("user", "one"), ("user", "two")))
    assert (raised.value.status, raised.value.code, raised.value.param) == (400, "template_error", "messages")


def test_without_a_template_messages_are_refused_and_prompts_are_not(folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    bare = PromptEncoder(tmp_path)
    with pytest.raises(RequestError, match="no chat template"):
        bare.render(chat(("user", "hello")))
    assert bare.encode([bare.render(plain("hello"))])


def test_a_template_in_the_tokenizer_config_is_used(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert PromptEncoder(tmp_path).render(chat(("user", "hello"))).text == "[hello]"


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(encoder: PromptEncoder) -> None:
    with pytest.raises(RequestError, match="64 tokens") as raised:
        encoder.refuse_too_long(Rendered("x" * 1_000_000, True, "prompt"), context=64)
    assert raised.value.code == "context_length_exceeded" and raised.value.param == "prompt"
    encoder.refuse_too_long(Rendered("x" * 63, True, "prompt"), context=64)


def test_another_template_is_another_fingerprint(folder: Path, tmp_path: Path, encoder: PromptEncoder) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert PromptEncoder(tmp_path).fingerprint == encoder.fingerprint
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert PromptEncoder(tmp_path).fingerprint != encoder.fingerprint


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: not a tokenizer"):
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
    event = plain("hello").model_copy(update={"sampling": SamplingParams(**sampling)})
    said = f"{param}: token 480 is none of this model's, which go from 0 to 479"
    with pytest.raises(RequestError, match=said) as raised:
        encoder.render(event)
    assert (raised.value.status, raised.value.param) == (400, param)
