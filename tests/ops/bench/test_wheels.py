"""Wheels for a machine without network: which are needed, how they are unpacked, and that they are all it takes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from support.servers import ROOT, Command, free_port, wait_until_ready

from ops.bench import gpu, wheels
from ops.bench.gpu import TESTS_NEED
from ops.bench.wheels import Package, Unsatisfied, closure
from pipeline.errors import ConfigError

NEXT = f"{sys.version_info.major}{sys.version_info.minor + 1}"
WITH_GPU = "from ops.bench import gpu; gpu.has_gpu = lambda: True; "
LINUX = {**{key: str(value) for key, value in default_environment().items()}, "python_version": "3.12"}

# which are needed


def among(packages: Mapping[str, Package]) -> wheels.Find:
    def find(wanted: Sequence[Requirement]) -> dict[str, Package]:
        return {one.name.lower(): packages[one.name.lower()] for one in wanted}

    return find


def test_what_is_needed_is_followed_to_its_end_with_extras_and_markers() -> None:
    packages = {
        "ours": Package("1", ("client[fast]>=2", "old; python_version < '3.12'", "new; python_version >= '3.12'")),
        "client": Package("2.1", ("Parser; extra == 'fast'", "tests; extra == 'test'")),
        "parser": Package("1", ("ours",)),
        "new": Package("1", ("torch>=2",)),
    }
    found = closure(["ours"], among(packages), LINUX, without=("torch",))
    assert sorted(found) == ["client", "new", "ours", "parser"]


def test_an_extra_that_a_later_package_asks_for_is_followed_too() -> None:
    packages = {
        "ours": Package("1", ("client", "other")),
        "client": Package("2", ("parser; extra == 'fast'",)),
        "other": Package("1", ("client[fast]",)),
        "parser": Package("1", ()),
    }
    assert "parser" in closure(["ours"], among(packages), LINUX)


def test_versions_that_do_not_go_together_are_refused() -> None:
    packages = {"a": Package("1", ("c",)), "b": Package("1", ("c<2",)), "c": Package("2", ())}
    with pytest.raises(Unsatisfied, match="c<2 is required, and 2 was found"):
        closure(["a", "b"], among(packages), LINUX)


def test_what_is_not_installed_is_named() -> None:
    with pytest.raises(Unsatisfied, match="no-such-package is not installed"):
        wheels.installed([Requirement("no-such-package")])


def test_what_a_machine_has_of_its_own_does_not_travel() -> None:
    """pydantic does: some versions of what transformers requires bring it, others do not."""
    stays = wheels.stays(LINUX)
    assert {"torch", "numpy", "transformers", "safetensors", "tokenizers", "huggingface-hub", "jinja2"} <= stays
    assert not stays & {"pydantic", "pydantic-core", "typing-extensions", "redis", "rich"}


# how they are unpacked


def write_wheel(folder: Path, name: str, files: Mapping[str, str]) -> None:
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, text in files.items():
            info = zipfile.ZipInfo(path)
            info.external_attr = (0o755 if "/bin/" in path else 0o644) << 16
            archive.writestr(info, text)


def test_wheels_are_unpacked_for_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "unpacked"
    files = {
        "stand_in_package/__init__.py": "VALUE = 7",
        "stand_in_package/bin/server": "#!/bin/sh",
        "a-1.data/purelib/stand_in_module.py": "VALUE = 8",
        "a-1.data/scripts/script": "#!python",
        "a-1.data/scripts/bin/program": "#!/bin/sh",
    }
    write_wheel(tmp_path, "a-1-py3-none-any.whl", files)
    gpu.unpack(tmp_path, folder)
    assert os.access(folder / "stand_in_package/bin/server", os.X_OK)
    assert not os.access(folder / "stand_in_package/__init__.py", os.X_OK)
    assert not list(folder.rglob("script"))
    assert os.access(folder / "bin/bin/program", os.X_OK)
    assert importlib.import_module("stand_in_package").VALUE == 7
    assert importlib.import_module("stand_in_module").VALUE == 8
    assert sys.path[1] == str(folder)


@pytest.mark.parametrize(
    "wheel",
    ["", f"a-1-cp{NEXT}-cp{NEXT}-manylinux2014_x86_64.whl", "a-1-py2-none-any.whl", "a-1-py3-none-win_amd64.whl"],
)
def test_a_folder_without_wheels_and_one_for_another_python_or_system_are_refused(tmp_path: Path, wheel: str) -> None:
    if wheel:
        write_wheel(tmp_path, wheel, {"a.py": ""})
    with pytest.raises(ConfigError, match="--wheels"):
        gpu.unpack(tmp_path, tmp_path / "unpacked")


def test_a_bare_python_says_what_it_lacks(tmp_path: Path) -> None:
    """A venv without packages: what runs before --wheels is unpacked imports nothing but Python's own."""
    venv.create(tmp_path / "venv")
    program = f"{WITH_GPU}gpu.main(['--wheels', 'no-such-folder'], {{}})"
    command = [str(tmp_path / "venv/bin/python"), "-c", program]
    done = subprocess.run(command, cwd=ROOT, env={}, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith("pipeline.errors.ConfigError: missing packages: torch, transformers")


# that they are all it takes


def pack(name: str, folder: Path) -> None:
    """Write to *folder* the wheel that the installed package *name* came from, but for scripts and bytecode."""
    there = metadata.distribution(name)
    tags = [
        line.partition(": ")[2] for line in (there.read_text("WHEEL") or "").splitlines() if line.startswith("Tag:")
    ]
    pythons, abis, platforms = (
        ".".join(dict.fromkeys(part)) for part in zip(*(tag.split("-") for tag in tags), strict=True)
    )
    file = f"{there.metadata['Name'].replace('-', '_')}-{there.version}-{pythons}-{abis}-{platforms}.whl"
    with zipfile.ZipFile(folder / file, "w") as archive:
        for path in there.files or ():
            if ".." not in path.parts and path.suffix != ".pyc" and Path(str(path.locate())).is_file():
                archive.write(str(path.locate()), str(path))


def link(name: str, folder: Path) -> None:
    """Show in *folder* the installed package *name*, and no other."""
    there = metadata.distribution(name)
    for top in {path.parts[0] for path in there.files or () if ".." not in path.parts}:
        if top != "__pycache__" and not (folder / top).exists():
            (folder / top).symlink_to(Path(str(there.locate_file(top))))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The Python of a machine that has torch, numpy, transformers and safetensors alone, and its folder of wheels."""
    scratch = tmp_path_factory.mktemp("bare")
    (there := scratch / "there").mkdir()
    (folder := scratch / "wheels").mkdir()
    environment = {key: str(value) for key, value in default_environment().items()}
    for name in closure(wheels.THERE, wheels.installed, environment):
        link(name, there)
    venv.create(scratch / "venv", with_pip=True)
    python = scratch / "venv/bin/python"
    wheels.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"])  # an old one, of venv itself
    (site,) = (scratch / "venv/lib").glob("python*/site-packages")
    (site / "there.pth").write_text(f"{there}\n")
    wheels.run([sys.executable, "-m", "build", "--wheel", *wheels.isolation(), "--outdir", str(folder), str(ROOT)])
    ours = wheels.read(folder)["minisgl"].requires
    wanted = [*(one for one in ours if "extra ==" not in one), *TESTS_NEED]
    for name in closure(wanted, wheels.installed, environment, wheels.stays(environment)):
        pack(name, folder)
    return python, folder


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.timeout(900)
def test_the_wheels_and_what_the_machine_has_are_all_that_gpu_check_needs(
    bare: tuple[Path, Path], tmp_path: Path
) -> None:
    """Without a GPU: what the same tests compute on a CPU."""
    python, folder = bare
    file, only = tmp_path / "out.json", "deterministic,sampling"
    patched = f"{WITH_GPU}gpu.machine, gpu.MARKED = dict, 'not gpu'; import sys; sys.exit(gpu.main(sys.argv[1:], {{}}))"
    done = subprocess.run(
        [str(python), "-c", patched, "--wheels", str(folder), "--only", only, "--json", str(file)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    groups = json.loads(file.read_text())["groups"]
    assert [(group["name"], group["status"], group["passed"] > 0) for group in groups] == [
        (name, "ok", True) for name in only.split(",")
    ]


@pytest.mark.slow
@pytest.mark.night
def test_the_wheels_installed_without_an_index_serve(bare: tuple[Path, Path], tmp_path: Path) -> None:
    python, folder = bare
    wheels.run([str(python), "-m", "pip", "install", "--quiet", "--no-index", f"--find-links={folder}", "minisgl"])
    port = free_port()
    (empty := tmp_path / "empty").mkdir()
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [str(python.with_name("minisgl")), "serve", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"PATH": "/usr/bin:/bin", "XDG_STATE_HOME": str(tmp_path / "state")},
            cwd=empty,
        )
    command = Command(process, tmp_path / "output")
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", [command])
        asked = {"messages": [{"role": "user", "content": "Repeat after me: log"}], "temperature": 0}
        said = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=asked, timeout=120)
        assert said.json()["choices"][0]["message"]["content"] == "log"
        assert command.stop() == 0
    finally:
        command.stop()
