"""The double of FlashInfer."""

from __future__ import annotations

import pytest
from support.devices import flashinfer_double
from support.flashinfer_double import Double
from support.flashinfer_signatures import VERSIONS


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Double:
    """FlashInfer in torch, of the version that a test names."""
    return flashinfer_double(monkeypatch, getattr(request, "param", VERSIONS[0]))
