"""The text of single tokens, against what the tokenizers library decodes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from support.checkpoints import TEXT, train_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.spelling import Spelling, text_of


def byte_level() -> Tokenizer:
    tokenizer: Tokenizer = train_tokenizer(480, with_bos=False).backend_tokenizer
    return tokenizer


def sentencepiece(*steps: decoders.Decoder) -> Tokenizer:
    """As Llama 2 and Gemma have it: a space is `▁`, and what the vocabulary lacks is written in bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {piece: 256 + place for place, piece in enumerate(["▁", "a", "b", "▁a", "<s>", "<0xZZ>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence([*steps, decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "replace": lambda: sentencepiece(decoders.Replace("▁", " ")),
    "metaspace": lambda: sentencepiece(decoders.Metaspace(prepend_scheme="never")),
}


@pytest.fixture(params=list(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return TOKENIZERS[request.param]()


def spelling_of(tokenizer: Tokenizer) -> Spelling:
    return Spelling.of(json.loads(tokenizer.to_str())["decoder"])


def test_every_token_has_the_text_that_the_library_decodes_or_bytes_that_are_none(tokenizer: Tokenizer) -> None:
    spelling = spelling_of(tokenizer)
    num_texts = num_bytes = 0
    for piece, token in tokenizer.get_vocab().items():
        decoded = tokenizer.decode([token], skip_special_tokens=False)
        told = text_of(spelling.bytes_of(piece))
        if "\ufffd" in decoded:
            num_bytes += 1
            assert told.startswith("bytes:\\x"), piece
        else:
            num_texts += 1
            assert told == decoded, piece
    assert num_texts > 100 and num_bytes > 100


def test_the_bytes_of_a_texts_tokens_are_its_own(tokenizer: Tokenizer) -> None:
    text = TEXT if tokenizer.decoder.__class__ is decoders.ByteLevel else "▁a▁b你🙂".replace("▁", " ")
    tokens = tokenizer.encode(text.replace(" ", "▁") if text != TEXT else text).tokens
    assert b"".join(map(spelling_of(tokenizer).bytes_of, tokens)) == text.encode()


def test_part_of_a_character_is_told_byte_by_byte() -> None:
    assert text_of(b"\xe4") == "bytes:\\xe4"
    assert text_of(b" \xe4\x0a") == "bytes:\\x20\\xe4\\x0a"
    assert text_of("你".encode()) == "你"


def test_where_nothing_is_known_of_the_decoder_a_token_is_as_it_is_spelled() -> None:
    for decoder in (None, {"type": "WordPiece", "prefix": "##", "cleanup": True}):
        assert Spelling.of(decoder).bytes_of("Ġ▁<0xE4>") == "Ġ▁<0xE4>".encode()


def test_an_added_token_that_has_a_space_is_as_it_is() -> None:
    assert Spelling(byte_level=True).bytes_of("end of text") == b"end of text"


def test_a_tokenizer_trained_on_characters_has_them_for_texts() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(["ab ab"], trainers.BpeTrainer(vocab_size=4, show_progress=False))
    assert [text_of(spelling_of(tokenizer).bytes_of(piece)) for piece in ("a", "ab")] == ["a", "ab"]
