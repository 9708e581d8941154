"""The functions of each variant of the kernels that this machine can use."""

from __future__ import annotations

import pytest
from kernel_variants import VARIANTS, Functions


@pytest.fixture(scope="session", params=VARIANTS)
def functions(request: pytest.FixtureRequest) -> Functions:
    """Return the functions of a variant."""
    return Functions(request.param)
