"""Small random models of architectures that our decoder does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from support.checkpoints import LONGROPE, train_tokenizer
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    Exaone4Config,
    FalconConfig,
    Glm4Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    SeedOssConfig,
    StableLmConfig,
    Starcoder2Config,
)

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
KV = {"num_key_value_heads": 2, "intermediate_size": 96}
TWO_KINDS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48, "num_key_value_heads": 2}
SCALED = {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "attention_multiplier": 0.1}
FLAT = {"rope_type": "default", "rope_theta": 10_000.0}
CONFIGS: dict[str, tuple[Callable[..., PreTrainedConfig], Mapping[str, Any]]] = {
    "cohere2": (Cohere2Config, {**KV, **TWO_KINDS}),
    "starcoder2": (Starcoder2Config, {**KV, "sliding_window": 20}),
    "glm4": (Glm4Config, {**KV, "head_dim": 16}),
    "gpt-oss": (GptOssConfig, {**EXPERTS, **TWO_KINDS, "head_dim": 16, "rope_parameters": FLAT}),
    "seed-oss": (SeedOssConfig, {**KV, "head_dim": 16}),
    "exaone4": (Exaone4Config, {**KV, **TWO_KINDS}),
    "gpt-neox": (GPTNeoXConfig, {"intermediate_size": 96}),
    "mixtral": (MixtralConfig, EXPERTS),
    "olmo2": (Olmo2Config, KV),
    "granite": (GraniteConfig, {**KV, **SCALED}),
}
MORE: dict[str, tuple[Callable[..., PreTrainedConfig], Mapping[str, Any]]] = {
    "stablelm": (StableLmConfig, KV),
    "llama": (LlamaConfig, KV),
    "falcon": (FalconConfig, {}),
    "bloom": (BloomConfig, {}),
    "llama4": (
        Llama4TextConfig,
        {**KV, "intermediate_size_mlp": 96, "head_dim": 16, "num_local_experts": 2, "attention_chunk_size": 8},
    ),
    "mamba": (MambaConfig, {}),
    "opt": (OPTConfig, {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "longrope": (Phi3Config, {**KV, "original_max_position_embeddings": 12, "rope_parameters": LONGROPE}),
}


def make_foreign(folder: Path, name: str) -> Path:
    """Write a small model of an architecture."""
    config_class, more = (CONFIGS | MORE)[name]
    train_tokenizer(320, with_bos=False).save_pretrained(folder)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_class(**(SIZES | dict(more))))
    with torch.no_grad():
        for each, parameter in model.named_parameters():  # each class draws its weights in its own way
            parameter.normal_(1.0 if each.endswith("norm.weight") else 0.0, 0.2)
    model.save_pretrained(folder)
    return folder
