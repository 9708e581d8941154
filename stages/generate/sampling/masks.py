"""Tokens that a grammar allows, as bits: bit t % 32 of word t // 32 is 1 if token t may come next.

llguidance computes them and the kernels read them. Tensors on other devices have one bool for each token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stages.generate.schedule.plan import Sample, Words

# V = vocabulary, W = words of 32 tokens


def packed(allowed_V: npt.NDArray[np.bool_]) -> Words:
    """Return bools as bits."""
    bits = np.packbits(allowed_V, bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view(np.uint32)


def unpacked(allowed_W: Words, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return bits as bools. Words may have more bits."""
    return np.unpackbits(allowed_W.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)


def mask_of(how: Sample, vocab_size: int) -> Words:
    """Return the tokens that a row with a grammar can have. Its other limits hold only if they leave a token."""
    assert how.allowed is not None, "only rows with a grammar have a mask"
    wanted = [token for token in how.params.allowed_token_ids if token < vocab_size]
    unwanted = [token for token in how.forbidden if 0 <= token < vocab_size]
    if not wanted and not unwanted:
        return how.allowed
    allowed_V = unpacked(how.allowed, vocab_size)
    if wanted:
        fewer_V = np.zeros_like(allowed_V)
        fewer_V[wanted] = allowed_V[wanted]
        allowed_V = fewer_V if fewer_V.any() else allowed_V
    if unwanted:
        fewer_V = allowed_V.copy()
        fewer_V[unwanted] = False
        allowed_V = fewer_V if fewer_V.any() else allowed_V
    return packed(allowed_V)
