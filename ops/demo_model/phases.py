"""What the phases of the training are about, each by its index. Knows no steps and no rates."""

from __future__ import annotations

from typing import Final

NUM_PHASES: Final = 5
THIRD_PHASE: Final = 2
"""From here on, answers that are hard to write come more often."""
FOURTH_PHASE: Final = 3
"""From here on, most tools have other names."""
SHARES: Final = ((0.22, 0.07), (0.22, 0.07), (0.22, 0.07), (0.1, 0.55), (0.08, 0.5))
"""Which part of the conversations is there to recall something, and which part has tools."""
STYLES: Final = ((0.8, 0.9), (0.8, 0.9), (0.55, 0.8), (0.55, 0.8), (0.4, 0.6))
"""Which part of the plain conversations has no style, and which part has none or capitals. The others have one word."""
BOTH_TOOLS: Final = (0.5, 0.5, 0.5, 0.5, 0.9)
"""Which part of the conversations with tools has two that are called."""
