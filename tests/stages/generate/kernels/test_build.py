"""How the kernels are compiled, with a library of a few lines; and the build hook of the wheel."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.selection import rest_at_night

from hatch_build import KernelsHook
from stages.generate.kernels import build, library

ROOT = build.HERE.parents[2]
SMALL = build.Files(baseline=("cpu.c",), once=("once.c",), each=("variant.c",))
VARIANT = """
#include "kernels.h"
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)
static int64_t panel_bytes(Format format, int64_t inputs) { return 10 * inputs + format; }
const Variant JOIN(variant, VARIANT) = {.name = TEXT(VARIANT), .panel_bytes = panel_bytes};
"""
ONCE = """
__attribute__((visibility("default"))) float multiply_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
__attribute__((visibility("default"))) int has(void) { return 10 * HAS_AVX2 + HAS_AVX512; }
"""

pytestmark = pytest.mark.skipif(build.machine() not in build.VARIANTS, reason=f"no kernels for {build.machine()}")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with the files of SMALL."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("cpu.c", "kernels.h"):
        (folder / name).write_text((build.HERE / name).read_text())
    (folder / "variant.c").write_text(VARIANT)
    (folder / "once.c").write_text(ONCE)
    return folder


@pytest.fixture
def compiler() -> build.Compiler:
    found = build.find_compiler()
    if found is None:
        pytest.skip("no C compiler here")
    return found


def wrapper(folder: Path, line: str) -> str:
    """Return a compiler that runs *line* of shell first, and then `cc`."""
    path = folder / "wrapped-cc"
    path.write_text(f'#!/bin/sh\n{line}\nexec cc "$@"\n')
    path.chmod(0o755)
    return str(path)


def loaded(path: Path) -> library.Library:
    found = library.load(path)
    assert isinstance(found, library.Library), found
    return found


@pytest.mark.night
def test_files_are_compiled_once_or_for_each_variant(sources: Path, compiler: build.Compiler) -> None:
    path = sources / build.LIBRARY
    variants = build.build(path, compiler, sources, SMALL)
    found = loaded(path)
    assert found.compiled == tuple(reversed(variants))
    assert found.functions.has() == 10 * ("avx2" in variants) + ("avx512" in variants)
    for name in found.usable:
        variant = found.variant(name)
        assert (variant.name.decode(), variant.panel_bytes(library.Format.FLOAT16, 7)) == (name, 72)
    assert sorted(file.name for file in sources.iterdir()) == [
        *("cpu.c", "kernels.h", build.LIBRARY, "once.c", "variant.c")
    ]


@pytest.mark.night
def test_a_compiler_that_lacks_a_variant_leaves_it_out(
    sources: Path, monkeypatch: pytest.MonkeyPatch, compiler: build.Compiler
) -> None:
    if compiler.name != "cc":
        pytest.skip("no cc here")
    monkeypatch.setenv("CC", wrapper(sources.parent, 'case "$*" in *-mavx512bf16*) exit 1;; esac'))
    old = build.find_compiler()
    assert old is not None
    assert build.build(sources / build.LIBRARY, old, sources, SMALL) == ["avx2", "avx512f", "avx512vnni"]
    found = loaded(sources / build.LIBRARY)
    assert (found.compiled, found.functions.has()) == (("avx512vnni", "avx512f", "avx2"), 10)
    if "avx512" in found.cpu:
        assert found.reason("avx512").endswith("could compile avx512vnni and avx512f and avx2")


@pytest.mark.parametrize("wrong", rest_at_night(["once.c", "more.c"]))
def test_a_file_that_is_missing_or_not_listed_is_an_error(sources: Path, compiler: build.Compiler, wrong: str) -> None:
    (sources / "once.c").rename(sources / wrong)
    (sources / "more.c").touch()
    with pytest.raises(ValueError, match=r"more.c"):
        build.build(sources / build.LIBRARY, compiler, sources, SMALL)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("int broken(void) { return unknown; }\n", r"could not compile once.c\n(.*\n)*.*unknown"),
        pytest.param(
            "int missing(void);\nint has(void) { return missing(); }\n",
            r"could not link the library\n(.*\n)*.*missing",
            marks=pytest.mark.night,
        ),
    ],
)
def test_what_a_compiler_said_is_in_the_error_and_the_library_stays(
    sources: Path, compiler: build.Compiler, line: str, said: str
) -> None:
    (sources / "once.c").write_text(line)
    path = sources / build.LIBRARY
    path.write_text("as it was")
    with pytest.raises(build.CannotBuild, match=said):
        build.build(path, compiler, sources, SMALL)
    assert path.read_text() == "as it was"
    assert not list(sources.glob("*.*.so"))


def test_a_library_that_was_built_from_other_sources_is_not_used(sources: Path, compiler: build.Compiler) -> None:
    path = sources / build.LIBRARY
    build.build(path, compiler, sources, SMALL)
    assert build.origin_of(path) == (build.hash_of(sources), compiler.name)
    with (sources / "kernels.h").open("a") as header:
        header.write("// one more line\n")
    said = library.load(path)
    assert isinstance(said, str)
    assert "make venv" in said


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_without_a_compiler_zig_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (build.find_compiler(), build.requirements()) == (None, [build.ZIGLANG])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    found = build.find_compiler()
    assert found is not None
    assert found.command[1:] == ("-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.2.17")
    assert (found.tag, build.requirements()) == (f"manylinux_2_17_{machine}", [])


@pytest.mark.parametrize("chosen", ["zig", "no-such-compiler", "broken"])
def test_a_compiler_that_does_not_work_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    """Such as a cc without the headers of libc."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("CC", wrapper(tmp_path, "exit 1") if chosen == "broken" else chosen)
    assert build.requirements() == [build.ZIGLANG]


def test_a_cc_without_half_floats_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as gcc 11. It compiles all else, so only its probe finds out."""
    real = shutil.which("cc")
    if real is None:
        pytest.skip("no cc here")
    (tmp_path / "cc").write_text(f'#!/bin/sh\ngrep -qs _Float16 *.c && exit 1\nexec {real} "$@"\n')
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    old = build.Compiler("cc", ("cc",), "")
    assert old.can(build.Instructions((), "int works;"))
    assert (build.find_compiler(), build.requirements()) == (None, [build.ZIGLANG])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    found = build.find_compiler()
    assert found is not None and found.name == "zig cc"


# the hook


def run_hook(version: str = "standard") -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return what the hook tells hatchling of a wheel, and the files that it adds to it."""
    data: dict[str, Any] = {"force_include": {}, "pure_python": True, "tag": None}
    none: Any = None
    hook = KernelsHook(str(ROOT), {}, none, none, "", "wheel")
    hook.initialize(version, data)
    added = {path: Path(made).read_bytes() for made, path in data["force_include"].items()}
    hook.finalize(version, data, "")
    assert not any(Path(made).exists() for made in data["force_include"])
    return data, added


def test_a_wheel_has_the_library_of_the_checkout_if_the_same_compiler_made_it() -> None:
    here = build.HERE / build.LIBRARY
    compiler = build.find_compiler()
    if compiler is None or build.origin_of(here) != (build.hash_of(), compiler.name):
        pytest.skip("this checkout has a library of zig, or none")
    data, added = run_hook()
    assert added == {"stages/generate/kernels/libminisgl.so": here.read_bytes()}
    assert (data["pure_python"], data["tag"]) == (False, f"py3-none-{compiler.tag}")


@pytest.mark.night
def test_a_wheel_that_cannot_be_compiled_has_the_reason_and_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another compiler made the library of the checkout, so that one is not taken."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("CC", wrapper(tmp_path, 'case "$*" in *generate/kernels/*) echo "out of luck"; exit 1;; esac'))
    if build.find_compiler() is None:
        pytest.skip("no cc here")
    data, added = run_hook()
    assert (data["pure_python"], data["tag"]) == (True, None)
    assert list(added) == ["stages/generate/kernels/libminisgl.txt"]
    (tmp_path / build.NOTE).write_bytes(*added.values())
    said = library.load(tmp_path / build.LIBRARY)
    assert said == (
        f"they could not be built when MiniSGL was installed: {tmp_path}/wrapped-cc could not compile cpu.c; "
        f"all of it is in {tmp_path / build.NOTE}"
    )
    assert "out of luck" in (tmp_path / build.NOTE).read_text()


def test_a_machine_without_kernels_gets_a_pure_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert run_hook() == ({"force_include": {}, "pure_python": True, "tag": None}, {})
    assert build.requirements() == []
    assert library.load() == "there are no kernels for riscv64, only for Linux on x86_64 and aarch64"


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.timeout(900)
def test_zig_can_be_fetched_where_c_has_changed_since_the_installation(tmp_path: Path, sources: Path) -> None:
    zig = build.fetch_zig(tmp_path / "zig")
    variants = build.build(sources / build.LIBRARY, zig, sources, SMALL)
    assert variants == ["avx2", "avx512f", "avx512vnni", "avx512"]
    assert loaded(sources / build.LIBRARY).functions.has() == 11


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.timeout(900)
def test_without_a_compiler_pip_fetches_zig_and_the_wheel_fits_every_linux(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)],
        env={**{name: value for name, value in os.environ.items() if name != "CC"}, "PATH": str(tmp_path / "bin")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-manylinux_2_17_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(f"stages/generate/kernels/{build.LIBRARY}", tmp_path)
    found = loaded(tmp_path / "stages/generate/kernels" / build.LIBRARY)
    assert found.compiler.startswith("zig cc (Clang ")
    assert found.compiled == ("avx512", "avx512vnni", "avx512f", "avx2")
