"""Phase `machine`: what hardware and software is here, and which of our dependencies are not. It measures nothing."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from ops.bench.gpu.phase import Report, Scale, Skip, attempt

PYPROJECT: Final = Path(__file__).resolve().parents[3] / "pyproject.toml"
FLASHINFER_PARTS: Final = ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache", "apache-tvm-ffi")
GIB: Final = 2**30


def run(scale: Scale, report: Report) -> None:
    """Report what is here; nothing that is absent stops the rest."""
    with attempt(report, "host"):
        _host(report)
    with attempt(report, "torch"):
        _torch(report)
    with attempt(report, "gpu"):
        _gpu(scale, report)
    with attempt(report, "nvcc"):
        _nvcc(report)
    with attempt(report, "triton"):
        report("triton", version=version("triton"))
    with attempt(report, "flashinfer"):
        report("flashinfer", versions={name: version(name) for name in FLASHINFER_PARTS})
    with attempt(report, "dependencies"):
        _dependencies(report)
    with attempt(report, "redis server"):
        _redis(report)


def _host(report: Report) -> None:
    from ops.bench.report import cpu_model, num_cores

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    report(
        "host",
        python=platform.python_version(),
        executable=sys.executable,
        system=platform.platform(),
        cpu=cpu_model(),
        cores=num_cores(),
        memory_gib=round(memory, 1),
    )


def _torch(report: Report) -> None:
    import torch

    nccl = None
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        with attempt(report, "nccl"):
            nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    report(
        "torch",
        version=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        nccl=nccl,
        architectures=torch.cuda.get_arch_list(),
    )


def _gpu(scale: Scale, report: Report) -> None:
    import torch

    if scale.device != "cuda":
        raise Skip("there is no GPU, or --device cpu was given")
    if not torch.cuda.is_available():
        report("gpu", ok=False, error=f"torch {torch.__version__} cannot use the GPU that is here")
        return
    about = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    report(
        "gpu",
        name=about.name,
        num_gpus=torch.cuda.device_count(),
        driver=_driver(),
        compute_capability=f"{about.major}.{about.minor}",
        memory_gib=round(total / GIB, 1),
        free_gib=round(free / GIB, 1),
        multiprocessors=about.multi_processor_count,
        l2_mib=getattr(about, "L2_cache_size", 0) / 2**20,
    )


def _driver() -> str:
    """Return the version of NVIDIA's driver, or "" where nobody says it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found[1] if found else ""


def _nvcc(report: Report) -> None:
    places = [shutil.which("nvcc"), *(f"{os.environ.get(name)}/bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH"))]
    places.append("/usr/local/cuda/bin/nvcc")
    path = next((place for place in places if place and Path(place).is_file()), None)
    if path is None:
        raise Skip("no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda")
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=20).stdout
    found = re.search(r"release (\S+), V(\S+)", said)
    seen = found[2] if found else said.strip()[-80:]
    report("nvcc", path=path, version=seen, ninja=shutil.which("ninja"), compiler=shutil.which("c++"))


def _dependencies(report: Report) -> None:
    """Report the version of each package that pyproject.toml asks for; missing or too old is wrong."""
    missing: list[str] = []
    versions: dict[str, str | None] = {}
    for requirement in requirements():
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert name is not None, requirement
        versions[name[0]] = version(name[0])
        if why := unmet(requirement):
            missing.append(why)
    report("dependencies", ok=not missing, missing=missing)
    report("their versions", versions=versions)


def requirements() -> Iterator[str]:
    """Return what MiniSGL requires: as the checkout says, or as the installed package does."""
    if PYPROJECT.is_file():
        yield from tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    else:
        yield from (line for line in metadata.requires("minisgl") or () if "extra ==" not in line)


def unmet(requirement: str) -> str:
    """Return what is wrong with *requirement* on this machine, or ""."""
    from packaging.requirements import Requirement

    wanted = Requirement(requirement)
    if wanted.marker is not None and not wanted.marker.evaluate():
        return ""
    seen = version(wanted.name)
    if seen is None:
        return wanted.name
    if not wanted.specifier.contains(seen, prereleases=True):
        return f"{wanted.name} {seen}, wanted {wanted.specifier}"
    return ""


def version(package: str) -> str | None:
    """Return the version of an installed package; None: it is not here."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _redis(report: Report) -> None:
    from pipeline.process.redis_server import find_binary

    binary = find_binary()
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True, timeout=20).stdout
    report("redis server", path=binary, version=" ".join(said.split()[:3]))
