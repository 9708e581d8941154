"""The text of a single token, in the vocabularies that there are."""

from __future__ import annotations

from support.checkpoints import STOP, train_tokenizer
from tokenizers import AddedToken

from stages.detokenize.text import token_text_of


def test_the_bytes_of_all_pieces_are_the_text() -> None:
    tokenizer = train_tokenizer(400, with_bos=False).backend_tokenizer
    piece = token_text_of(tokenizer)
    text = "Grüße, 你好 🙂\n\tsea shells"
    raw = b""
    for token in tokenizer.encode(text).ids:
        told = piece(token)
        raw += bytes.fromhex(told.removeprefix("bytes:").replace("\\x", "")) if told[:6] == "bytes:" else told.encode()
    assert raw.decode() == text
    assert any(piece(token).startswith("bytes:\\x") for token in tokenizer.encode("🙂").ids)


def test_a_special_token_is_told_as_it_is_written_and_one_that_there_is_not_as_nothing() -> None:
    tokenizer = train_tokenizer(400, with_bos=False).backend_tokenizer
    assert token_text_of(tokenizer)(tokenizer.get_vocab()[STOP]) == STOP
    assert token_text_of(tokenizer)(100_000) == ""


def test_an_added_word_is_told_as_it_is_written() -> None:
    tokenizer = train_tokenizer(400, with_bos=False).backend_tokenizer
    tokenizer.add_tokens([AddedToken("Ġ raw", special=False)])
    assert token_text_of(tokenizer)(tokenizer.get_vocab()["Ġ raw"]) == "Ġ raw"
