"""A small random Qwen3 checkpoint that writes letters without sense, and as many as are asked for.

For what measures or tests all but the answers: a second of numpy, 2 MB, not torch.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from ops.bench.made_once import made_once

MODEL_ID: Final = "minisgl-nonsense"
SEED: Final = 0
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, CONTEXT = 128, 2, 4, 2, 32, 384, 4096


def ensure(parent: Path) -> Path:
    """Return the folder of the model under *parent*; write it first where it is not there yet."""
    return made_once(parent / MODEL_ID, write)


def write(folder: Path) -> None:
    """Write config, tokenizer and weights into *folder*."""
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    vocab_size = tokenizer.get_vocab_size()
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_json(folder / "generation_config.json", {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]})
    _write_json(
        folder / "config.json",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "float32",
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "intermediate_size": INTERMEDIATE,
            "vocab_size": vocab_size,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
            "attention_bias": False,
            "eos_token_id": ids["<|im_end|>"],
        },
    )
    vocabulary = tokenizer.get_vocab()
    wanted = [vocabulary[token] for token in (*string.ascii_lowercase, "Ġ", ".", ",", "<|im_end|>")]
    save_file(_weights(vocab_size, wanted), folder / "model.safetensors", metadata={"format": "pt"})


def _tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are the 256 bytes and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _weights(vocab_size: int, wanted: list[int]) -> dict[str, NDArray[np.float32]]:
    """Return random weights that prefer the tokens *wanted*.

    Component 0 of every embedding is large and survives the layers; the head's component 0 is positive for the wanted
    tokens and negative for all others, so that what comes out can be read, if not understood.
    """
    generator = np.random.default_rng(SEED)

    def normal(*shape: int, scale: float = 0.05) -> NDArray[np.float32]:
        return (generator.standard_normal(shape) * scale).astype(np.float32)

    embedding = normal(vocab_size, HIDDEN, scale=1.0)
    embedding[:, 0] = 8.0
    head = normal(vocab_size, HIDDEN, scale=0.2)
    head[:, 0] = -1.0
    head[wanted, 0] = 1.0
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": head,
    }
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{name}.weight": normal(*shape) for name, shape in shapes.items()}
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            weights[f"{prefix}{name}.weight"] = np.ones(HEAD_DIM, np.float32)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = np.ones(HIDDEN, np.float32)
    return weights


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
