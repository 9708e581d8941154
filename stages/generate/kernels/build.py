"""Compiles the C files of this folder into one shared library. It imports nothing but the standard library.

The build hook of the wheel (`hatch_build.py`) runs it where nothing else is installed. `make` runs it when C changed:
`python -m stages.generate.kernels.build`. `library.py` asks it whether a library belongs to the sources beside it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
LIBRARY: Final = "libminisgl.so"
NOTE: Final = "libminisgl.txt"
"""Lies in the library's place where it could not be built, and says why: pip hides what a build prints."""
ZIGLANG: Final = "ziglang==0.17.*"
"""The compiler for machines that have none: clang, linker and headers in one wheel."""
SWITCH: Final = "MINISGL_BUILD_KERNELS"
LAST_LINES: Final = 20
"""Of what a compiler said, in an error."""

FLAGS: Final = (
    *("-std=gnu11", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-fomit-frame-pointer", "-g0"),
    # The same bits from every compiler. CFLAGS of the environment are not heeded for the same reason.
    *("-ffp-contract=off", "-fno-math-errno"),
    "-fno-trapping-math",  # no exception of a number is ever looked at; else gcc makes no vectors of loops that compare
    "-Werror=int-conversion",  # gcc passes a pointer for a number, with a warning that nobody sees
)
LINK: Final = ("-shared", "-pthread", "-Wl,-z,defs")
"""`defs`: a function that no file has is an error here and not at its first call. libm is not linked."""
LINK_ZIG: Final = (*LINK, "-nostdlib", "-lc", "-lpthread")
"""zig would compile its own runtime for 15 s, which the kernels do not call."""


@dataclass(frozen=True, slots=True)
class Instructions:
    """What a variant may use: flags of the compiler, and lines of C that need all of them."""

    flags: tuple[str, ...]
    probe: str


_INTEL: Final = "#include <immintrin.h>\n"
_ARM: Final = "#include <arm_neon.h>\n"
_HALF: Final = "_Float16 half(float a) { return (_Float16)a; }"
"""On x86-64 from gcc 12 and clang 15 on."""
_AVX2: Final = ("-mavx2", "-mfma", "-mf16c")
_AVX512: Final = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_VNNI: Final = (*_AVX512, "-mavx512vnni")
VARIANTS: Final[Mapping[str, Mapping[str, Instructions]]] = {
    "x86_64": {
        "avx2": Instructions(_AVX2, f"{_INTEL}__m256 probe(__m256 a) {{ return _mm256_fmadd_ps(a, a, a); }}\n{_HALF}"),
        "avx512f": Instructions(_AVX512, f"{_INTEL}__m512 probe(__m512 a) {{ return _mm512_fmadd_ps(a, a, a); }}"),
        "avx512vnni": Instructions(
            _VNNI, f"{_INTEL}__m512i probe(__m512i a) {{ return _mm512_dpbusd_epi32(a, a, a); }}"
        ),
        "avx512": Instructions(
            (*_VNNI, "-mavx512bf16"),
            f"{_INTEL}__m512 probe(__m512 a, __m512bh b) {{ return _mm512_dpbf16_ps(a, b, b); }}",
        ),
    },
    # Every such CPU has NEON, so compilers need no flag for it.
    "aarch64": {
        "neon": Instructions((), f"{_ARM}float32x4_t probe(float32x4_t a) {{ return vfmaq_f32(a, a, a); }}\n{_HALF}")
    },
}
"""The variants of each machine, the least first. Files that are compiled once may use the least one's instructions."""
_HEADERS: Final = "#include <pthread.h>\n#include <stdint.h>\n"
"""Of libc, which a compiler may lack."""


@dataclass(frozen=True, slots=True)
class Files:
    """How each C file is compiled. One that is missing here, or in the folder, is an error."""

    baseline: tuple[str, ...] = ("cpu.c",)
    """Once, for every CPU of this kind of machine."""
    once: tuple[str, ...] = ("pool.c", "rows.c", "work.c", "experts.c", "sample.c", "step.c", "blocks.c")
    """Once, with the instructions of the least variant."""
    each: tuple[str, ...] = ("pack.c", "gemm.c", "attention.c", "variant.c")
    """Once for each variant, with -DVARIANT=<name>."""


FILES: Final = Files()


class CannotBuild(Exception):
    """There is no compiler, or it failed. The first line says what happened, then comes what the compiler said last."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A command that compiles C."""

    name: str
    command: tuple[str, ...]
    tag: str
    """The platform of a wheel with what it makes."""
    link: tuple[str, ...] = LINK

    def run(self, arguments: Sequence[str], folder: Path) -> str:
        """Run it in *folder*; return "", or the last lines that it said before it failed."""
        # Where zig keeps what it made. It goes away with the folder, unless somebody said where to keep it.
        caches = {"ZIG_GLOBAL_CACHE_DIR": str(folder), "ZIG_LOCAL_CACHE_DIR": str(folder)}
        try:
            done = subprocess.run(
                [*self.command, *arguments],
                cwd=folder,
                env={**caches, **os.environ},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as error:
            return str(error)
        if not done.returncode:
            return ""
        return "\n".join(done.stdout.strip().splitlines()[-LAST_LINES:]) or f"it ended with {done.returncode}"

    def can(self, instructions: Instructions) -> bool:
        """Return whether it makes a library with *instructions*."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "probe.c").write_text(_HEADERS + instructions.probe)
            return not self.run([*FLAGS, *instructions.flags, "probe.c", "-o", "probe.so", *self.link], folder)


def machine() -> str:
    """Return the kind of this machine, a key of VARIANTS if there are kernels for it."""
    return platform.machine() if sys.platform == "linux" else f"{platform.machine()} {platform.system()}"


def find_compiler() -> Compiler | None:
    """Return what CC names, else `cc`, else zig; None: there is none that works.

    A `cc` without the headers of libc, or too old for the least variant, counts as none. `CC=zig` asks for zig.
    """
    instructions = next(iter(VARIANTS[machine()].values()))
    words = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if words != ["zig"] and shutil.which(words[0]):
        found = Compiler(words[0], tuple(words), f"linux_{machine()}")
        if found.can(instructions):
            return found
    return _zig(sys.executable, "-m", "ziglang") if importlib.util.find_spec("ziglang") else None


def fetch_zig(folder: Path) -> Compiler:
    """Let pip put zig into *folder*, where it takes 350 MB, and return it.

    Raises:
        CannotBuild: pip failed.
    """
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), ZIGLANG]
    done = subprocess.run(install, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"pip could not fetch {ZIGLANG}\n{done.stdout}")
    return _zig(str(folder / "ziglang" / "zig"))


def _zig(*program: str) -> Compiler:
    """Return *program* as a compiler for every Linux with glibc 2.17 or newer."""
    command = (*program, "cc", "-target", f"{machine()}-linux-gnu.2.17")
    return Compiler("zig cc", command, f"manylinux_2_17_{machine()}", LINK_ZIG)


def requirements() -> list[str]:
    """Return the packages that a build of the library needs here and that are not installed."""
    return [] if machine() not in VARIANTS or not is_wanted() or find_compiler() else [ZIGLANG]


def is_wanted() -> bool:
    """Return whether the kernels are to be built: `MINISGL_BUILD_KERNELS=0` leaves them out, and torch computes."""
    return os.environ.get(SWITCH) != "0"


def hash_of(folder: Path = HERE) -> str:
    """Return the hash of the sources in *folder* and of how they are compiled; "" if there are none, as in a wheel."""
    files = sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h"))
    if not files:
        return ""
    hashed = sha256(Path(__file__).read_bytes())
    for path in files:
        hashed.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return hashed.hexdigest()[:16]


def origin_of(library: Path) -> tuple[str, str]:
    """Return the hash of the sources that *library* was built from, and the compiler's name; "", "": it says none."""
    found = library.exists() and re.search(rb"minisgl kernels, sources (\w+), by ([^\0]+)", library.read_bytes())
    return (found[1].decode(), found[2].decode()) if found else ("", "")


def build(
    library: Path, compiler: Compiler, folder: Path = HERE, files: Files = FILES, flags: Sequence[str] = ()
) -> list[str]:
    """Compile *files* of *folder* on all cores, and put *library* in its place in one piece; return its variants.

    *flags* are more flags for compiling and linking, such as -fsanitize=address.

    Raises:
        ValueError: A file is missing, or it is not in *files*.
        CannotBuild: The compiler failed. *library* is as it was.
    """
    listed = {*files.baseline, *files.once, *files.each}
    if wrong := listed ^ {path.name for path in folder.glob("*.c")}:
        raise ValueError(f"{', '.join(sorted(wrong))}: either missing in {folder}, or not in `Files` of build.py")
    known = VARIANTS[machine()]
    variants = [name for name, instructions in known.items() if compiler.can(instructions)] if files.each else []
    if files.each and not variants:
        raise CannotBuild(f"{compiler.name} translates none of {', '.join(known)}")
    defines = [
        *(f"-DHAS_{name.upper()}={int(name in variants)}" for name in known),
        *(f'-DSOURCES="{hash_of(folder)}"', f'-DCOMPILER="{compiler.name}"'),
    ]
    least = next(iter(known.values())).flags
    jobs: dict[str, list[str]] = {
        **{f"{file}.o": [file] for file in files.baseline},
        **{f"{file}.o": [file, *least] for file in files.once},
        **{
            f"{file}.{name}.o": [file, f"-DVARIANT={name}", *known[name].flags]
            for name in variants
            for file in files.each
        },
    }
    with tempfile.TemporaryDirectory() as scratch:

        def compile_one(made: str) -> str:
            file, *more = jobs[made]
            words = [*FLAGS, *defines, *more, *flags, "-c", str(folder.absolute() / file), "-o", made]
            return compiler.run(words, Path(scratch))

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            said = list(threads.map(compile_one, jobs))
        for made, problem in zip(jobs, said, strict=True):
            if problem:
                raise CannotBuild(f"{compiler.name} could not compile {made.removesuffix('.o')}\n{problem}")
        linked = library.absolute().with_name(f"{library.stem}.{os.getpid()}.so")
        try:
            if problem := compiler.run([*flags, *jobs, "-o", str(linked), *compiler.link], Path(scratch)):
                raise CannotBuild(f"{compiler.name} could not link the library\n{problem}")
            linked.replace(library)
        finally:
            linked.unlink(missing_ok=True)
    return variants


def build_or_note(folder: Path) -> Compiler | None:
    """Put the library into *folder*, or else the reason in NOTE; return what compiled it, None: there is a reason.

    The library that lies beside the sources is copied if this compiler made it of them.

    Raises:
        ValueError: A file is missing, or it is not in FILES.
    """
    library, note = folder / LIBRARY, folder / NOTE
    compiler = find_compiler()
    try:
        if not is_wanted():
            raise CannotBuild(f"{SWITCH}=0 was set")
        if compiler is None:
            raise CannotBuild("no C compiler: cc is not on PATH or does not work, and ziglang is not installed")
        if origin_of(HERE / LIBRARY) != (hash_of(), compiler.name):
            build(library, compiler)
        elif folder != HERE:
            shutil.copy(HERE / LIBRARY, library)
    except CannotBuild as problem:
        if origin_of(library)[0] == hash_of():  # another compiler made it, of these sources
            return None
        library.unlink(missing_ok=True)
        note.write_text(f"{problem}\n\nsources {hash_of()}\n")
        return None
    note.unlink(missing_ok=True)
    return compiler


def _can_load(library: Path) -> bool:
    """Return whether this machine can load it: a checkout may be shared with one whose libc is newer."""
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


def main() -> None:
    """Build the library beside the sources, unless it is there or they could not be compiled when they were installed.

    Without any compiler zig is fetched by pip, used and removed. Errors are for developers: complete, and exit code 1.
    """
    library, note = HERE / LIBRARY, HERE / NOTE
    if machine() not in VARIANTS or not is_wanted() or (origin_of(library)[0] == hash_of() and _can_load(library)):
        return
    if note.exists() and f"sources {hash_of()}" in note.read_text():
        sys.stderr.write(f"The kernels for CPUs could not be built, so torch computes: {note.read_text()}")
        return
    with tempfile.TemporaryDirectory() as scratch:
        compiler = find_compiler()
        try:
            if compiler is None:
                sys.stderr.write(f"There is no C compiler here: fetching {ZIGLANG} (100 MB), removed afterwards.\n")
                compiler = fetch_zig(Path(scratch))
            build(library, compiler)
        except CannotBuild as problem:
            sys.exit(str(problem))
    note.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
