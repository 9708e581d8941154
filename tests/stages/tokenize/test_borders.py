"""Texts in parts, against the same texts as a whole, for tokenizers with each kind of step."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.selection import by_night
from support.split_patterns import KNOWN
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

import stages.tokenize.borders
from stages.tokenize.borders import Borders

TEXT = (
    "the quick brown fox, the lazy dog. 12345 the dog's 3.14!\n\n  def f(x1):\n\treturn x1\n字中文字，中。가나다 é " * 3
)
WORDS = "the Quick 's don't x1y22 12345 3.14 中文 字。字 ， かな 가나 각 é e\u0301 .\u0301 😀 👩‍👧 \0 _ -- == < ▁ a▁b"
LETTERS = "=\u0338 ᄀ ᅡ ᆨ Ａ ； ﬁ ß İ ² हि (a) [] / \\ ! ? ..."
BLANKS = (" ", "  ", "   \t", "\n", "\n\n", " \n ", "\r\n", "\u00a0", "\u3000")
PIECES = (*WORDS.split(), *LETTERS.split(), *BLANKS)
FEW = ("a", "b", " ", "1", ".", "\n", "中", "'s")
TOKENS = (
    AddedToken("<|end|>", special=True, normalized=False),
    AddedToken("<mask>", lstrip=True, special=True, normalized=False),
    AddedToken("<user>", rstrip=True, special=True, normalized=False),
    AddedToken("dog. The", normalized=False),
    AddedToken("foo", single_word=True, normalized=False),
    AddedToken("fox", rstrip=True, normalized=False),
)
NORMALIZED = AddedToken("Éa b", normalized=True)


def split(pattern: str, behavior: str = "isolated", **options: Any) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior, **options)


def in_bytes(*steps: Any, **options: Any) -> Any:
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})])


METASPACE = pre_tokenizers.Metaspace
SPACES = normalizers.Replace(" ", "▁")
Steps = tuple[Callable[[], Any] | None, Callable[[], Any] | None]
"""What makes the normalizer, and the pre-tokenizer."""
IN_PARTS: dict[str, Steps] = {
    **{name: (None, partial(in_bytes, split(KNOWN[name]), use_regex=False)) for name in ("Llama 3", "GPT-4o")},
    "DeepSeek": (
        lambda: normalizers.Sequence([]),
        lambda: in_bytes(split(r"\p{N}{1,3}"), split("[一-龥]+"), split(KNOWN["DeepSeek"]), use_regex=False),
    ),
    "GPT-4": (None, lambda: in_bytes(split(KNOWN["Llama 3"], "removed", invert=True), use_regex=False)),
    "Qwen": (normalizers.NFC, lambda: in_bytes(split(KNOWN["Llama 3"].replace("{1,3}", "")), use_regex=False)),
    "GPT-2": (None, lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "a space in front": (None, lambda: pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "composed": (normalizers.NFKC, lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "decomposed": (normalizers.NFD, lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "lower case": (normalizers.Lowercase, lambda: pre_tokenizers.WhitespaceSplit()),
    "digits": (None, lambda: in_bytes(pre_tokenizers.Digits(individual_digits=True))),
    "numbers": (None, lambda: in_bytes(pre_tokenizers.Digits(individual_digits=False))),
    "words": (None, pre_tokenizers.Whitespace),
    "Metaspace": (None, lambda: METASPACE(prepend_scheme="always")),
    "Metaspace first": (None, lambda: METASPACE(prepend_scheme="first")),
    "Metaspace never": (None, lambda: METASPACE(prepend_scheme="never")),
    "Metaspace whole": (None, lambda: METASPACE(prepend_scheme="first", split=False)),
    "Llama 2": (lambda: normalizers.Sequence([normalizers.Prepend("▁"), SPACES]), None),
    "Gemma": (lambda: SPACES, lambda: pre_tokenizers.Split(" ", "merged_with_previous")),
    "two spaces are one": (lambda: normalizers.Replace(Regex(" {2,}"), " "), pre_tokenizers.Whitespace),
}
AS_A_WHOLE: dict[str, Steps] = {
    "unknown normalizer": (normalizers.BertNormalizer, pre_tokenizers.Whitespace),
    "unknown pre-tokenizer": (None, pre_tokenizers.UnicodeScripts),
    "unknown pattern": (None, lambda: split(r"\b\w+\b")),
    "merged": (None, lambda: split(r"\w+", "contiguous")),
    "letters in bytes": (None, lambda: pre_tokenizers.ByteLevel(use_regex=False, add_prefix_space=False)),
    "bytes and then a pattern": (
        None,
        lambda: pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(), split(KNOWN["GPT-2"])]),
    ),
    "a space in front of lines": (lambda: normalizers.Prepend("▁"), None),
}


def tokenizer_of(steps: Steps, model: Any = None) -> Tokenizer:
    """Return a tokenizer of these steps, trained a little."""
    normalizer, pre_tokenizer = steps
    tokenizer = Tokenizer(model if model is not None else models.BPE(unk_token="<unk>", fuse_unk=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer()
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer()
    if model is None:
        # No words, so that no token joins two: of a tokenizer without borders nothing else would be known.
        lines = [word for line in TEXT.splitlines(keepends=True) for word in line.replace(" ", "\0 ").split("\0")]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=600, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
        )
        tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_tokens([*TOKENS])
    return tokenizer


def random_text(draw: random.Random) -> str:
    some = PIECES if draw.random() < 0.7 else FEW
    added = [token.content for token in (*TOKENS, NORMALIZED)]
    return "".join(
        (draw.choice(added) if draw.random() < 0.08 else draw.choice(some)) + (" " if draw.random() < 0.3 else "")
        for _ in range(draw.randrange(20, 120))
    )


def ids_of(tokenizer: Tokenizer, *texts: str) -> list[int]:
    batch = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [token for encoded in batch for token in encoded.ids]


def num_parts(tokenizer: Tokenizer, seed: str) -> int:
    """Compare random texts in parts with them as a whole. Return how many parts there were."""
    borders, draw, num = Borders.of(tokenizer), random.Random(seed), 0
    assert borders is not None
    for _ in range(by_night(60, 1000)):
        parts = [*borders.parts(text := random_text(draw))]
        assert ids_of(tokenizer, *parts) == ids_of(tokenizer, text), parts
        num += len(parts)
    return num


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.tokenize.borders, "PART", 12)
    monkeypatch.setattr(stages.tokenize.borders, "NEAR", 10)


@pytest.mark.parametrize("kind", IN_PARTS)
def test_the_tokens_of_the_parts_are_those_of_the_whole(kind: str) -> None:
    assert num_parts(tokenizer_of(IN_PARTS[kind]), kind) > 100


@pytest.mark.parametrize("kind", ["Qwen", "decomposed", "lower case", "Metaspace", "Gemma"])
def test_a_token_that_is_normalized_is_never_cut(kind: str) -> None:
    tokenizer = tokenizer_of(IN_PARTS[kind])
    tokenizer.add_tokens([NORMALIZED])
    assert num_parts(tokenizer, kind) > 150


@pytest.mark.parametrize("kind", AS_A_WHOLE)
def test_a_tokenizer_with_an_unknown_step_gets_whole_texts(kind: str) -> None:
    assert Borders.of(tokenizer_of(AS_A_WHOLE[kind])) is None


def vocabulary(*more: str) -> dict[str, int]:
    return {token: place for place, token in enumerate(("<unk>", *"abx▁", *more))}


@pytest.mark.parametrize(
    ("merges", "cut_after"),
    [
        ([("▁", "a")], "abx"),
        ([("a", "▁")], "bx"),
        ([("b", "▁"), ("x", "b▁")], "ax"),
        ([(letter, "▁") for letter in "abx"], ""),
    ],
)
def test_without_words_a_text_is_cut_where_no_token_joins_both_sides(
    merges: list[tuple[str, str]], cut_after: str
) -> None:
    model = models.BPE(vocabulary(*map("".join, merges)), merges, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = SPACES
    borders, text = Borders.of(tokenizer), "a b a x a b b x " * 50
    assert (borders is not None) == bool(cut_after)
    if borders is not None:
        parts = [*borders.parts(text)]
        assert ids_of(tokenizer, *parts) == ids_of(tokenizer, text)
        assert len(parts) > 10 and {part[-1] for part in parts[:-1]} <= {*cut_after}


@pytest.mark.parametrize("option", [{"dropout": 0.1}, {"continuing_subword_prefix": "##"}, {"end_of_word_suffix": "$"}])
def test_without_words_a_model_that_looks_at_its_ends_gets_whole_texts(option: dict[str, Any]) -> None:
    tokenizer = Tokenizer(models.BPE(vocabulary(), [], **option))
    tokenizer.normalizer = SPACES
    assert Borders.of(tokenizer) is None


def test_a_text_without_a_border_stays_whole_up_to_the_next_one() -> None:
    borders = Borders.of(tokenizer_of(IN_PARTS["GPT-2"]))
    assert borders is not None
    assert [*borders.parts("a" * 40 + " b" * 8)] == ["a" * 40 + " b" * 3, " b" * 5]
    assert [*borders.parts("\n" * 100)] == ["\n" * 100]
    assert [*borders.parts("")] == [""]
