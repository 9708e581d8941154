"""A stand-in for the forward pass whose tokens certify themselves, and its tokenizer: one word for each token.

Eight bits of a token are drawn anew each time, so no run repeats another; the other eight are a hash of all tokens
before it, as the pages hold them. A token that was lost, repeated, moved, or made by two engines breaks the chain from
there on, and so does a wrong row, page or position.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, models, pre_tokenizers

from stages.generate.schedule.plan import BatchPlan, Computed, PlanRow

CHAIN_TOKENS: Final = 1 << 16
"""Token ids below this are links: nonce << 8 | hash."""
END, UNKNOWN = "<end>", "<unknown>"
MAX_POSITIONS: Final = 1024
DIGEST_BYTES: Final = 8
_START: Final = bytes(DIGEST_BYTES)


def check_chain(prompt_ids: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Return None when *tokens* are one chain behind *prompt_ids*, else the index of the first that does not fit."""
    digests = _digests(_START, prompt_ids)
    for index, token in enumerate(tokens):
        if not 0 <= token < CHAIN_TOKENS or token & 0xFF != _link(b"".join(digests)):
            return index
        digests += _digests(digests[-1], [token])
    return None


def _digests(before: bytes, tokens: Iterable[int]) -> list[bytes]:
    """Return what the pages hold for each of *tokens*, which follow what *before* stands for."""
    found = []
    for token in tokens:
        before = blake2b(before + token.to_bytes(4, "big"), digest_size=DIGEST_BYTES).digest()
        found.append(before)
    return found


def _link(digests: bytes) -> int:
    """Return the hash that the next token carries: a function of all that the pages hold of the tokens before it."""
    return blake2b(digests, digest_size=1).digest()[0]


class ChainEngine:
    """Does what `Engine` does with a plan, on pages whose slots hold, instead of keys and values, a digest.

    Like keys and values, a slot depends on its token and on all before it, and a new token on all slots of its row.
    """

    def __init__(self, *, num_pages: int, page_size: int, max_running_requests: int, step_s: float = 0.0) -> None:
        """*step_s* is how long a step takes."""
        self._page_size = page_size
        self._step_s = step_s
        self._slots = [_START] * (num_pages * page_size)
        self._tables: list[list[int]] = [[] for _ in range(max_running_requests)]

    def forward(self, plan: BatchPlan) -> Computed:
        """Compute one step."""
        began_s = time.monotonic()
        for row in plan.rows:
            self._update(row)
        for row in plan.rows:
            self._write(row)
        tokens = [self._sample(row) for row in plan.rows if row.sample is not None]
        time.sleep(max(0.0, began_s + self._step_s - time.monotonic()))
        return Computed(tokens)

    def _update(self, row: PlanRow) -> None:
        table = self._tables[row.table]
        assert row.first_page <= len(table), f"page {row.first_page} of a table of {len(table)}"
        table[row.first_page : row.first_page + len(row.new_pages)] = row.new_pages

    def _slot(self, row: PlanRow, position: int) -> int:
        return self._tables[row.table][position // self._page_size] * self._page_size + position % self._page_size

    def _write(self, row: PlanRow) -> None:
        before = self._slots[self._slot(row, row.start - 1)] if row.start else _START
        for offset, digest in enumerate(_digests(before, row.token_ids)):
            self._slots[self._slot(row, row.start + offset)] = digest

    def _sample(self, row: PlanRow) -> int:
        length = row.start + len(row.token_ids)
        held: list[bytes] = []
        for page in self._tables[row.table][: -(-length // self._page_size)]:
            held += self._slots[page * self._page_size : (page + 1) * self._page_size]
        return os.urandom(1)[0] << 8 | _link(b"".join(held[:length]))


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of *tokens* as a prompt has it."""
    return " ".join(f"{token:04x}" for token in tokens)


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a text that a client received.

    Raises:
        ValueError: It is no text of this model.
    """
    words = text.split()
    if strange := [word for word in words if len(word) != 4]:
        raise ValueError(f"{strange[0]!r} is no word of the chain model; expected four hex digits")
    return [int(word, 16) for word in words]


def make_chain_model(folder: Path) -> Path:
    """Write a model folder that every stage takes, the engine with --dummy-weight; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    words = {f"{token:04x}": token for token in range(CHAIN_TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocab=words | {UNKNOWN: CHAIN_TOKENS}, unk_token=UNKNOWN))
    tokenizer.add_special_tokens([END])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    end_id = CHAIN_TOKENS + 1
    assert tokenizer.token_to_id(END) == end_id
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": end_id + 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "eos_token_id": end_id,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "unk_token": UNKNOWN})
    )
    return folder
