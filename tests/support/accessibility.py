"""axe-core, which finds what keeps people with screen readers, keyboards or weak eyes out of a page. npm brings it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Final

import pytest
from support.browser import Browser

PACKAGE: Final = "axe-core@4.14.1"
SERIOUS: Final = ("serious", "critical")


@functools.cache
def axe() -> str:
    """Return the source of axe-core; without npm the test is skipped, but in CI it fails."""
    if shutil.which("npm") is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("npm is not on PATH: apt-get install npm")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, timeout=120)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as packed:
            source = packed.extractfile("package/axe.min.js")
            assert source is not None, f"{PACKAGE} has no axe.min.js"
            return source.read().decode()


def problems(browser: Browser) -> list[str]:
    """Return what is seriously wrong with the page as it looks now: the rule, and where."""
    if not browser.run("return !!window.axe"):
        browser.run(axe())
    found = browser.wait("const found = await axe.run(document); return found.violations;")
    return [
        f"{violation['id']}: {node['target']}: {node['failureSummary']}"
        for violation in found
        if violation["impact"] in SERIOUS
        for node in violation["nodes"]
    ]
