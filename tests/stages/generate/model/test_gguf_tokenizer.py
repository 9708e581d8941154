"""The tokenizer of a GGUF file gives the tokens of the one that it was made from, and those of llama.cpp."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from support.checkpoints import TEXT, train_tokenizer
from support.gguf_files import tokenizer_fields
from support.raw_gguf import FIELDS, TENSORS, gguf_bytes
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pipeline.errors import ConfigError
from stages.generate.model.folder import model_folder
from stages.generate.model.gguf import read_gguf
from stages.generate.model.gguf_tokenizer import PRES, write_tokenizer
from stages.tokenize.prompts import PromptEncoder

PARTS: Final = (
    *("Hello", " world", "WORLD", "hello", " Don't", "'LL", "'s", " we've", "I'M", "ſ'T"),
    *("camelCase", "XMLHttp", " naïve"),
    *(" ", "  ", "   ", "        ", "\n", "\n\n", " \n", "\n  ", "\t", "\r\n", "\r", "\u00a0", "\u3000", "\u2003 "),
    *("1", "42", "123", "1234", "1234567", "3.14", "1,000,000", "٣٤٥", "Ⅷ", "½", "²³", "१२३४"),
    *("你好，世界", "こんにちは", "カタカナー", "안녕하세요", "Привет, как дела", "Ελληνικά"),
    *("שלום", "مرحبا", "हिन्दी में", "ภาษาไทย"),
    *("é", "e\u0301", "a\u0308b", "ǅ", "ǆ", "ʰ", "İ", "ß", "🙂", "👩‍👩‍👧", "🇩🇪", "❤️", "\u200d", "\u0000", "\ufffd"),
    *(".", "...", "!?", "(", ")", "_", "__init__", "->", "=>", "//", "/", "\\n", "`x`"),
    *("$", "€", "+=", "^", "~", "|", "«»", "…", "—"),
    *("def f(x):\n    return x\n", "<div class=\"a\">", "a/b/c", "https://example.com/?q=1"),
    *("{'a': [1, 2]}", "#!/bin/sh\n"),
)  # fmt: skip
SPECIAL: Final = ("<|im_start|>", "<|im_end|>")


def texts(count: int = 200) -> list[str]:
    """Return each part by itself, and parts side by side."""
    choose = random.Random(11)
    joined = ["".join(choose.choices([*PARTS, *PARTS, *SPECIAL], k=choose.randint(2, 12))) for _ in range(count)]
    return [*PARTS, *joined, "", TEXT]


def tokenizer_of(folder: Path, fields: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that is made of metadata."""
    write_tokenizer(
        Path("m.gguf"), {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}, folder
    )
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("with_bos", [False, True])
def test_a_file_has_the_tokens_of_its_tokenizer(with_bos: bool, tmp_path: Path) -> None:
    original = train_tokenizer(500, with_bos=with_bos)
    original.save_pretrained(tmp_path / "original")
    made = tmp_path / "made"
    made.mkdir()
    tokenizer_of(made, tokenizer_fields(tmp_path / "original"))
    fast = PreTrainedTokenizerFast.from_pretrained(made)
    for text in texts():
        ids = original(text)["input_ids"]
        assert fast(text)["input_ids"] == ids
        assert fast.decode(ids) == original.decode(ids)
        assert fast.decode(ids, skip_special_tokens=True) == original.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": "Hello 你好"}]
    for prompt in (False, True):
        assert fast.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt
        ) == original.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert PromptEncoder(made).bos == (original.bos_token if with_bos else "")
    assert (fast.eos_token, fast.vocab_size) == (original.eos_token, original.vocab_size)


def test_another_tokenizer_replaces_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    unknown = {**FIELDS, "tokenizer.ggml.pre": "of-tomorrow"}
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(unknown))
    with pytest.raises(ConfigError, match="--tokenizer"):
        model_folder(str(tmp_path / "m.gguf"))
    folders = []
    for size in (300, 320):
        train_tokenizer(size, with_bos=False).save_pretrained(tmp_path / f"{size}")
        folder = model_folder(str(tmp_path / "m.gguf"), tokenizer=str(tmp_path / f"{size}"))
        assert (folder / "tokenizer.json").read_bytes() == (tmp_path / f"{size}" / "tokenizer.json").read_bytes()
        assert PromptEncoder(folder).has_chat_template
        folders.append(folder)
    assert folders[0] != folders[1]
    with pytest.raises(ConfigError, match="--tokenizer"):
        model_folder(str(tmp_path / "300"), tokenizer=str(tmp_path / "320"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pre": "of-tomorrow"}, "of-tomorrow"),
        ({"pre": 3}, "pre is 3"),
        ({"model": "t5"}, "t5"),
        ({"model": None}, "None"),
        ({"tokens": None}, "tokens"),
        ({"tokens": [1, 2]}, "tokens"),
        ({"merges": None}, "merges"),
        ({"merges": ["a z"]}, "merges"),
        ({"merges": ["ab"]}, "merges"),
        ({"merges": [1]}, "merges"),
        ({"model": "llama"}, "scores"),
        ({"model": "llama", "scores": ["x"] * 8}, "scores"),
        ({"model": "llama", "scores": [0.0] * 7}, "scores"),
    ],
)
def test_a_tokenizer_that_is_not_known_names_the_flag(fields: Mapping[str, Any], said: str, tmp_path: Path) -> None:
    every = {**FIELDS, **{f"tokenizer.ggml.{name}": value for name, value in fields.items()}}
    with pytest.raises(ConfigError) as caught:
        tokenizer_of(tmp_path, every)
    assert "--tokenizer" in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize("token", ["<s> x", "a:1", "$A", "<s>:0"])
def test_the_token_before_a_text_may_have_any_name(token: str, tmp_path: Path) -> None:
    tokens = [*FIELDS["tokenizer.ggml.tokens"][:6], token, "<|im_end|>"]
    made = tokenizer_of(tmp_path, {**FIELDS, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.add_eos_token": True})
    assert made.encode("ab").ids == [6, 4, 7]


def test_of_pieces_that_are_there_twice_the_first_one_counts(tmp_path: Path) -> None:
    tokens = ["a", "b", "b", "Ġ", "ab", "ab", "<|im_start|>", "<|im_end|>"]
    made = tokenizer_of(tmp_path, {**FIELDS, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b"]})
    assert made.encode("abb<|im_end|>", add_special_tokens=False).ids == [4, 1, 7]
    assert made.get_vocab_size() == 8


# ---- SentencePiece

WORDS: Final = (
    "▁",
    "a",
    "b",
    "c",
    "▁a",
    "ab",
    "▁ab",
    "abc",
    "▁▁",
    "▁▁▁▁",
    "bc",
    "é",
    "▁the",
    "th",
    "t",
    "h",
    "e",
    "he",
)
SENTENCE_PIECES: Final = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, "[INST]")
SENTENCE_FIELDS: Final[Mapping[str, Any]] = {
    **{name: value for name, value in FIELDS.items() if "merges" not in name and "add_bos" not in name},
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": None,
    "tokenizer.ggml.tokens": list(SENTENCE_PIECES),
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(WORDS), 4],
    "tokenizer.ggml.scores": [0.0] * 259 + [-float(len(WORDS) - len(word)) for word in WORDS] + [0.0],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def pieces_of(tokenizer: Tokenizer, text: str, special: bool = False) -> list[str]:
    return [str(tokenizer.id_to_token(token)) for token in tokenizer.encode(text, add_special_tokens=special).ids]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab", "▁ab"),
        ("abc", "▁ab c"),
        (" ab", "▁▁ ab"),
        ("a    a", "▁a ▁▁▁▁ a"),
        ("x", "▁ <0x78>"),
        ("é", "▁ é"),
        ("ж\n", "▁ <0xD0> <0xB6> <0x0A>"),
        ("ab</s>ab", "▁ab </s> ▁ab"),
        ("[INST] a", "[INST] ▁▁ a"),
        ("", ""),
    ],
)
def test_sentence_pieces_are_merged_by_their_scores(text: str, pieces: str, tmp_path: Path) -> None:
    assert pieces_of(tokenizer_of(tmp_path, SENTENCE_FIELDS), text) == pieces.split()


def test_sentence_pieces_become_the_text_again(tmp_path: Path) -> None:
    made = tokenizer_of(tmp_path, SENTENCE_FIELDS)
    for text in texts():
        if not any(token in text for token in SPECIAL):
            assert made.decode(made.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text
    assert pieces_of(made, "ab", special=True) == ["<s>", "▁ab"]


def test_sentence_pieces_may_have_no_space_before_a_text(tmp_path: Path) -> None:
    made = tokenizer_of(tmp_path, {**SENTENCE_FIELDS, "tokenizer.ggml.add_space_prefix": False})
    assert pieces_of(made, "ab ab") == ["ab", "▁ab"]
    assert made.decode(made.encode(" ab").ids) == " ab"


# ---- llama.cpp

LLAMA_CPP: Final = os.environ.get("MINISGL_LLAMA_PYTHON", "")
"""A python with llama-cpp-python, which is not installed with ours: it would be compiled."""
SMOLLM2: Final = os.environ.get("MINISGL_SMOLLM2", "")
"""SmolLM2-135M-Instruct as a GGUF file."""
NEEDS_LLAMA_CPP: Final = pytest.mark.skipif(not LLAMA_CPP, reason="MINISGL_LLAMA_PYTHON names no python")
ASK: Final = """
import json, sys
from llama_cpp import Llama
paths, texts = json.load(sys.stdin)
found = []
for path in paths:
    model = Llama(model_path=path, vocab_only=True, verbose=False)
    found.append([model.tokenize(text.encode(), add_bos=False, special=True) for text in texts])
json.dump(found, sys.stdout)
"""


def of_llama_cpp(paths: Sequence[Path], given: Sequence[str]) -> list[list[list[int]]]:
    """Return the tokens of each text, for each file."""
    question = json.dumps([list(map(str, paths)), given])
    done = subprocess.run([LLAMA_CPP, "-c", ASK], input=question, capture_output=True, text=True, check=True)
    found: list[list[list[int]]] = json.loads(done.stdout)
    return found


def byte_fields() -> dict[str, Any]:
    """Return a vocabulary whose pieces reach over spaces, letters and digits: each cut changes the tokens."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False, max_token_length=12)
    trained.train_from_iterator([text for text in texts() if not any(one in text for one in SPECIAL)] * 4, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), *SPECIAL]
    return {
        **FIELDS,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }


def differences(
    path: Path, folder: Path, found: Sequence[Sequence[int]], given: Sequence[str] = ()
) -> dict[str, tuple[list[str], list[str]]]:
    """Return the texts whose tokens differ from those that llama.cpp found, with ours and with its."""
    made = tokenizer_of(folder, read_gguf(path).fields)
    wrong = {}
    for text, theirs in zip(given or texts(), found, strict=True):
        ours = made.encode(text, add_special_tokens=False).ids
        if ours != theirs:
            wrong[text] = pieces_of(made, text), [str(made.id_to_token(token)) for token in theirs]
    return wrong


MARKS: Final = re.compile(
    r"[\u0300-\u036f\u0900-\u097f\u0e00-\u0e7f\ufe0f]|[a-zß-ÿǆа-яά-ώʰ가-힣぀-ヿ一-龥א-ي][ǅİА-ЯΆ-ΫA-Z]"
)
WIDE_SPACES: Final = re.compile(r"[\u00a0\u2003\u3000]")
KNOWN: Final = {
    # llama.cpp has another pattern for these. The models' own tokenizer.json knows marks and the case of all letters.
    **dict.fromkeys(("tekken", "gpt-4o", "llama4"), MARKS),
    # Its third pattern begins at U+0800, which has these spaces; llama.cpp replaces them by another one first.
    "deepseek-coder": WIDE_SPACES,
}
"""Texts that llama.cpp cuts in another way than the model's own tokenizer, by `tokenizer.ggml.pre`."""


@pytest.fixture(scope="module")
def of_each_pre(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[list[int]]]]:
    """Return a file for each way to cut, and what llama.cpp makes of the texts."""
    folder, fields = tmp_path_factory.mktemp("pres"), byte_fields()
    tensors = {**TENSORS, "token_embd.weight": ("Q8_0", (len(fields["tokenizer.ggml.tokens"]), 32))}
    paths = {}
    for name in PRES:
        paths[name] = folder / f"{name}.gguf"
        paths[name].write_bytes(gguf_bytes({**fields, "tokenizer.ggml.pre": name}, tensors))
    found = of_llama_cpp(list(paths.values()), texts())
    return {name: (path, ids) for (name, path), ids in zip(paths.items(), found, strict=True)}


@pytest.mark.night
@NEEDS_LLAMA_CPP
@pytest.mark.parametrize("name", PRES)
def test_each_way_to_cut_is_that_of_llama_cpp(
    name: str, of_each_pre: Mapping[str, tuple[Path, list[list[int]]]], tmp_path: Path
) -> None:
    path, found = of_each_pre[name]
    wrong = differences(path, tmp_path, found)
    known = {text for text in wrong if name in KNOWN and KNOWN[name].search(text)}
    assert {text: wrong[text] for text in wrong if text not in known} == {}
    assert bool(known) == (name in KNOWN)


@pytest.mark.night
@NEEDS_LLAMA_CPP
def test_sentence_pieces_are_those_of_llama_cpp(tmp_path: Path) -> None:
    choose = random.Random(2)
    given = [*texts(), *("".join(choose.choices("abc eth ▁", k=choose.randint(1, 40))) for _ in range(300))]
    tensors = {**TENSORS, "token_embd.weight": ("Q8_0", (len(SENTENCE_PIECES), 32))}
    for prefix in (True, False):
        fields = {**SENTENCE_FIELDS, "tokenizer.ggml.add_space_prefix": prefix}
        (tmp_path / "m.gguf").write_bytes(gguf_bytes(fields, tensors))
        assert differences(tmp_path / "m.gguf", tmp_path, of_llama_cpp([tmp_path / "m.gguf"], given)[0], given) == {}


@pytest.mark.night
@NEEDS_LLAMA_CPP
@pytest.mark.skipif(not SMOLLM2, reason="MINISGL_SMOLLM2 names no file")
def test_smollm2_has_the_tokens_of_llama_cpp(tmp_path: Path) -> None:
    assert differences(Path(SMOLLM2), tmp_path, of_llama_cpp([Path(SMOLLM2)], texts(2000))[0], texts(2000)) == {}
