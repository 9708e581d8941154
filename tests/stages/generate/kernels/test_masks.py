"""The best allowed token of a row, and logits of refused tokens, as numpy has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.checkpoints import make_checkpoint
from support.kernel_variants import VARIANTS

from stages.generate.forward.weights import dummy_weights
from stages.generate.model.checkpoint import HEAD, check_folder
from stages.generate.model.compiled import KernelDecoder
from stages.generate.model.spec import ModelSpec
from stages.generate.sampling import compiled as sampling
from stages.generate.sampling.masks import packed, unpacked

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no kernels for this machine")

# V = vocabulary, R = rows, E = hidden size

SIZES = (11, 32, 497, 1000, 4099, 152_064)
ROWS = 9
Mask = np.ndarray


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return check_folder(make_checkpoint(tmp_path_factory.mktemp("masks"), "qwen3", tie=False))


def masks_of(vocab_size: int) -> list[Mask]:
    """Return masks of each kind: all, none, almost all, almost none, half, single tokens at both ends, a range."""
    random = np.random.default_rng(vocab_size)
    tokens_V = np.arange(vocab_size)
    shares = (0.999, 0.001, 0.5)
    return [
        np.full(vocab_size, True),
        np.full(vocab_size, False),
        *(random.random(vocab_size) < share for share in shares),
        tokens_V == 0,
        tokens_V == vocab_size - 1,
        (tokens_V > vocab_size // 3) & (tokens_V < vocab_size // 2),
        tokens_V % 33 != 32,
    ]


def decoder(spec: ModelSpec, head_VE: torch.Tensor, variant: str, threads: int = 2) -> KernelDecoder:
    sized = replace(spec, vocab_size=len(head_VE))
    weights = dummy_weights(sized, dtype=torch.float32, device=torch.device("cpu"))
    weights[HEAD] = head_VE
    return KernelDecoder(sized, weights, variant=variant, quantization="none", threads=threads)


def expected(logits_V: np.ndarray, allowed_V: Mask) -> int:
    if np.isnan(logits_V).any() or np.isposinf(logits_V).any():
        return -1
    masked_V = np.where(allowed_V, logits_V, -np.inf)
    return int(masked_V.argmax()) if masked_V.max() > -np.inf else -1


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_the_head_finds_the_first_best_token_that_a_mask_allows(spec: ModelSpec, vocab_size: int, variant: str) -> None:
    random = torch.Generator().manual_seed(vocab_size)
    few_NE = torch.randn(7, spec.hidden_size, generator=random)  # so many tokens have equal logits
    equal_VE = few_NE[torch.randint(7, (vocab_size,), generator=random)]
    x_RE = torch.randn(ROWS, spec.hidden_size, generator=random)
    allowed = masks_of(vocab_size)
    masks = [packed(allowed_V) for allowed_V in allowed]
    made = decoder(spec, equal_VE, variant)
    best_R, logits_RV = made.head(x_RE, range(ROWS), [True] * ROWS, masks)
    own_R, own_RV = made.head(x_RE, range(ROWS), [True] * ROWS)
    assert torch.equal(logits_RV, own_RV), "a mask leaves the model's own logits alone"
    found = [expected(*each) for each in zip(own_RV.numpy(), allowed, strict=True)]
    assert best_R.tolist() == found and best_R[0] == own_R[0] and best_R[1] == -1
    alone = [made.head(x_RE, [row], [False], [masks[row]])[0].tolist() for row in range(ROWS)]
    assert alone == [[token] for token in found], "the same in any company, whether its logits are wanted or not"
    some = [mask if row % 2 else None for row, mask in enumerate(masks)]
    mixed_R, _ = made.head(x_RE, range(ROWS), [False] * ROWS, some)
    assert mixed_R.tolist() == [found[row] if row % 2 else int(own_R[row]) for row in range(ROWS)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_logit_that_is_no_number_fails_a_row_whether_its_token_is_allowed_or_not(
    spec: ModelSpec, value: float
) -> None:
    """Minus infinity is a number here: it is never the best."""
    random = torch.Generator().manual_seed(5)
    head_VE = torch.randn(1000, spec.hidden_size, generator=random)
    head_VE[[3, 700]] = 0
    head_VE[[3, 700], 0] = value
    x_RE = torch.randn(2, spec.hidden_size, generator=random)
    x_RE[:, 0] = 1
    tokens_V = np.arange(1000)
    made = decoder(spec, head_VE, VARIANTS[-1])
    for allowed_V in (tokens_V == 3, tokens_V != 3, (tokens_V != 3) & (tokens_V != 700), tokens_V > 700):
        best_R, logits_RV = made.head(x_RE, range(2), [True] * 2, [packed(allowed_V)] * 2)
        assert best_R.tolist() == [expected(logits_V, allowed_V) for logits_V in logits_RV.numpy()]
        assert (min(best_R.tolist()) >= 0) == (value == float("-inf") and allowed_V.sum() > 1)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_logits_of_refused_tokens_become_minus_infinity(vocab_size: int) -> None:
    kernels = sampling.functions()
    assert kernels is not None
    logits_RV = np.random.default_rng(1).standard_normal((2 * ROWS, vocab_size), np.float32)
    logits_RV[:, vocab_size // 2] = np.nan
    rows, allowed, before_RV = [2 * row + 1 for row in range(ROWS)][::-1], masks_of(vocab_size), logits_RV.copy()
    sampling.refuse(kernels, logits_RV, rows, [packed(allowed_V) for allowed_V in allowed], threads=2)
    for row, allowed_V in zip(rows, allowed, strict=True):
        np.testing.assert_array_equal(logits_RV[row], np.where(allowed_V, before_RV[row], -np.inf))
    np.testing.assert_array_equal(logits_RV[::2], before_RV[::2])


@pytest.mark.parametrize("vocab_size", SIZES)
def test_bits_are_bools_again(vocab_size: int) -> None:
    for allowed_V in masks_of(vocab_size):
        allowed_W = packed(allowed_V)
        assert len(allowed_W) == -(-vocab_size // 32)
        np.testing.assert_array_equal(unpacked(allowed_W, vocab_size), allowed_V)
