"""The checkpoints that the tests make have what other tests rely on."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest
from checkpoints import BOS, END, FAMILIES, STOP, Family, make_checkpoint, reference_tokens
from transformers import PreTrainedTokenizerFast

from stages.generate.model.spec import read_spec


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_has_what_is_hard_about_tokenizers(tmp_path: Path, family: Family) -> None:
    make_checkpoint(tmp_path, family)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    one, several = (tokenizer.encode(text, add_special_tokens=False) for text in ("你好", "龍"))
    assert len(one) == 1 and len(several) == 3 and tokenizer.decode(several) == "龍"
    assert (tokenizer.encode("x")[0] == tokenizer.get_vocab().get(BOS)) == (family == "llama3")
    assert read_spec(tmp_path).eos_ids == tuple(sorted(tokenizer.get_vocab()[token] for token in (STOP, END)))
    assert read_spec(tmp_path).vocab_size == len(tokenizer)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_template_refuses_two_user_messages_in_a_row(tmp_path: Path, family: Family) -> None:
    make_checkpoint(tmp_path, family)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    user, assistant = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
    text = tokenizer.apply_chat_template([user, assistant, user], add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str) and text.startswith(BOS) == (family == "llama3")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(jinja2.TemplateError, match="roles must alternate"):
        tokenizer.apply_chat_template([user, user], tokenize=False)


def test_reference_tokens_end_with_an_eos_unless_told_otherwise(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    full, _ = reference_tokens(tmp_path, [7, 8, 9], 20)
    short, _ = reference_tokens(tmp_path, [7, 8, 9], 20, ignore_eos=False)
    assert len(short) < len(full) == 20 and full[: len(short)] == short
    assert [token for token in short if token in read_spec(tmp_path).eos_ids] == short[-1:]
