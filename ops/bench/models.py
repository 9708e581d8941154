"""The checkpoints that benchmarks run on: real shapes, random weights in bfloat16, made on the spot. No download.

Every word of their tokenizer is one token, so that a text can be written that has exactly as many tokens as are wanted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any, Final

from ops.bench.made_once import made_once
from pipeline.errors import ConfigError

SEED: Final = 0
SCALE: Final = 0.02
END, START, STOP = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYLLABLES: Final = tuple(consonant + vowel for consonant in "bcdfghjklmnprstvwxyz" for vowel in "aeiou")


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rope_theta: float
    max_positions: int
    tie_embeddings: bool = True


SHAPES: Final[Mapping[str, Shape]] = {
    "95m": Shape(768, 12, 12, 4, 64, 2304, 16_000, 10_000.0, 8192),
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151_936, 1_000_000.0, 40_960),  # that of Qwen3-0.6B
}
SHAPE_8B: Final = Shape(4096, 36, 32, 8, 128, 12_288, 151_936, 1_000_000.0, 40_960, tie_embeddings=False)
"""That of Qwen3-8B, for weights that no file holds."""


def ensure(name: str, parent: Path) -> Path:
    """Return the folder of the checkpoint *name* under *parent*; write it first where it is not there yet.

    Raises:
        ConfigError: There is no such checkpoint.
    """
    if name not in SHAPES:
        raise ConfigError(f"{name}: no such benchmark checkpoint; expected one of {', '.join(SHAPES)}")
    return made_once(parent / f"minisgl-bench-{name}", lambda folder: write(SHAPES[name], folder))


def words() -> Iterator[str]:
    """Return without end the words that are one token each when a space is before them, the short ones first."""
    length = 1
    while True:
        yield from map("".join, product(SYLLABLES, repeat=length))
        length += 1


def write(shape: Shape, folder: Path) -> None:
    """Write config, tokenizer and weights into *folder*."""
    import torch
    from safetensors.torch import save_file

    from stages.generate.model.spec import read_spec, tensor_shapes

    tokens = _write_tokenizer(shape.vocab_size, folder)
    write_config(shape, folder, tokens[STOP])
    _write_json(folder / "generation_config.json", {"eos_token_id": [tokens[STOP], tokens[END]]})
    generator = torch.Generator().manual_seed(SEED)
    weights = {
        name: torch.ones(size, dtype=torch.bfloat16)
        if "norm" in name
        else torch.empty(size, dtype=torch.bfloat16).normal_(std=SCALE, generator=generator)
        for name, size in tensor_shapes(read_spec(folder)).items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_config(shape: Shape, folder: Path, eos_id: int = 0) -> None:
    """Write config.json into *folder*: all that an engine with random weights needs."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": shape.tie_embeddings,
        "attention_bias": False,
        "eos_token_id": eos_id,
    }
    _write_json(folder / "config.json", config)


def _write_tokenizer(vocab_size: int, folder: Path) -> dict[str, int]:
    """Write a byte-level BPE tokenizer of exactly *vocab_size* tokens; return the ids of its special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(islice(_merges(), vocab_size - len(alphabet) - len(SPECIAL_TOKENS)))
    tokens = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    assert tokenizer.get_vocab_size() == vocab_size
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STOP, "pad_token": END}
    _write_json(folder / "tokenizer_config.json", names)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    vocabulary = tokenizer.get_vocab()
    return {token: vocabulary[token] for token in SPECIAL_TOKENS}


def _merges() -> Iterator[tuple[str, str]]:
    """Return letters to syllables, then a space and syllables to words, each word out of the one without its end."""
    yield from ((syllable[0], syllable[1]) for syllable in SYLLABLES)
    for word in words():
        yield ("Ġ" + word[:-2], word[-2:])


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
