"""Random Qwen3 checkpoints, made on the spot without a download: for the benchmarks, and for whatever needs any model.

Every word of their tokenizer is one token. Texts have exactly as many tokens as are wanted, for any tokenizer.
"""

from __future__ import annotations

import json
import os
import random
import re
import string
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from pathlib import Path
from typing import Any, Final

from pipeline.errors import ConfigError
from pipeline.flags import flag

SEED: Final = 0
FIRST_WORD: Final = "\u0120bababa"
"""A token: where a walk begins. The token of the next word follows it."""
SCALE: Final = 0.02
END, START, STOP = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYLLABLES: Final = tuple(consonant + vowel for consonant in "bcdfghjklmnprstvwxyz" for vowel in "aeiou")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model, of a Qwen3 if nothing else is said."""

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
    dtype: str = "bfloat16"
    more: Mapping[str, Any] = field(default_factory=dict)
    """What the config of another architecture has beside, or instead."""
    walks: bool = False
    """Whether it writes the words of its vocabulary in their order: its layers add nothing, and its head knows which
    token follows which."""


GEMMA3: Final = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rope_parameters": None,
}
PHI3: Final = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.75}
SHAPES: Final[Mapping[str, Shape]] = {
    "95m": Shape(768, 12, 12, 4, 64, 2304, 16_000, 10_000.0, 8192),
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151_936, 1_000_000.0, 40_960),  # the shape of Qwen3-0.6B
    "gemma3-1b": Shape(1152, 26, 4, 1, 256, 6912, 262_144, 1_000_000.0, 32_768, more=GEMMA3),  # that of Gemma-3-1B
    "phi4-1b": Shape(2048, 16, 16, 4, 128, 5632, 100_352, 10_000.0, 8192, more=PHI3),  # a third of Phi-4-mini
}
WALKING: Final[Mapping[str, Shape]] = {
    "95m-walk": replace(SHAPES["95m"], tie_embeddings=False, walks=True),
    # the first 8 layers of Qwen3-1.7B
    "1.7b-8-walk": Shape(2048, 8, 16, 8, 128, 6144, 151_936, 1_000_000.0, 40_960, tie_embeddings=False, walks=True),
}
"""Models with known answers."""
NONSENSE: Final = Shape(
    128, 2, 4, 2, 32, 384, 256 + len(SPECIAL_TOKENS), 10_000.0, 4096, tie_embeddings=False, dtype="float32"
)
"""A small model that writes letters without sense, and as many as are asked for. Its tokens are the 256 bytes and the
special ones. It takes a second of numpy and 2 MB, and no torch."""
NONSENSE_ID: Final = "minisgl-nonsense"
SHAPE_8B: Final = Shape(4096, 36, 32, 8, 128, 12_288, 151_936, 1_000_000.0, 40_960, tie_embeddings=False)
"""That of Qwen3-8B, for weights that no file holds."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """The checkpoint to measure."""

    model: str = flag(
        "--model", default="95m", help=f"{' or '.join(SHAPES)} (made on first use), or a checkpoint folder"
    )
    checkpoints: str = flag("--checkpoints", default="", help="folder for made checkpoints [cache folder/minisgl]")

    def folder(self, environment: Mapping[str, str]) -> Path:
        """Return the checkpoint's folder; make the checkpoint first if it is one of ours and missing.

        Raises:
            ConfigError: There is no such folder.
        """
        if self.model in SHAPES or self.model in WALKING:
            cache = Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "minisgl"
            return ensure(self.model, Path(self.checkpoints or cache).expanduser())
        folder = Path(self.model).expanduser().absolute()
        if self.model.lower().endswith(".gguf"):
            from stages.generate.model.folder import model_folder

            folder = model_folder(self.model)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--model {self.model}: no checkpoint; pass a folder, or {' or '.join(SHAPES)}")
        return folder


def ensure(name: str, parent: Path) -> Path:
    """Return the folder of the checkpoint *name*, one of ours, under *parent*; write it first if it is missing."""
    return made_once(parent / f"minisgl-bench-{name}", lambda folder: write({**SHAPES, **WALKING}[name], folder))


def nonsense(parent: Path) -> Path:
    """Return the folder of the model NONSENSE under *parent*; write it first if it is missing."""
    return made_once(parent / NONSENSE_ID, lambda folder: write_nonsense(folder))


def made_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Return *folder*; if it is missing, let *write* fill it first. Two processes at once do not disturb each other."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / folder.name
            made.mkdir()
            write(made)
            try:
                os.replace(made, folder)  # all or nothing
            except OSError:  # os.replace keeps a folder that has files: another process was faster
                if not folder.is_dir():
                    raise
    return folder


def words() -> Iterator[str]:
    """Yield without end the words that are one token each behind a space, short ones first."""
    length = 1
    while True:
        yield from map("".join, product(SYLLABLES, repeat=length))
        length += 1


def write(shape: Shape, folder: Path) -> None:
    """Write config, tokenizer and weights into *folder*."""
    import torch
    from safetensors.torch import save_file

    from stages.generate.model.config import read_spec
    from stages.generate.model.spec import tensor_shapes

    tokens = write_all_but_weights(shape, folder)
    generator = torch.Generator().manual_seed(SEED)
    weights = {
        name: torch.ones(size, dtype=torch.bfloat16)
        if "norm" in name
        else torch.empty(size, dtype=torch.bfloat16).normal_(std=SCALE, generator=generator)
        for name, size in tensor_shapes(read_spec(folder)).items()
    }
    if shape.walks:
        for name in weights:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weights[name].zero_()
        embedding, end_of_prompt = weights["model.embed_tokens.weight"], tokens["\u010a"]
        head = weights["lm_head.weight"] = embedding.roll(1, 0)
        head[end_of_prompt + 1] = 0
        head[tokens[FIRST_WORD]] = embedding[end_of_prompt]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_nonsense(folder: Path) -> None:
    """Write config, tokenizer and weights of NONSENSE into *folder*.

    The weights prefer some tokens, so that the output can be read, if not understood: component 0 of every embedding is
    large and survives the layers. The head's component 0 is positive for the wanted tokens and negative for all others.
    """
    import numpy as np
    from safetensors.numpy import save_file

    from stages.generate.model.config import read_spec
    from stages.generate.model.spec import tensor_shapes

    vocabulary = write_all_but_weights(NONSENSE, folder)
    wanted = [vocabulary[token] for token in (*string.ascii_lowercase, "Ġ", ".", ",", STOP)]
    generator, shapes = np.random.default_rng(SEED), tensor_shapes(read_spec(folder))
    scales = {"model.embed_tokens.weight": 1.0, "lm_head.weight": 0.2}
    weights = {
        name: np.ones(shapes[name], np.float32)
        if "norm" in name
        else (generator.standard_normal(shapes[name]) * scales.get(name, 0.05)).astype(np.float32)
        for name in dict.fromkeys((*scales, *shapes))
    }
    weights["model.embed_tokens.weight"][:, 0] = 8.0
    weights["lm_head.weight"][:, 0] = -1.0
    weights["lm_head.weight"][wanted, 0] = 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_all_but_weights(shape: Shape, folder: Path) -> dict[str, int]:
    """Write config and tokenizer into *folder*; return the vocabulary."""
    tokens = _write_tokenizer(shape.vocab_size, folder)
    write_config(shape, folder, tokens[STOP])
    _write_json(folder / "generation_config.json", {"eos_token_id": [tokens[STOP], tokens[END]]})
    return tokens


def write_config(shape: Shape, folder: Path, eos_id: int = 0) -> None:
    """Write config.json into *folder*: all that an engine with random weights needs."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": shape.dtype,
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
        **shape.more,
    }
    _write_json(folder / "config.json", config)


def _write_tokenizer(vocab_size: int, folder: Path) -> dict[str, int]:
    """Write a byte-level BPE tokenizer of exactly *vocab_size* tokens; return the vocabulary."""
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
    return tokenizer.get_vocab()


def _merges() -> Iterator[tuple[str, str]]:
    """Yield letters to syllables, then a space and syllables to words, each word out of the one without its end."""
    yield from ((syllable[0], syllable[1]) for syllable in SYLLABLES)
    for word in words():
        yield ("Ġ" + word[:-2], word[-2:])


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


POOL_SIZE: Final = 4096


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, its token ids, and the number of tokens to generate."""

    text: str
    ids: tuple[int, ...]
    output_tokens: int


class Prompts:
    """Makes texts of exactly as many tokens as are wanted."""

    def __init__(self, folder: Path) -> None:
        """Find words that are one token each, whatever is before them: they begin with a space.

        Raises:
            ConfigError: The folder has no tokenizer, or the tokenizer has too few such words.
        """
        from tokenizers import Tokenizer

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

    def walk(self, num_tokens: int) -> list[str]:
        """Return the first words that a model of WALKING writes."""
        first = self._tokenizer.token_to_id(FIRST_WORD) or 0
        return [self._tokenizer.decode([first + at]).strip() for at in range(num_tokens)]

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
