"""The demo model's tokenizer and template: what is trained is what a server sends."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ops.demo_model import wordings
from ops.demo_model.corpus import Maker, conversations
from ops.demo_model.messages import Conversation
from ops.demo_model.tokens import MARKS, SPECIAL_TOKENS, STOP, Encoder, answer_of, render, write_tokenizer
from pipeline.spelling import Spelling
from stages.generate.model.checkpoint import check_tokenizer


@pytest.fixture(scope="module")
def loaded(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(tokenizer, folder)
    check_tokenizer(folder)
    found = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    assert isinstance(found, PreTrainedTokenizerFast)
    return found


def some(number: int) -> list[Conversation]:
    return list(itertools.islice(conversations("tokens"), number))


def test_a_conversation_is_trained_as_the_template_renders_it(loaded: PreTrainedTokenizerFast) -> None:
    seen = set()
    for conversation in some(300):
        tools: list[Any] | None = list(conversation.tools) or None
        assert loaded.apply_chat_template(list(conversation.messages), tools=tools, tokenize=False) == render(
            conversation
        )
        seen.add((conversation.family, conversation.messages[0]["role"]))
    assert seen == {(family, role) for family in ("plain", "memory", "tools") for role in ("system", "user")}


def test_a_prompt_is_what_stands_before_the_answer(loaded: PreTrainedTokenizerFast) -> None:
    for conversation in some(100):
        *before, last = conversation.messages
        tools: list[Any] | None = list(conversation.tools) or None
        prompt = loaded.apply_chat_template(before, tools=tools, add_generation_prompt=True, tokenize=False)
        assert f"{prompt}{answer_of(last)}{STOP}\n" == render(conversation)
        prompt_ids, whole_ids = loaded(prompt)["input_ids"], loaded(render(conversation))["input_ids"]
        assert whole_ids[: len(prompt_ids)] == prompt_ids


def test_calls_and_results_that_come_together_are_rendered_together(loaded: PreTrainedTokenizerFast) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    messages: list[Any] = [
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "3"},
    ]
    one = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    result = "\n<tool_response>\n3\n</tool_response>"
    assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        f"<|im_start|>user\n1 + 2<|im_end|>\n<|im_start|>assistant\n{one}\n{one}<|im_end|>\n"
        f"<|im_start|>user{result}{result}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_answers_and_their_ends_are_learned_and_nothing_else(tokenizer: Tokenizer) -> None:
    encoder = Encoder(tokenizer)
    batch = some(200)
    for conversation, (ids, learned) in zip(batch, encoder.encode(batch), strict=True):
        assert len(ids) == len(learned) and tokenizer.decode(ids, skip_special_tokens=False) == render(conversation)
        kept = tokenizer.decode(list(itertools.compress(ids, learned)), skip_special_tokens=False)
        answers = [answer_of(message) for message in conversation.messages if message["role"] == "assistant"]
        assert kept == "".join(answer + STOP for answer in answers)


def test_words_of_the_corpus_are_one_token_and_values_their_letters(loaded: PreTrainedTokenizerFast) -> None:
    assert loaded.tokenize("Spell the word banana") == ["Spell", "Ġthe", "Ġword", "Ġ", *"banana"]
    assert loaded.tokenize("b a n") == ["b", "Ġa", "Ġn"]
    assert loaded.tokenize("12 + 305") == ["1", "2", "Ġ+", "Ġ", "3", "0", "5"]
    for value in (*wordings.values("names")[:20], *wordings.values("words")[:20]):
        assert loaded.tokenize(value) == list(value)


def test_any_text_survives_and_the_vocabulary_is_small(tokenizer: Tokenizer) -> None:
    assert 1000 <= tokenizer.get_vocab_size() <= 2000
    random = Random(0)
    for _ in range(200):
        text = "".join(
            chr(random.choice((random.randrange(32, 127), random.randrange(160, 0x3000)))) for _ in range(30)
        )
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_marks_of_a_call_are_text_and_the_marks_of_a_turn_are_not(loaded: PreTrainedTokenizerFast) -> None:
    text = "".join((*SPECIAL_TOKENS, *MARKS))
    ids = loaded(text)["input_ids"]
    assert len(ids) == len(SPECIAL_TOKENS) + len(MARKS)
    assert loaded.decode(ids, skip_special_tokens=True) == "".join(MARKS)


def test_the_pieces_of_a_stream_are_those_of_the_whole(tokenizer: Tokenizer) -> None:
    spelling = Spelling.of({"type": "ByteLevel"})
    maker = Maker(Random(1), held_out=True)
    text = render(maker.memory())
    tokens = tokenizer.encode(text).tokens
    assert b"".join(spelling.bytes_of(token) for token in tokens).decode() == text
