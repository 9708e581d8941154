"""How the process of an engine imports torch: without what a CPU never needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.servers import ROOT

IMPORT = "import sys\nfrom ops.serve.worker import _import_torch\n_import_torch()\nimport torch\n"

DUMMY = """
import tempfile
from pathlib import Path
from ops.bench.models import Shape, write_config
from stages.generate.forward.weights import dummy_weights
from stages.generate.model.config import read_spec
folder = Path(tempfile.mkdtemp())
write_config(Shape(64, 1, 4, 2, 16, 96, 512, 10_000.0, 64), folder)
weights = dummy_weights(read_spec(folder), dtype=torch.float32, device=torch.device("cpu"))
print(all(bool(weight.isfinite().all()) for weight in weights.values()))
"""
"""Random weights in such a process."""


def printed(program: str, *, before: Path = ROOT) -> str:
    """Return what *program* prints; it finds modules in the folder *before* first."""
    line = [sys.executable, "-c", f"import sys\nsys.path[:0] = [{str(before)!r}, {str(ROOT)!r}]\n{program}"]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.parametrize("gpu", [False, True])
def test_the_descriptions_of_operations_are_imported_where_there_is_a_gpu_or_when_they_are_needed(
    gpu: bool, tmp_path: Path
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        f"from torch import _meta_registrations\nclass cuda:\n    is_available = staticmethod(lambda: {gpu})\n"
    )
    (tmp_path / "torch" / "_meta_registrations.py").write_text("is_whole = True\n")
    program = f"{IMPORT}print('torch._meta_registrations' in sys.modules)\nimport torch._meta_registrations as found\n"
    assert printed(f"{program}print(found.is_whole)", before=tmp_path).split() == [str(gpu), "True"]


@pytest.mark.slow  # it imports torch in a process of its own
def test_without_a_gpu_what_only_tracers_need_is_not_imported_and_can_be_later() -> None:
    program = (
        "print(torch.cuda.is_available() or 'torch._refs' not in sys.modules)\n"
        f"{DUMMY}"
        "import torch._meta_registrations\n"
        "print(tuple(torch.empty(2, 3, device='meta').nanmedian(dim=1).values.shape))\n"
    )
    assert printed(IMPORT + program) == "True\nTrue\n(2,)\n"
