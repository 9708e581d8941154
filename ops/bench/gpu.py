"""`minisgl bench gpu`, `make gpu-check`: the tests marked `gpu`, within a budget, and how fast the engine is on a GPU.

It needs a checkout, whose tests these are. Until --wheels is unpacked it imports nothing that a bare Python lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from pipeline.errors import ConfigError
from pipeline.flags import flag, parse_flags, seconds

ROOT: Final = Path(__file__).resolve().parents[2]
TESTS_NEED: Final = ("packaging", "pytest", "pytest-timeout", "hypothesis", "httpx", "psutil")
HOPPER: Final = "fa"
PEERS: Final = "peers"
NEW: Final = "new"
BY_NAME: Final = (HOPPER, NEW, PEERS)
"""Only run by name: kernels that compile for minutes, parts of other groups, and engines that few machines have."""
FORWARD: Final = "tests/stages/generate/forward"
MODEL: Final = "tests/stages/generate/model"
GROUPS: Final[Mapping[str, tuple[str, ...]]] = {  # by worth for the time: the budget cuts off the end
    "attention": ("tests/stages/generate/attention",),  # its first test compiles what the others use
    "models": (f"{FORWARD}/test_engine.py", f"{MODEL}/test_decoder.py", f"{MODEL}/test_families.py"),
    "engine": (f"{FORWARD}/test_on_each_device.py",),
    "deterministic": (f"{MODEL}/layers/test_fixed_products.py", f"{FORWARD}/test_deterministic.py"),
    "sampling": ("tests/stages/generate/sampling/test_exact_sampling.py",),
    "server": ("tests/end_to_end/test_each_device.py",),
    "ranks": (f"{FORWARD}/test_collectives.py",),
    HOPPER: ("tests/stages/generate/attention/test_on_pages.py", "-k", HOPPER, "--timeout", "0"),
    NEW: (
        "tests/stages/generate/attention/test_heads.py",
        f"{MODEL}/layers/test_fixed_products.py",
        f"{FORWARD}/test_on_each_device.py",
        f"{FORWARD}/test_deterministic.py",
        "tests/stages/generate/sampling/test_exact_sampling.py",
        "tests/end_to_end/test_each_device.py",
        *("-k", "heads or product or new or fused"),
    ),
}
TIMINGS: Final = "timings"
NAMES: Final = (*GROUPS, TIMINGS, PEERS)
IS_NEW: Final = ("--gpu-new", "yes")
ONE: Final = ("--num-prompts", "1", "--input-len", "2048", "--output-len", "128")
FEW: Final = ("--num-prompts", "32", "--input-len", "128", "--output-len", "256")
TIMED: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    TIMINGS: {
        "0.6b": (),
        "0.6b without overlap": ("--overlap", "off"),
        "0.6b without overlap and graphs": ("--overlap", "off", "--graph", "0"),
        "0.6b deterministic": ("--deterministic", "yes", "--num-prompts", "64"),
        "8b": (),
        **{
            f"0.6b on {num} threads of the CPU": (
                *("--device", "cpu", "--threads", str(num)),
                *("--num-prompts", "4", "--input-len", "32", "--output-len", "32"),
            )
            for num in (1, 2, 4, 8, 16)
        },
    },
    NEW: {
        "0.6b": (),
        "0.6b new": IS_NEW,
        "0.6b new deterministic": (*IS_NEW, "--deterministic", "yes"),
        "0.6b one row": ONE,
        "0.6b one row new": (*ONE, *IS_NEW),
        "0.6b 32 rows new": (*FEW, *IS_NEW),
        "0.6b 32 rows new deterministic": (*FEW, *IS_NEW, "--deterministic", "yes"),
    },
}
"""Flags of `bench offline` by what is printed, for each group that times."""
LEAST_S: Final = 10.0
"""Nothing is begun with less: importing torch takes as long."""
MARKED: Final = "gpu"
GRACE_S: Final = 5.0
MOST_CHARS: Final = 500
"""Of what a test says of its failure, and of each of the last lines of an engine that failed."""
ABOUT: Final = """\
Runs the tests marked `gpu` of this checkout, the most useful first, and then times the engine with random weights
(`minisgl bench offline --device cuda`). Each group of tests is a process of its own. The table names what --budget left
no time for. Exits with 1 when something failed. --only peers also times those of nano-vllm, vLLM and SGLang that are
installed; the exit code ignores them. It needs a GPU; without network, see `make gpu-wheels`.
"""


def group_names(text: str) -> tuple[str, ...]:
    """Parse `a,b`: groups, whatever their order."""
    if unknown := [name for name in text.split(",") if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: no such group; expected some of {','.join(NAMES)}")
    return tuple(text.split(","))


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """What runs, and for how long."""

    budget_s: float = flag("--budget", default=900.0, parse=seconds, help="seconds for all of it together")
    only: tuple[str, ...] = flag(
        "--only",
        default=(),
        parse=group_names,
        help=(
            f"only these, with commas between them: {','.join(NAMES)} "
            f"[all but {', '.join(BY_NAME[:-1])} and {BY_NAME[-1]}]"
        ),
    )
    json: str = flag("--json", default="", help="JSON file for every test and all figures, written after each group")
    wheels: str = flag("--wheels", default="", help="folder of `make gpu-wheels` to unpack for this run")


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run what was asked for, and print what was found; return the exit code.

    Raises:
        ConfigError: What all of it needs is missing.
    """
    (config,) = parse_flags("bench gpu", (GpuConfig,), arguments, environment, about=ABOUT)
    if not (ROOT / "tests" / "conftest.py").is_file():
        raise ConfigError("bench gpu runs the tests of a checkout, and there are none here; see docs/gpu-check.md")
    if not has_gpu():
        raise ConfigError("no GPU: NVIDIA's driver (libcuda.so.1) is not here, or has no device; check nvidia-smi")
    with tempfile.TemporaryDirectory(prefix="minisgl-gpu-", ignore_cleanup_errors=True) as scratch:
        if config.wheels and version("packaging"):
            unpack(Path(config.wheels).expanduser(), Path(scratch) / "wheels")
        if missing := [name for name in required() if version(name) is None]:
            raise ConfigError(
                f"missing packages: {', '.join(missing)}; run `make venv`, or pass --wheels with the folder that "
                "`make gpu-wheels` wrote"
            )
        return check(config, arguments, Path(scratch))


def check(config: GpuConfig, arguments: Sequence[str], scratch: Path) -> int:
    """Run the groups; print what is here, the verdict and the tables; return the exit code."""
    from ops.bench import peers, report

    report.check_can_write("--json", config.json)
    ends_s = time.monotonic() + config.budget_s
    found: dict[str, Any] = {"version": 2, "arguments": list(arguments), "began": datetime.now(UTC).isoformat()}
    found |= {"machine": machine(), "budget_s": config.budget_s, "finished": False}
    found |= {"groups": [], "timings": [], PEERS: []}
    print("\n".join(f"{name}: {said}" for name, said in found["machine"].items()), flush=True)
    chosen = [name for name in NAMES if name in config.only or (not config.only and name not in BY_NAME)]
    with contextlib.suppress(KeyboardInterrupt):
        for name in chosen:
            print(f"{name}: {ends_s - time.monotonic():.0f} s left", file=sys.stderr, flush=True)
            if name in GROUPS:
                found["groups"].append(tested(name, ends_s, scratch))
            if name in TIMED:
                found["timings"] += (timed(each, flags, ends_s, scratch) for each, flags in TIMED[name].items())
            if name == PEERS:
                found[PEERS] += (compared(each, ends_s, scratch) for each in (*peers.OURS, *peers.PEERS))
            found["finished"] = name == chosen[-1]
            if config.json:
                report.write_json(Path(config.json), found)
    print(table(found))
    failed = any(one["status"] == "failed" for one in of_ours(found))
    return 1 if failed or not found["finished"] else 0


def tested(name: str, ends_s: float, scratch: Path) -> dict[str, Any]:
    """Run the tests of a group until *ends_s* at most; return what became of each of them."""
    began_s, results = time.monotonic(), scratch / f"{name}.xml"
    # Warnings of other versions of torch and FlashInfer than the tests were written with are no failures.
    options = ["-v", "-m", MARKED, "-W", "default", "-p", "no:cacheprovider", "--timeout-method", "thread"]
    options += ["--junitxml", str(results)]
    options += ["--session-timeout", str(max(1.0, ends_s - began_s))]
    fa = "1" if name == HOPPER else ""
    status, reason = run(["-m", "pytest", *options, *GROUPS[name]], ends_s + GRACE_S, MINISGL_FA=fa)
    tests = list(map(result, ElementTree.parse(results).iter("testcase"))) if results.is_file() else []
    counts = {how: sum(test["outcome"] == how for test in tests) for how in ("passed", "failed", "skipped")}
    if status == "failed" and not counts["failed"] and time.monotonic() >= ends_s:
        status, reason = "cut", "the budget ended in it"
    seconds = time.monotonic() - began_s
    return {"name": name, "status": status, "reason": reason, **counts, "seconds": seconds, "tests": tests}


def result(case: ElementTree.Element) -> dict[str, Any]:
    """Return what pytest says of a test, or of a file that it cannot import."""
    found = {"test": f"{case.get('classname')}::{case.get('name')}", "seconds": float(case.get("time") or 0)}
    for tag, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        if (why := case.find(tag)) is not None:
            return found | {"outcome": outcome, "why": (why.get("message") or "")[:MOST_CHARS]}
    return found | {"outcome": "passed", "why": ""}


def timed(name: str, flags: Sequence[str], ends_s: float, scratch: Path) -> dict[str, Any]:
    """Time the engine with random weights."""
    from ops.bench.models import SHAPE_8B, SHAPES, write_all_but_weights

    shape = name.partition(" ")[0]
    model, output = scratch / shape, scratch / f"{name}.json"
    if not model.is_dir():
        model.mkdir()
        write_all_but_weights(SHAPE_8B if shape == "8b" else SHAPES[shape], model)
    common = ["--device", "cuda", "--runs", "1", "--model", str(model), "--dummy-weight", "--output", str(output)]
    status, reason = run([str(ROOT / "minisgl.py"), "bench", "offline", *common, *flags], ends_s)
    figures = json.loads(output.read_text()) if status == "ok" else {}
    return {"name": name, "status": status, "reason": reason, "figures": figures}


def compared(name: str, ends_s: float, scratch: Path) -> dict[str, Any]:
    """Time this engine or a peer on nano-vllm's benchmark. The first one writes the weights, which all of them read."""
    from ops.bench import models, peers

    found = {"name": name, "version": version(name.lower()), "status": "skipped", "reason": "it is not installed"}
    if name in peers.PEERS and find_spec(peers.PEERS[name][0]) is None:
        return found | {"figures": {}}
    is_time = ends_s - time.monotonic() >= LEAST_S
    folder, output = models.ensure("0.6b", scratch) if is_time else scratch, scratch / f"{name}.json"
    status, reason = run(peers.command(name, ROOT, folder, output), ends_s, lines=20)
    figures = json.loads(output.read_text()) if status == "ok" else {}
    return found | {"status": status, "reason": reason, "figures": figures}


def of_ours(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all that ran of this engine: a peer that fails is no failure of it."""
    from ops.bench import peers

    return [*found["groups"], *found["timings"], *(one for one in found[PEERS] if one["name"] in peers.OURS)]


def run(arguments: Sequence[str], ends_s: float, *, lines: int = 1, **more: str) -> tuple[str, str]:
    """Run Python until *ends_s* at most, and end all that it has started; return its status and why it is not ok."""
    if (left_s := ends_s - time.monotonic()) < LEAST_S:
        return "cut", "the budget was spent before it"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), **more}
    with tempfile.TemporaryFile() as output:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **streams)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(left_s)
            is_late = process.poll() is None
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
        output.seek(0)
        said = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    if is_late:
        return "cut", "the budget ended in it"
    if process.returncode == 0:
        return "ok", ""
    last = "\n".join(line[:MOST_CHARS] for line in said[-lines:])
    return "failed", f"it ended with {process.returncode}; the last it said: {last}"


def table(found: Mapping[str, Any]) -> str:
    """Return the verdict, a line for each group, each test that failed and each reason to skip, and the timings."""
    from ops.bench import peers
    from ops.bench.report import aligned

    all_of_it = of_ours(found)
    by_status = {status: [one for one in all_of_it if one["status"] == status] for status in ("failed", "cut")}
    lines = ["", f"{len(by_status['failed'])} failed" if by_status["failed"] else "Nothing failed"]
    lines += [f"{one['name']}, {status}: {one['reason']}" for status, all_of in by_status.items() for one in all_of]
    columns = ("name", "status", "passed", "failed", "skipped")
    rows: list[tuple[str, ...]] = [(*columns, "seconds")]
    rows += [(*(str(group[column]) for column in columns), f"{group['seconds']:.0f}") for group in found["groups"]]
    lines += ["", aligned(rows)] if found["groups"] else []
    tests = [test for group in found["groups"] for test in group["tests"]]
    lines += [f"failed: {test['test']}: {test['why']}" for test in tests if test["outcome"] == "failed"]
    lines += sorted({f"skipped: {test['why']}" for test in tests if test["outcome"] == "skipped"})
    times = ("draw ms", "decode ms", "of the host", "prefill ms", "of the host")
    shares_and_times = ("read bandwidth", "matrix rate", *times)
    timings: list[tuple[str, ...]] = [("output tokens/s, shares, times of steps", "", *shares_and_times)]
    for one in found["timings"]:
        rate = f"{one['figures']['output_tokens_per_s']:,.0f}" if one["figures"] else one["status"]
        shares = (one["figures"].get(name) for name in ("decode_share", "prefill_share"))
        drawing_s = one["figures"].get("drawing_s")
        shown = [f"{share:.0%}" if share else "-" for share in shares]
        shown.append(f"{1000 * drawing_s:.2f}" if drawing_s else "-")
        for phase in (run["phases"][name] for run in one["figures"].get("runs", ()) for name in ("decode", "prefill")):
            steps = phase["steps"]
            shown += [f"{1000 * phase[name] / steps:.2f}" if steps else "-" for name in ("seconds", "launch_s")]
        timings.append((one["name"], rate, *shown, *("-" * (len(shares_and_times) - len(shown)))))
    lines += ["", aligned(timings)] if found["timings"] else []
    return "\n".join([*lines, "", peers.table(found[PEERS])] if found[PEERS] else lines)


# wheels


def unpack(wheels: Path, folder: Path) -> None:
    """Unpack every wheel of *wheels* into *folder*, and let this process and its children import from there first.

    A wheel is a zip file, so this needs no pip and no virtual environment.

    Raises:
        ConfigError: There are no wheels, or one of them is for another Python or machine.
    """
    from packaging.tags import sys_tags
    from packaging.utils import parse_wheel_filename

    if not (found := sorted(wheels.glob("*.whl"))):
        raise ConfigError(f"--wheels {wheels}: no wheels there; `make gpu-wheels DIR={wheels}` writes some")
    here = set(sys_tags())
    for wheel in found:
        if here.isdisjoint(parse_wheel_filename(wheel.name)[3]):
            raise ConfigError(f"--wheels {wheels}: {wheel.name} is not for this Python, {sys.version.split()[0]}")
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                _unpack(archive, info, folder)
    sys.path.insert(1, str(folder))  # after the checkout, before the machine's own packages
    importlib.invalidate_caches()


def _unpack(archive: zipfile.ZipFile, info: zipfile.ZipInfo, folder: Path) -> None:
    """Unpack what can be imported, and programs, which keep their right to be run: bin/ninja is one. Scripts that an
    installer would have to fit to this Python, and headers, are left out.
    """
    if (inside := re.fullmatch(r"[^/]+\.data/([^/]+)/(.+)", info.filename)) is not None:
        is_program = inside[1] == "scripts" and not archive.read(info).startswith(b"#!python")
        if inside[1] not in ("purelib", "platlib") and not is_program:
            return
        info.filename = f"bin/{inside[2]}" if is_program else inside[2]
    made = Path(archive.extract(info, folder))
    if (mode := info.external_attr >> 16) & 0o111 and made.is_file():
        made.chmod(0o755 & (mode | 0o700))


# what is here


def has_gpu() -> bool:
    """Return whether NVIDIA's driver is here and has a device. It imports no torch, which takes seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def version(package: str) -> str | None:
    """Return the version of an installed package; None: it is not here."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def required() -> list[str]:
    """Return the packages that the checkout and its tests import."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [*(re.split(r"[^\w.-]", line)[0] for line in lines), *TESTS_NEED]


def machine() -> dict[str, str]:
    """Return the versions of what computes, and where; what is missing is named as such.

    Raises:
        ConfigError: torch cannot use the GPU.
    """
    import torch

    from ops.bench.report import cpu_model, num_cores
    from pipeline.process.redis_server import find_binary
    from stages.generate.attention.flashinfer import tools

    if not torch.cuda.is_available():
        raise ConfigError(f"torch {torch.__version__} cannot use the GPU that is here; install a torch for CUDA")
    about, driver = torch.cuda.get_device_properties(0), Path("/proc/driver/nvidia/version")
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", driver.read_text() if driver.is_file() else "")
    flashinfer = ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache")
    return {
        "GPU": f"{torch.cuda.device_count()} x {about.name}, {about.total_memory / 2**30:.0f} GiB",
        "driver": f"{found[1] if found else 'unknown'}, compute capability {about.major}.{about.minor}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "FlashInfer": ", ".join(f"{name} {version(name) or 'missing'}" for name in flashinfer),
        **{name: path or "missing, and FlashInfer compiles with it" for name, path in tools().items()},
        "Redis": find_binary(),
        "host": f"Python {sys.version.split()[0]}, {num_cores()} cores, {cpu_model()}",
    }


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], os.environ))
    except ConfigError as error:
        print(f"minisgl: {error}", file=sys.stderr)
        sys.exit(2)
