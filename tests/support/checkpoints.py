"""Small random checkpoints of every supported architecture, made on the spot with transformers, engines with their
weights, and what transformers generates from them.

The weights are ten times as wide as usual: with the default width a random model repeats one token for ever, and no
test of parity could fail on it.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    NoBadWordsLogitsProcessor,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from ops.bench.models import END as END
from ops.bench.models import START as START
from ops.bench.models import STOP as STOP
from stages.generate.forward.engine import Engine
from stages.generate.model.checkpoint import USUAL, check_folder
from stages.generate.model.spec import Loading
from stages.generate.setup.resolve import resolve_dtype

Family = Literal["llama3", "mistral", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "smollm3", "odd"]
FAMILIES: tuple[Family, ...] = (
    *("llama3", "mistral", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "smollm3"),
    "odd",
)
"""`odd` is a Llama with biases and 6 query and 3 kv heads, in which nothing but the head is a multiple of 8."""
WINDOW = 24
"""Tokens that a token of the mistral model sees, and one in the local layer of the gemma models."""
LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention"]
GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "attention_factor": 1.4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [2.0, 3.5, 5.0, 6.5, 8.0, 9.5],
}
LONGROPE_FROM = 1
"""Context beyond which the phi3 model has its long factors. No longer prompt than that has the short ones: transformers
would compute its keys with other factors than those of the tokens after them.
"""
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

TEXT = (
    """The log is the memory of the program. An accepted request ends exactly once, whatever dies. 你好，世界！你好吗？
Señor, ¿qué tal? Ça va très bien, merci. Grüße aus Österreich. Привет, как дела? こんにちは、世界。 안녕하세요. 🙂🙂 🚀
def fold(state, event): return state + [event]  # a stage is a fold over events; everything else is an edge
She sells sea shells by the sea shore; the shells she sells are sea shells, and the sea is in the shells.
"""
    * 4
)
BOS = "<|begin_of_text|>"

CHAT_TEMPLATE = """\
{%- set state = namespace(last='') -%}
{{- preface | default('') -}}
{%- if tools -%}{{ 'You have ' + (tools | tojson) + '\\n' }}{%- endif -%}
{%- for message in messages -%}
{%- if message.role not in ('system', 'user', 'assistant') -%}
{{ raise_exception('Unknown role: ' + message.role) }}
{%- endif -%}
{%- if message.role == state.last or (message.role == 'system' and not loop.first)
    or (message.role == 'assistant' and state.last != 'user') -%}
{{ raise_exception('After an optional system message roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{%- set state.last = message.role -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


def make_checkpoint(
    folder: Path,
    architecture: Family,
    *,
    seed: int = 0,
    dtype: str = "float32",
    tie: bool | None = None,
    bias: bool = False,
    num_layers: int = 2,
    vocab_size: int = 512,
    max_positions: int = 512,
    rope: Mapping[str, Any] | None = None,
    experts: Mapping[str, Any] | None = None,
    shard_size: str = "1GB",
    head_dim: int | None = None,
    sizes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model of about 200,000 parameters and its tokenizer to *folder*, as its author would; return *folder*.

    *tie* None: tied embeddings for qwen3, gemma and smollm3, not for the others. *bias* gives the linear layers that
    may have one a bias: those of the attention, and for llama3 those of the MLP. *vocab_size* is what the tokenizer is
    trained to, at most. *rope* replaces the family's, *experts* changes what qwen3moe says of its. Weights of more than
    *shard_size* become several files. *head_dim* replaces the family's, *sizes* other numbers of its config.
    """
    tokenizer = train_tokenizer(vocab_size, with_bos=architecture == "llama3")
    tokenizer.save_pretrained(folder)
    eos_ids = [tokenizer.get_vocab()[token] for token in (STOP, END)]
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_positions,
        "initializer_range": 0.2,
        "eos_token_id": eos_ids[0],
        "bos_token_id": tokenizer.bos_token_id,
        "attention_bias": bias,
        "tie_word_embeddings": architecture in ("qwen3", "gemma2", "gemma3", "smollm3") if tie is None else tie,
    }
    default_rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    phi3_rope = LONGROPE if head_dim is None else default_rope | {"partial_rotary_factor": 0.75}
    ropes: dict[str, Mapping[str, Any]] = {"llama3": LLAMA3_ROPE, "gemma3": GEMMA3_ROPES, "phi3": phi3_rope}
    common["rope_parameters"] = copy.deepcopy(dict(rope or ropes.get(architecture, default_rope)))
    config = _config(architecture, common, bias=bias, experts=experts or {}, sizes=sizes or {})
    if head_dim is not None:
        config.head_dim = head_dim
    for name, size in (sizes or {}).items():
        setattr(config, name, size)
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    _scatter(model)
    torch.set_rng_state(generator_state)
    assert model.generation_config is not None
    model.generation_config.eos_token_id = eos_ids
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def _config(
    architecture: Family,
    common: dict[str, Any],
    *,
    bias: bool,
    experts: Mapping[str, Any],
    sizes: Mapping[str, Any],
) -> PreTrainedConfig:
    if architecture == "llama3":
        return LlamaConfig(hidden_size=64, intermediate_size=112, head_dim=16, mlp_bias=bias, **common)
    if architecture in ("gemma2", "gemma3"):
        common |= {"hidden_size": 72, "intermediate_size": 96, "head_dim": 32, "query_pre_attn_scalar": 24}
        kinds = itertools.islice(itertools.cycle(LOCAL_AND_GLOBAL), common["num_hidden_layers"])
        common |= {"sliding_window": WINDOW, "layer_types": [*kinds]}
        if architecture == "gemma3":
            return Gemma3TextConfig(**common)
        return Gemma2Config(attn_logit_softcapping=3.0, final_logit_softcapping=9.0, **common)
    if architecture == "phi3":
        del common["attention_bias"]
        common |= {"original_max_position_embeddings": LONGROPE_FROM}
        common |= {"hidden_size": 64, "intermediate_size": 96, "sliding_window": 40, "pad_token_id": 0}
        return Phi3Config(**(common | dict(sizes)))  # it counts the factors of the rope
    if architecture == "smollm3":
        common |= {"no_rope_layer_interval": 2}
        return SmolLM3Config(hidden_size=64, intermediate_size=96, pad_token_id=0, **common)
    if architecture == "odd":
        common |= {"num_attention_heads": 6, "num_key_value_heads": 3, "attention_bias": True, "mlp_bias": True}
        return LlamaConfig(hidden_size=90, intermediate_size=117, head_dim=24, **common)
    if architecture == "qwen3":
        return Qwen3Config(hidden_size=80, intermediate_size=96, head_dim=24, **common)
    if architecture == "qwen3moe":
        common |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True}
        common |= {"mlp_only_layers": [0]} | dict(experts)
        common |= {"head_dim": 24}  # which the class lets through without knowing it
        return Qwen3MoeConfig(hidden_size=64, intermediate_size=96, **common)
    del common["attention_bias"]  # their biases are not a matter of the config
    if architecture == "qwen2":
        return Qwen2Config(hidden_size=64, intermediate_size=96, **common)
    return MistralConfig(hidden_size=64, intermediate_size=96, head_dim=24, sliding_window=WINDOW, **common)


def train_tokenizer(vocab_size: int, *, with_bos: bool) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer in which some characters are one token and others several byte tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [END, START, STOP, *([BOS] if with_bos else [])]
    tokenizer.train_from_iterator(
        TEXT.splitlines(),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=STOP, pad_token=END, **({"bos_token": BOS} if with_bos else {})
    )
    fast.chat_template = ("{{ bos_token }}" if with_bos else "") + CHAT_TEMPLATE
    return fast


def _scatter(model: torch.nn.Module) -> None:
    """Norms are 1 or 0 and biases 0 in a new model: one left out or in the wrong place would go unseen."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "embed" in name and hasattr(model.config, "query_pre_attn_scalar"):
                parameter.mul_(0.1)  # those of gemma are scaled: else each token would be its own successor
            elif name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)


KERNELS, DEVICE = "torch", torch.device("cpu")
"""What computes in `make_engine`, and where, unless it is told; a test module sets them to each kind in turn."""


def make_engine(folder: Path, dtype: str = "auto", *, loading: Loading = USUAL, **more: Any) -> Engine:
    """Return an engine whose unused memory is NaN, so that whoever reads it is found out."""
    spec = check_folder(folder, loading)
    sizes = {"num_pages": 128, "page_size": 4, "max_running_requests": 4, "max_seq_len": 160}
    options: dict[str, Any] = {
        "device": DEVICE,
        "attention": "torch" if DEVICE.type == "cuda" else "reference",
        "dtype": resolve_dtype(spec, dtype),
        "kernels": KERNELS,
        **sizes,
    }
    options |= more
    engine = Engine(spec, folder, loading=loading, **options)
    engine.kv_L2PKSD.fill_(float("nan"))
    return engine


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model as transformers computes it, in eager mode."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the default one multiplies in some dtypes alone
    return model


def reference_logits(model: Any, token_ids: Sequence[int], cache: Any) -> Tensor:
    """Return logits_TV of *token_ids* after what *cache*, a DynamicCache, has seen, and let it see these, too."""
    # transformers 5.24 has renamed the argument.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    logits_TV: Tensor = model(torch.tensor([token_ids]), use_cache=True, **{name: cache}).logits[0]
    return logits_TV


def reference_tokens(
    folder: Path,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    *,
    ignore_eos: bool = True,
    bad_words: Sequence[Sequence[int]] = (),
) -> tuple[list[int], float]:
    """Return what transformers generates greedily (eager, float32), and the smallest gap between its two best logits.

    A test that compares tokens asserts that the gap is far above rounding, else it would compare noise. Without
    *ignore_eos* the tokens end with the end-of-sequence token, if one comes. No sequence of *bad_words* comes out; its
    processor is shown the output alone, because with vLLM and us the prompt begins none of them.
    """
    model = reference_model(folder)
    eos_ids = () if ignore_eos else model.generation_config.eos_token_id
    forbid = NoBadWordsLogitsProcessor([list(word) for word in bad_words]) if bad_words else None
    tokens: list[int] = []
    smallest_gap = float("inf")
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in eos_ids):
        with torch.inference_mode():
            logits_V = model(torch.tensor([[*prompt_ids, *tokens]])).logits[0, -1]
        if forbid is not None:
            logits_V = forbid(torch.tensor([tokens], dtype=torch.long), logits_V[None])[0]
        best = logits_V.topk(2)
        smallest_gap = min(smallest_gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens, smallest_gap
