"""The wheel: what is in it, and that it is all that a machine without our source needs."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import httpx
import pytest
from support.selection import by_night, rest_at_night
from support.servers import ROOT, Command, free_port, wait_until_ready

from ops.bench.wheels import isolation
from stages.generate.kernels import build, library
from stages.generate.model.checkpoint import DEMO_FOLDER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TORCH = "torch>=2.11,<=2.13.0"
TRAINING = ROOT / "ops" / "demo_model"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # At night from a source archive, which compiles the kernels again; by day the archive is looked at.
    made = [sys.executable, "-m", "build", *by_night(["--wheel"], []), *isolation(), "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(made, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_has_every_module_and_every_commit(names: list[str]) -> None:
    packages = ("pipeline", "stages", "web", "ops")
    paths = [path for package in packages for kind in ("*.py", "*.lua") for path in (ROOT / package).rglob(kind)]
    source = {str(path.relative_to(ROOT)) for path in paths if TRAINING not in path.parents}
    assert {name for name in names if name.endswith((".py", ".lua"))} == source | {"minisgl.py"}
    commits = {path.name for path in (ROOT / "pipeline" / "log" / "commits").iterdir()}
    assert {name.rpartition("/")[2] for name in names if name.startswith("pipeline/log/commits/")} == commits
    assert "lib.lua" in commits and "submit.lua" in commits


def test_the_wheel_has_every_file_of_the_pages(names: list[str]) -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "web" / "pages").rglob("*") if path.is_file()}
    assert {name for name in names if name.startswith("web/pages/")} == files
    assert "web/pages/docs.html" in files


def test_the_wheel_has_the_demo_model_and_not_its_training(names: list[str]) -> None:
    folder = DEMO_FOLDER.relative_to(ROOT)
    assert {name for name in names if name.startswith(f"{folder}/")} == {
        str(folder / file.name) for file in DEMO_FOLDER.iterdir()
    }
    assert f"{folder}/model.safetensors" in names
    assert not [name for name in names if name.startswith("ops/demo_model/")]


def test_the_wheel_has_the_compiled_kernels_and_not_their_sources(wheel: Path, names: list[str]) -> None:
    folder = "stages/generate/kernels/"
    rest = [name for name in names if name.startswith(folder) and not name.endswith(".py")]
    has_kernels = build.machine() in build.VARIANTS
    assert rest == ([f"{folder}libminisgl.so"] if has_kernels else [])
    compiler = build.find_compiler()
    tag = "any" if not has_kernels else compiler.tag if compiler else f"manylinux_2_17_{build.machine()}"
    assert wheel.name == f"minisgl-0.2.0-py3-none-{tag}.whl"


def test_a_source_archive_has_all_that_the_kernels_are_compiled_from(tmp_path: Path) -> None:
    made = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(made, capture_output=True, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    folder = Path("stages", "generate", "kernels")
    sources = {str(folder / path.name) for kind in ("*.c", "*.h", "*.py") for path in (ROOT / folder).glob(kind)}
    assert {name for name in packed if name.startswith(f"{folder}/")} == sources
    assert "hatch_build.py" in packed


def test_the_wheel_has_nothing_else(names: list[str]) -> None:
    top = {name.partition("/")[0] for name in names}
    assert top == {"minisgl.py", "pipeline", "stages", "web", "ops", "minisgl-0.2.0.dist-info"}
    parts = {part for name in names for part in name.split("/")}
    assert not parts & {"tests", "conftest.py", "__pycache__"}
    assert not [part for part in parts if part.startswith(("test_", ".")) or part.endswith((".pyc", ".log"))]


def test_the_wheel_knows_its_command_and_that_it_is_not_for_pypi(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        commands = archive.read("minisgl-0.2.0.dist-info/entry_points.txt").decode()
        metadata = archive.read("minisgl-0.2.0.dist-info/METADATA").decode()
    assert "minisgl = minisgl:main" in commands
    assert "Classifier: Private :: Do Not Upload" in metadata


@pytest.fixture(scope="module", params=rest_at_night(["on the packages here", "on its own"]))
def fresh(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a new venv with the wheel in it.

    At night with all that it needs: torch first, as the README says, then the rest. By day it sees the packages of this
    Python, but not what they link to: neither our source nor an editable install of it.
    """
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    on_its_own = request.param == "on its own"
    venv.create(folder, with_pip=on_its_own)
    python = str(folder / "bin" / "python")
    if on_its_own:
        installs = [[python, "-m", "pip", "install", "--quiet", what] for what in (TORCH, str(wheel))]
    else:
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "here.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
        # What is here already satisfies it, were it not told to install.
        flags = ["--quiet", "--no-deps", "--no-index", "--force-reinstall", "--ignore-installed"]
        installs = [[sys.executable, "-m", "pip", "--python", python, "install", *flags, str(wheel)]]
    for install in installs:
        done = subprocess.run(install, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin"


def test_the_wheel_is_what_is_imported(fresh: Path, tmp_path: Path) -> None:
    code = "import minisgl, pipeline, stages, web, ops; print(minisgl.__file__, *ops.__path__, *pipeline.__path__)"
    said = subprocess.run([fresh / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert all(path.startswith(str(fresh.parent)) for path in said.stdout.split())


def test_the_kernels_of_the_wheel_can_be_used(fresh: Path, tmp_path: Path) -> None:
    code = "from stages.generate.kernels import library; print(library.available(), library.reason())"
    said = subprocess.run([fresh / "python", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert said.stdout.startswith(f"{library.available()} ")
    assert str(ROOT) not in said.stdout


@pytest.mark.night
def test_the_wheel_in_a_fresh_venv_serves_from_an_empty_folder(fresh: Path, tmp_path: Path) -> None:
    empty, port = tmp_path / "empty", free_port()
    empty.mkdir()
    environment = {"PATH": f"{fresh}{os.pathsep}/usr/bin{os.pathsep}/bin", "XDG_STATE_HOME": str(tmp_path / "state")}
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            ["minisgl", "serve", "--port", str(port)],
            executable=fresh / "minisgl",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=empty,
        )
    command = Command(process, tmp_path / "output")
    try:
        wait_until_ready(f"http://127.0.0.1:{port}", [command])
        said = httpx.post(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "Repeat after me: log"}], "temperature": 0},
            timeout=120,
        )
        assert said.json()["choices"][0]["message"]["content"] == "log"
        for worker in command.processes():
            command_line = worker.cmdline()
            # The Redis server is a package of its own, which may be that of the checkout's environment.
            assert str(ROOT) not in " ".join(command_line) or command_line[0].split()[0].endswith("/valkey-server")
        assert command.stop() == 0
    finally:
        command.stop()
    assert "MiniSGL is ready after" in command.output
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "said"), [("minisgl --version", "minisgl 0.2.0\n"), ("python -m minisgl --help", "usage: minisgl serve")]
)
def test_the_wheel_says_its_version_and_usage(fresh: Path, tmp_path: Path, line: str, said: str) -> None:
    ended = subprocess.run([f"{fresh}/{line}"], shell=True, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith(said)
