"""The library of kernels in Python: what it can do on this CPU, and that its functions are those of the header."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from stages.generate.kernels import build, library

HEADER = (build.HERE / "kernels.h").read_text()
FLAGS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512f": {"avx512f", "avx512dq", "avx512bw", "avx512vl"},
    "avx512vnni": {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni"},
    "avx512": {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"},
}


def entries_of(name: str) -> list[str]:
    """Return the names of the entries of a struct of kernels.h, in order."""
    body = re.sub(r"//.*", "", HEADER.rpartition(f"}} {name};")[0].rpartition("typedef struct {")[2])
    names: list[str] = []
    for declared in body.split(";"):
        function = re.search(r"\(\*(\w+)\)", declared)
        names += [function[1]] if function else re.findall(r"(\w+)\s*(?:,|$)", declared.strip())
    return names


@pytest.mark.parametrize("structure", [library.Matrix, library.Pages, library.Variant])
def test_a_structure_has_the_entries_of_the_header(structure: type[ctypes.Structure]) -> None:
    assert [field[0] for field in structure._fields_] == entries_of(structure.__name__)


def test_formats_have_the_numbers_of_the_header() -> None:
    named = [(one.name, str(one.value)) for one in library.Format]
    assert re.findall(r"(\w+) = (\d+)", HEADER) == [*named, ("NUM_FORMATS", str(len(named)))]


@pytest.mark.skipif(build.machine() != "x86_64", reason="on other kinds of machines, all CPUs have the same variants")
def test_a_cpu_runs_the_variants_whose_instructions_it_has() -> None:
    """Linux writes down those that it has and whose registers it saves."""
    said = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^flags\s*: (.*)$", said, re.MULTILINE)
    assert found is not None
    here = set(found[1].split())
    best = ("avx512", "avx512vnni") if "AuthenticAMD" in said else ("avx512vnni", "avx512")
    wanted = FLAGS["avx2"] <= here
    functions = ctypes.CDLL(str(build.HERE / build.LIBRARY))
    functions.cpu_variants.restype = ctypes.c_char_p
    names = functions.cpu_variants().decode().split()
    assert names == [name for name in (*best, "avx512f", "avx2") if wanted and FLAGS[name] <= here]


def test_a_variant_that_cannot_be_used_has_a_reason() -> None:
    functions = ctypes.CDLL(None)
    slow_cpu = library.Library(functions, "cc (gcc 12.2.0)", ("avx512", "avx2"), ("avx2",))
    assert slow_cpu.usable == ("avx2",)
    assert (slow_cpu.reason("avx2"), slow_cpu.reason("avx512")) == ("", "this CPU can run avx2")
    old_compiler = library.Library(functions, "cc (gcc 9.4.0)", ("avx2",), ("avx512", "avx2"))
    assert old_compiler.usable == ("avx2",)
    assert old_compiler.reason("avx512") == "cc (gcc 9.4.0) could compile avx2"


def test_a_library_that_is_missing_or_broken_has_a_reason(tmp_path: Path) -> None:
    path = tmp_path / build.LIBRARY
    assert str(path) in str(library.load(path))
    path.write_bytes(b"not a library")
    said = library.load(path)
    assert isinstance(said, str)
    assert said.startswith(f"{path} cannot be loaded: ")
