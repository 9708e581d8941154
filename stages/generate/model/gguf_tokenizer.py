"""Writes the files of a tokenizer from the metadata of a GGUF file. No transformers; tokenizers only to write.

What the names of `tokenizer.ggml.pre` mean: `src/llama-vocab.cpp` of llama.cpp (https://github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASED: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = _CASED + _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2: Final = _CASED + _WORDS + r"\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASH: Final = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_START: Final = r"[^\r\n\p{L}\p{N}]?"
_QWEN35: Final = (
    _CASED + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN: Final = f"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*|\\p{{N}}{_SLASH}"
_GPT4O: Final = f"{_START}{_UPPER}*{_LOWER}+{_CASED}?|{_START}{_UPPER}+{_LOWER}*{_CASED}?|\\p{{N}}{{1,3}}{_SLASH}"
_DEEPSEEK_V3: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Pre:
    """How a text is cut before it is merged."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a token is that token, whatever the merges say."""
    add_bos: bool = False
    """Unless the file says another."""


_PRES: Final = {
    "default": Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama3 llama-v3 llama-bpe falcon3 pixtral lfm2": Pre((_LLAMA3,), ignore_merges=True, add_bos=True),
    "dbrx smaug-bpe chatglm-bpe": Pre((_LLAMA3,)),
    "glm4": Pre((_LLAMA3,), ignore_merges=True),
    "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan grok-2": Pre((_QWEN2,)),
    "qwen35": Pre((_QWEN35,)),
    "tekken": Pre((_TEKKEN,), ignore_merges=True, add_bos=True),
    "gpt-4o llama4": Pre((_GPT4O,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Pre((r"\p{N}", _GPT2)),
    "gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat mellum": Pre((_GPT2,)),
    "deepseek-v3": Pre((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)),
    "deepseek-coder": Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
}
PRES: Final[Mapping[str, Pre]] = {name: pre for names, pre in _PRES.items() for name in names.split()}
LONGEST_PIECE: Final = 2**10
"""Longer pieces of SentencePiece are not put together of others, which would take long: there are none."""
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6
"""`tokenizer.ggml.token_type`."""


def write_tokenizer(path: Path, fields: Mapping[str, Any], folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into *folder*.

    Raises:
        ConfigError: The file has no tokenizer that we know.
    """
    pieces, types = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.token_type")
    if not isinstance(pieces, tuple) or not pieces or not all(isinstance(piece, str) for piece in pieces):
        raise _unknown(path, "tokenizer.ggml.tokens is missing")
    if not isinstance(types, tuple) or len(types) != len(pieces):
        types = (_NORMAL,) * len(pieces)
    named = {
        f"{kind}_token": pieces[index]
        for kind, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if type(index := fields.get(f"tokenizer.ggml.{key}_token_id")) is int and 0 <= index < len(pieces)
    }
    kind = fields.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = _of_gpt2(path, fields, pieces)
    elif kind == "llama":
        tokenizer, add_bos = _of_llama(path, fields, pieces, types), True
    else:
        raise _unknown(path, f"tokenizer.ggml.model is {kind!r:.80}; supported: gpt2, llama")
    _add(tokenizer, pieces, types)
    add_bos = fields.get("tokenizer.ggml.add_bos_token", add_bos)
    add_eos = fields.get("tokenizer.ggml.add_eos_token", False)
    _surround(tokenizer, named.get("bos_token", "") if add_bos else "", named.get("eos_token", "") if add_eos else "")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    } | named
    if isinstance(template := fields.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _unknown(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path}: {what}; pass --tokenizer with the folder or owner/name of the model's own tokenizer")


def _of_gpt2(path: Path, fields: Mapping[str, Any], pieces: Sequence[str]) -> tuple[Tokenizer, bool]:
    """Return a tokenizer of bytes that are merged, and whether it puts a token before each text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = fields.get("tokenizer.ggml.pre", "default")
    pre = PRES.get(name) if isinstance(name, str) else None
    if pre is None:
        raise _unknown(path, f"tokenizer.ggml.pre is {name!r:.80}, which is not known here")
    merges = fields.get("tokenizer.ggml.merges")
    if not isinstance(merges, tuple):
        raise _unknown(path, "tokenizer.ggml.merges is missing")
    try:
        # A space inside a piece is written as another letter, so the first one ends the left piece.
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        model = models.BPE(_ids(pieces), pairs, ignore_merges=pre.ignore_merges, fuse_unk=False)
    except Exception as error:  # the library raises Exception itself
        raise _unknown(path, f"tokenizer.ggml.merges do not fit the tokens ({error!r:.200})") from error
    tokenizer = Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _of_llama(path: Path, fields: Mapping[str, Any], pieces: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """Return a tokenizer of SentencePiece: pieces are merged in the order of their scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, tuple) or len(scores) != len(pieces) or not isinstance(scores[0], float):
        raise _unknown(path, "tokenizer.ggml.scores do not fit the tokens")
    ids = _ids(pieces)
    unknown = fields.get("tokenizer.ggml.unknown_token_id", 0)
    unknown = pieces[unknown] if type(unknown) is int and 0 <= unknown < len(pieces) else None
    model = models.BPE(ids, _merges(ids, scores, types), unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in types)
    tokenizer = Tokenizer(model)
    has_prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace] if has_prefix else [replace])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if has_prefix else parts)
    return tokenizer


def _ids(pieces: Sequence[str]) -> dict[str, int]:
    """Return the id of each piece. Of pieces that are there twice, the first one counts, as in llama.cpp."""
    ids: dict[str, int] = {}
    for index, piece in enumerate(pieces):
        if ids.setdefault(piece, index) != index:
            ids[f"{piece}\0{index}"] = index  # keeps the ids without a gap; no text has it
    return ids


def _merges(ids: Mapping[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Return all pairs of pieces that make a piece, those of the best score first."""

    def pairs() -> Iterator[tuple[float, int, int, str, str]]:
        for piece, index in ids.items():
            if types[index] not in (_NORMAL, _USER_DEFINED) or len(piece) > LONGEST_PIECE:
                continue
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in ids and right in ids:
                    yield -scores[index], ids[left], ids[right], left, right

    return [(left, right) for *_, left, right in sorted(pairs())]


def _add(tokenizer: Tokenizer, pieces: Sequence[str], types: Sequence[int]) -> None:
    from tokenizers import AddedToken

    kinds = (_CONTROL, _USER_DEFINED)
    tokenizer.add_tokens(
        [
            AddedToken(piece, special=kind == _CONTROL, normalized=False)
            for piece, kind in zip(pieces, types, strict=True)
            if kind in kinds and piece
        ]
    )


def _surround(tokenizer: Tokenizer, before: str, after: str) -> None:
    """Let the tokenizer put these tokens around a text."""
    from tokenizers import processors

    # The template has other names for them: theirs may have spaces and colons, which mean something there.
    tokens = [
        {"id": name, "ids": [tokenizer.token_to_id(token)], "tokens": [token]}
        for name, token in (("before", before), ("after", after))
        if token
    ]
    if tokens:
        single = " ".join([*(["before"] if before else []), "$A", *(["after"] if after else [])])
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
