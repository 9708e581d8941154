"""Memory that a step takes, computed before a model is loaded: as `lay_out` in work.c. A test compares the two."""

from __future__ import annotations

from typing import Final

from stages.generate.model.spec import ROUNDED, ModelSpec

EXPERT_TOKENS: Final = 512  # of work.h
OWN_ROWS: Final = 8  # ROWS_AT_ONCE of work.h
LARGEST_TILE: Final = 64 * 1024  # of work.c
SHARED_ROWS, TILE, LANES = 96, 64, 16  # of attention.c, with the wider vectors
SEGMENT: Final = 1024  # of kernels.h
FEW_QUERIES: Final = 4  # of work.c
CHUNK_BYTES: Final = 32  # AttentionChunk of work.h
DRAW_BYTES: Final = 17  # of each logit: `draw_scratch` of sample.c


def step_bytes(
    spec: ModelSpec,
    *,
    bfloat16: bool,
    quantization: str,
    variant: str,
    threads: int,
    page_size: int,
    num_tokens: int,
    num_rows: int,
    max_seq_len: int,
) -> int:
    """Return the bytes of a step of *num_tokens* tokens of *num_rows* requests, with the hidden states it returns.

    If *spec* is a rank's part of a model, the rank also needs memory for its own part of each sum and for all ranks'
    parts. The result may be a few per cent more than the kernels take. They keep the memory of the largest step.
    """
    narrow = bfloat16 and variant == "avx512"  # activations are pairs
    experts, hidden, queries = spec.experts, spec.hidden_size, spec.num_heads * spec.head_dim
    inner = spec.intermediate_size if len(experts.layers) < spec.num_layers else 0
    group, width = spec.num_heads // spec.num_kv_heads, _up(spec.head_dim, LANES)

    as_shorts = variant in ("avx2", "avx512f") and (quantization in ROUNDED or {"Q8_0", "Q5_0"} & set(spec.blocks))

    def prepared(inputs: int, *, quantized: bool = True) -> int:
        """Return the bytes of a row that a matrix multiplies."""
        if quantized and quantization != "none" and not {"F16", "BF16"} & set(spec.blocks):
            return _up(_up(inputs) * (5 if as_shorts else 3) // 2) + 64
        return _up(inputs) * (2 if narrow else 4) + 64

    of_token = 4 * (
        hidden * (1 + spec.norms_after)
        + 2
        + spec.rotary_dim * len(spec.kinds)
        + _up(queries + 2 * spec.num_kv_heads * spec.head_dim)
    )
    of_token += 4 * (_up(queries) + _up(inner))
    of_token += 4 * hidden * (spec.num_ranks + 1) if spec.num_ranks > 1 else 0
    widest_prepared = max(prepared(hidden, quantized=not experts.layers), prepared(queries), prepared(inner))
    total = num_tokens * (of_token + widest_prepared) + threads * min(OWN_ROWS, num_tokens) * widest_prepared
    if experts.layers:
        tokens = min(num_tokens, EXPERT_TOKENS)
        of_pair = 16 + 4 * (_up(experts.intermediate_size) + _up(hidden))
        of_pair += max(prepared(hidden), prepared(experts.intermediate_size))
        total += tokens * (4 * _up(experts.num_experts) + experts.experts_per_token * of_pair)
    blocks = num_rows + num_tokens // max(1, SHARED_ROWS // group)
    total += CHUNK_BYTES * blocks * spec.num_kv_heads * len(spec.kinds)
    parts = FEW_QUERIES * 4 * threads * -(-max_seq_len // max(SEGMENT, page_size)) if threads > 1 else 0
    total += parts * (group * (width + 2) * 4 + CHUNK_BYTES * len(spec.kinds))
    rows = max(SHARED_ROWS, group)
    attention = 4 * rows * (3 * width + TILE + 2 * LANES + 8) + 8 * TILE * (width + 2)
    attention += 4 * max(min(num_tokens, max(1, SHARED_ROWS // group)) * queries, group * (width + 2))
    widest = max(hidden, queries, inner, experts.intermediate_size)
    total += threads * (max(4 * LARGEST_TILE, attention, 4 * _up(widest)) + 4096)
    return max(total, threads * DRAW_BYTES * _up(spec.vocab_size))


def _up(count: int, multiple: int = 64) -> int:
    """Return *count*, rounded up to a multiple; the default is ROW_MULTIPLE of kernels.h."""
    return -(-count // multiple) * multiple
