"""Prompts of an exact number of tokens, for the tokenizer of one checkpoint."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from pipeline.errors import ConfigError

POOL_SIZE: Final = 4096


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, its token ids, and the number of tokens to generate."""

    text: str
    ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, *concurrency* of them at a time."""

    prompts: tuple[Prompt, ...]
    concurrency: int

    @property
    def output_tokens(self) -> int:
        return sum(prompt.output_tokens for prompt in self.prompts)


class Prompts:
    """Makes texts of exactly as many tokens as are wanted."""

    def __init__(self, folder: Path) -> None:
        """Find words that are one token each, whatever is before them: they begin with a space.

        Raises:
            ConfigError: The folder has no tokenizer, or the tokenizer has too few such words.
        """
        self._file = folder / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(self._file))
        except Exception as error:  # the library has no class for its errors
            raise ConfigError(f"{self._file}: not a tokenizer ({error})") from error
        candidates = [" " + token[1:] for token in self._tokenizer.get_vocab() if re.fullmatch("[Ġ▁][A-Za-z]+", token)]
        candidates = sorted(candidates)[:: max(len(candidates) // POOL_SIZE, 1)]
        encoded = self._tokenizer.encode_batch(candidates, add_special_tokens=False)
        self._pool = [text for text, one in zip(candidates, encoded, strict=True) if len(one.ids) == 1]
        self._num_special = len(self._tokenizer.encode("").ids)
        if len(self._pool) < 8:
            raise ConfigError(f"{self._file}: {len(self._pool)} words are one token, at least 8 needed")

    def words(self, generator: random.Random, num_tokens: int) -> str:
        """Return a text of *num_tokens* words."""
        return "".join(generator.choices(self._pool, k=num_tokens))

    def of(self, text: str, num_tokens: int, output_tokens: int) -> Prompt:
        """Return *text* as a prompt of *num_tokens*, special tokens not counted.

        Raises:
            ConfigError: It has another number of tokens.
        """
        ids = tuple(self._tokenizer.encode(text).ids)
        if len(ids) != num_tokens + self._num_special:
            raise ConfigError(f"{self._file}: makes {len(ids)} tokens of {num_tokens} words of one token each")
        return Prompt(text, ids, output_tokens)

    def drawn(self, generator: random.Random, lengths: Sequence[tuple[int, int]]) -> tuple[Prompt, ...]:
        """Return a prompt for each (tokens in, tokens out)."""
        return tuple(self.of(self.words(generator, inputs), inputs, outputs) for inputs, outputs in lengths)
