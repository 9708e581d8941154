"""The tokens of a model folder, as transformers reads them: from tokenizer.json, and from the files beside it.

Imports neither transformers nor tokenizers, so every stage may read them. A test compares it with transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson

from pipeline.errors import ConfigError
from pipeline.spelling import Spelling

TOKENIZER: Final = "tokenizer.json"
CONFIG: Final = "tokenizer_config.json"
OLD_FILES: Final = ("special_tokens_map.json", "added_tokens.json")
"""Files that are read if the config has no ADDED: it has that since transformers 4.34."""
ADDED: Final = "added_tokens_decoder"
NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token beside the vocabulary, with its properties in the tokenizers library."""

    content: str
    special: bool
    normalized: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """Tokens beside the vocabulary, by their text. A grammar must name them: plain text never becomes such a token."""

    ids: Mapping[str, int]
    special: frozenset[int]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """All tokens of a model folder."""

    pieces: Mapping[str, int]
    """Tokens of the model in tokenizer.json, as it writes them."""
    spelling: Spelling
    added: AddedTokens
    beside: tuple[AddedToken, ...]
    """Tokens of the files beside tokenizer.json, which may be in it, too. New ones get their ids in this order."""
    end: str
    """Text of the `eos_token`; empty if there is none."""

    def id_of(self, content: str) -> int | None:
        """Return the id of a token; None if there is no such token."""
        return self.added.ids.get(content, self.pieces.get(content))


def read_vocabulary(folder: Path) -> Vocabulary:
    """Return the tokens of a model folder.

    Raises:
        ConfigError: A file is broken.
    """
    try:
        plain = _object(folder / TOKENIZER)
        vocab, listed = plain["model"]["vocab"], plain.get("added_tokens") or []
        num_pieces = len(vocab)
        if isinstance(vocab, list):  # of pieces and scores: Unigram
            vocab = {piece: token for token, (piece, _) in enumerate(vocab)}
        inside = {one["id"]: _token(one) for one in listed if one["content"]}
        spelling = Spelling.of(plain.get("decoder"))
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / TOKENIZER}: not a tokenizer ({error}); copy the model's again") from error
    try:
        beside, end = _beside(folder, inside)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder / CONFIG}: its tokens cannot be read ({error}); copy the model's again") from error
    ids: dict[str, int] = {}
    for tokens in (inside.values(), beside):
        _add(ids, tokens, vocab, num_pieces)
    special = frozenset(ids[token.content] for token in (*inside.values(), *beside) if token.special)
    return Vocabulary(vocab, spelling, AddedTokens(ids, special), tuple(beside), end)


def token_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the files that define the tokens of a model folder; some may be missing."""
    return (TOKENIZER, CONFIG, *(() if ADDED in _config(folder) else OLD_FILES))


def _add(ids: dict[str, int], tokens: Iterable[AddedToken], vocab: Mapping[str, int], num_pieces: int) -> None:
    """Set the ids of tokens, as the tokenizers library does: the ids in the files may be out of date."""
    free = max(num_pieces, 1 + max(ids.values(), default=-1))
    for token in tokens:
        if token.content not in ids:
            ids[token.content] = vocab.get(token.content, free)
            free += token.content not in vocab


def _beside(folder: Path, inside: Mapping[int, AddedToken]) -> tuple[list[AddedToken], str]:
    """Return the tokens of the files beside tokenizer.json, which has those *inside*, and the `eos_token`.

    Like `PreTrainedTokenizerBase._from_pretrained` in transformers 5, with `TokenizersBackend.__init__` after it.
    """
    config = _config(folder)
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if ADDED in config:
        by_id = {int(token): _token(one) for token, one in config[ADDED].items()}
    else:
        of_old, ids = (_object(folder / name, absent={}) for name in OLD_FILES)
        config |= of_old
        special = {_token(one).content for one in (*map(config.get, NAMED), *extra) if one}
        by_id = {
            token: _token({"content": content, "special": content in special})
            for content, token in ids.items()
            if token not in inside
        }
        extra = extra or of_old.get("additional_special_tokens") or []
    named = [config.get(name) for name in NAMED]
    named += [one for name, one in config.items() if name.endswith("_token") and name not in NAMED]
    if isinstance(extra, dict):
        named, extra = [*named, *extra.values()], []
    of_names, others = ([_token(one) for one in some if _is_token(one)] for some in (named, extra))
    listed = [token for _, token in sorted(by_id.items()) if token.content]
    end = config.get("eos_token")
    return _new_or_changed(inside.values(), listed, of_names, others), _token(end).content if end else ""


def _new_or_changed(
    inside: Iterable[AddedToken],
    listed: Iterable[AddedToken],
    of_names: Sequence[AddedToken],
    others: Iterable[AddedToken],
) -> list[AddedToken]:
    """Return the tokens that are not *inside* yet, or only with other properties; tokens *of_names* are special."""
    names, known = {token.content for token in of_names}, {token.content: token for token in inside}
    found: list[AddedToken] = []
    for token in listed:
        if token != known.get(token.content):
            found.append(replace(token, special=token.special or token.content in names))
            known[token.content] = token
    for token in (*(replace(token, special=True) for token in of_names), *others):
        if token.content not in known:
            found.append(token)
            known[token.content] = token
    return found


def _is_token(one: Any) -> bool:
    return bool(isinstance(one, str) and one) or (isinstance(one, dict) and bool(one.get("content")))


def _token(one: Any) -> AddedToken:
    """Return a token from its object, or from its text; then it is special."""
    if not isinstance(one, dict):
        return AddedToken(str(one), special=True, normalized=False)
    special = bool(one.get("special", False))
    normalized = bool(one.get("normalized", not special))
    rest = {name: bool(one.get(name, False)) for name in ("lstrip", "rstrip", "single_word")}
    return AddedToken(str(one["content"]), special, normalized, **rest)


def _config(folder: Path) -> dict[str, Any]:
    return _object(folder / CONFIG, absent={})


def _object(path: Path, absent: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ConfigError: The file has something else in it, or is missing and *absent* is None.
    """
    try:
        value = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        if absent is None:
            raise ConfigError(f"{path}: not found; copy the model's again") from None
        return dict(absent)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path}: not a tokenizer ({error}); copy the model's again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a JSON {type(value).__name__}; expected an object")
    return value
