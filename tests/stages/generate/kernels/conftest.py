"""The functions of each variant of the kernels that this machine can use."""

from __future__ import annotations

import pytest
from support.kernel_variants import VARIANTS, Functions

from stages.generate.kernels import build


@pytest.fixture(scope="session", params=VARIANTS)
def functions(request: pytest.FixtureRequest) -> Functions:
    """Return the functions of a variant."""
    return Functions(request.param)


@pytest.fixture(scope="session")
def zig(tmp_path_factory: pytest.TempPathFactory) -> build.Compiler:
    """Fetch a compiler that compiles for other machines, too."""
    return build.fetch_zig(tmp_path_factory.mktemp("zig"))
