"""The build hook of the wheel: compiles the kernels, so that nobody needs a compiler to run MiniSGL."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))  # nothing of ours is installed where this runs
from stages.generate.kernels import build

FOLDER = Path("stages", "generate", "kernels")


class KernelsHook(BuildHookInterface[Any]):
    """Adds the library to a wheel; an editable install has it beside its sources."""

    scratch = ""

    def dependencies(self) -> list[str]:
        """Return what the build environment needs besides hatchling: a compiler, if this machine has none."""
        return build.requirements()

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library. A build that cannot leaves the reason in its place, and does not fail."""
        if build.machine() not in build.VARIANTS:
            return  # pure Python, for torch
        is_editable = version == "editable"
        if not is_editable:
            self.scratch = tempfile.mkdtemp()
        folder = build.HERE if is_editable else Path(self.scratch)
        compiler = build.build_or_note(folder)
        if compiler is not None:
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{compiler.tag}"
        if not is_editable:
            build_data["force_include"] |= {str(made): str(FOLDER / made.name) for made in folder.iterdir()}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was built for the wheel."""
        if self.scratch:
            shutil.rmtree(self.scratch)
