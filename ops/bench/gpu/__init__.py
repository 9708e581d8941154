"""`minisgl bench gpu`: what this code does on a GPU, in the few minutes that there is one.

Each phase is a module with a `run`, and a process of its own. This file imports nothing that a bare Python lacks: a
machine without network may have no more than torch, and gets the rest from the folder of --wheels first.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Install what --wheels brings, then run the phases; return the exit code.

    Raises:
        ConfigError: The flags cannot work, or a package is missing.
    """
    from ops.bench.gpu import install

    with contextlib.ExitStack() as stack:
        install_s = None
        if wheels := install.wheels_of(arguments, environment):
            began_s = time.perf_counter()
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="minisgl-wheels-"))
            install.install(Path(wheels).expanduser(), Path(folder))
            install_s = time.perf_counter() - began_s
        install.check()

        from ops.bench.gpu import command

        return command.run(arguments, environment, install_s)
