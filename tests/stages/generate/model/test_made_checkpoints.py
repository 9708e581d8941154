"""The checkpoints that the tests make have what other tests rely on."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import BOS, END, FAMILIES, STOP, Family, make_checkpoint
from transformers import PreTrainedTokenizerFast

from stages.generate.model.config import read_spec


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_has_what_is_hard_about_tokenizers(tmp_path: Path, family: Family) -> None:
    make_checkpoint(tmp_path, family)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    one, several = (tokenizer.encode(text, add_special_tokens=False) for text in ("你好", "龍"))
    assert len(one) == 1 and len(several) == 3 and tokenizer.decode(several) == "龍"
    assert (tokenizer.encode("x")[0] == tokenizer.get_vocab().get(BOS)) == (family == "llama3")
    assert read_spec(tmp_path).eos_ids == tuple(sorted(tokenizer.get_vocab()[token] for token in (STOP, END)))
    assert read_spec(tmp_path).vocab_size == len(tokenizer)
