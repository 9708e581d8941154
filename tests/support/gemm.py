"""The functions of a variant that pack a matrix and multiply with it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  (everybody's name for it)
from numpy.typing import NDArray
from support.kernel_variants import Functions
from torch import Tensor

from stages.generate.kernels.library import Matrix, library
from stages.generate.model.compiled import FORMAT_OF
from stages.generate.model.gguf import BLOCKS

PANEL = 16
FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 6, "int4": 10}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GUARD = 12345.0
"""What lies beyond the arrays that a function may write to."""


def padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Return an array that begins at a cache line."""
    raw = np.full(num_bytes + 64, 0xA5, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:num_bytes]


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed matrix and the arrays that it points to."""

    matrix: Matrix
    panels: NDArray[np.uint8]
    bias_O: NDArray[np.float32] | None


def library_functions() -> ctypes.CDLL:
    """Return the functions of the library that are not a variant's."""
    found = library()
    assert not isinstance(found, str), found
    return found.functions


@dataclass(frozen=True, slots=True)
class Gemm:
    """The functions of one variant."""

    functions: Functions

    @property
    def variant(self) -> str:
        return self.functions.variant

    def call(self, name: str, *arguments: object) -> int:
        return self.functions.call(name, *arguments)

    def pack(self, format_name: str, weight_OI: Tensor, bias_O: Tensor | None = None) -> Packed:
        """Pack a weight of any dtype."""
        outputs, inputs = weight_OI.shape
        source = next(name for name, dtype in DTYPES.items() if dtype == weight_OI.dtype)
        panel_bytes = self.call("panel_bytes", FORMATS[format_name], inputs)
        assert panel_bytes % 64 == 0
        num_panels = padded(outputs, PANEL) // PANEL
        panels = aligned(num_panels * panel_bytes + 64)
        rows = [weight_OI[o].data_ptr() if o < outputs else None for o in range(num_panels * PANEL)]
        for panel in range(num_panels):
            pointers = (ctypes.c_void_p * PANEL)(*rows[panel * PANEL : (panel + 1) * PANEL])
            at = ctypes.c_void_p(panels.ctypes.data + panel * panel_bytes)
            self.call("pack", FORMATS[format_name], pointers, FORMATS[source], inputs, at)
        assert (panels[-64:] == 0xA5).all()
        bias = None
        if bias_O is not None:
            bias = np.zeros(num_panels * PANEL, np.float32)
            bias[:outputs] = bias_O.numpy()
        matrix = Matrix(panels.ctypes.data, None if bias is None else bias.ctypes.data, outputs, inputs)
        matrix.format = FORMATS[format_name]
        return Packed(matrix, panels, bias)

    def pack_blocks(self, kind: str, blocks: NDArray[np.uint8], inputs: int) -> Packed:
        """Pack rows of the blocks of a GGUF file."""
        format_ = FORMAT_OF[kind]
        num_panels = padded(len(blocks), PANEL) // PANEL
        panels = aligned(num_panels * self.call("panel_bytes", format_, inputs) + 64)
        rows = np.zeros(num_panels * PANEL, np.uint64)
        rows[: len(blocks)] = blocks.ctypes.data + np.arange(len(blocks), dtype=np.uint64) * blocks.shape[1]
        pack = library_functions().kernels_pack_blocks
        at = (ctypes.c_int64(num_panels), ctypes.c_int64(inputs), 2, ctypes.c_void_p(panels.ctypes.data))
        pack(BLOCKS[kind][0], ctypes.c_void_p(rows.ctypes.data), *at)
        assert (panels[-64:] == 0xA5).all()
        matrix = Matrix(panels.ctypes.data, None, len(blocks), inputs)
        matrix.format = format_
        return Packed(matrix, panels, None)

    def prepare(self, packed: Packed, x_RI: Tensor) -> NDArray[np.uint8]:
        """Return rows of activations as `multiply` reads them."""
        inputs, format_ = packed.matrix.inputs, packed.matrix.format
        row_bytes = self.call("activation_bytes", format_, inputs)
        assert row_bytes % 64 == 0
        rows = aligned(len(x_RI) * row_bytes + 64)
        x = F.pad(x_RI, (0, padded(inputs, 64) - inputs)).contiguous()
        for r in range(len(x)):
            at = ctypes.c_void_p(rows.ctypes.data + r * row_bytes)
            self.call("prepare", format_, ctypes.c_void_p(x[r].data_ptr()), inputs, at)
        assert (rows[-64:] == 0xA5).all()
        return rows[:-64].reshape(len(x_RI), row_bytes)

    def multiply(self, packed: Packed, rows: NDArray[np.uint8], splits: Sequence[int] | None = None) -> Tensor:
        """Return y_RO; each call gets the panels between two neighbours of *splits*."""
        outputs = packed.matrix.outputs
        num_panels = padded(outputs, PANEL) // PANEL
        y = torch.full((len(rows), num_panels * PANEL + 3), GUARD)
        for first, end in zip(s := splits or [0, num_panels], s[1:], strict=False):
            out = ctypes.c_void_p(y.data_ptr() + first * PANEL * 4)
            at = ctypes.c_void_p(rows.ctypes.data)
            self.call("multiply", ctypes.byref(packed.matrix), at, len(rows), first, end - first, out, y.shape[1])
        assert (y[:, -3:] == GUARD).all()
        assert not y[:, outputs:-3].nan_to_num().any()
        return y[:, :outputs]

    def tile(self, matrix: Matrix, num_rows: int, threads: int) -> tuple[int, int]:
        """Return how many rows and panels a call should get."""
        rows, panels = ctypes.c_int64(), ctypes.c_int64()
        self.call("tile", ctypes.byref(matrix), num_rows, threads, ctypes.byref(rows), ctypes.byref(panels))
        return rows.value, panels.value

    def __call__(self, packed: Packed, x_RI: Tensor) -> Tensor:
        return self.multiply(packed, self.prepare(packed, x_RI))
