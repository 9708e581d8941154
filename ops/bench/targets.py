"""What is measured: servers (one started here, or any by its URL), and programs that answer questions.

Whatever starts here gets a clean environment, its output in a file or a pipe, and ends with all its children.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
from rich.console import Console
from rich.status import Status

from ops.bench import report
from ops.bench.datasets import Piece, Session, Turn
from ops.bench.load import CHAT_PROMPT, Client, Form, Load, Measured, connected
from ops.bench.models import Prompt
from pipeline.errors import MiniSGLError

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PROGRAM: Final = ROOT / "minisgl.py"
MINISGL: Final = (sys.executable, str(PROGRAM))
READY_TIMEOUT_S: Final = 600.0
SILENCE_TIMEOUT_S: Final = 600.0
STOP_TIMEOUT_S: Final = 45.0
POLL_S: Final = 0.1
MOST_SAID: Final = 300
"""Letters of a line that are shown."""
INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM)


class SideFailed(MiniSGLError):
    """A target did not start, did not answer, or gave another answer than was asked for."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server that speaks OpenAI's protocol."""

    name: str
    url: str
    form: Form
    pid: int = 0
    """0: it was not started here."""

    def measure(self, prompts: Sequence[Prompt], concurrency: int) -> list[Measured]:
        """Send every prompt, *concurrency* at any time.

        Raises:
            SideFailed: A request failed, or a prompt or answer has another number of tokens than planned.
        """
        measured = asyncio.run(self._send(prompts, concurrency))
        if failed := report.failures(measured):
            raise SideFailed(f"{self.name} at {self.url}: {failed}")
        for prompt, one in zip(prompts, measured, strict=True):
            seen = (one.answer.prompt_tokens, one.answer.output_tokens)
            expected = (len(prompt.ids), prompt.output_tokens)
            if seen != expected:
                raise SideFailed(
                    f"{self.name} at {self.url} counts {seen[0]} tokens in and {seen[1]} out where {expected[0]} and "
                    f"{expected[1]} were asked: it has another tokenizer, or ignores ignore_eos"
                )
        return measured

    async def _send(self, prompts: Sequence[Prompt], concurrency: int) -> list[Measured]:
        turns = [Turn((Piece(prompt.text, len(prompt.ids)),), prompt.output_tokens) for prompt in prompts]
        async with connected(self.url, timeout_s=SILENCE_TIMEOUT_S) as client:
            load = Load(client, self.form, lambda turn: turn.pieces[0].name, lambda _: None)
            return await load.at_once([Session((turn,)) for turn in turns], concurrency)

    def cpu_s(self) -> float | None:
        """Return the CPU time of all its processes, or None if they run elsewhere."""
        return tree_cpu_s(self.pid) if self.pid else None

    def numerics(self) -> str:
        """Return how its engines compute."""
        return asyncio.run(_asked(self.url, Client.numerics))


async def _asked(url: str, question: Any) -> str:
    async with connected(url, timeout_s=SILENCE_TIMEOUT_S) as client:
        return str(await question(client))


def served_at(name: str, url: str, endpoint: str) -> Served:
    """Return the running server at *url* as a target.

    Raises:
        ServerRefused: It does not tell its model.
    """
    return Served(name, url, Form(endpoint, asyncio.run(_asked(url, Client.served_model))))


@contextlib.contextmanager
def our_server(folder: Path, flags: Sequence[str], *, program: Path = PROGRAM) -> Iterator[tuple[Served, float]]:
    """Run `minisgl serve` with *flags* on a free port, its data in *folder*; give it and its seconds to ready.

    *program* may be the minisgl.py of another version.

    Raises:
        SideFailed: It ended, or was not ready in time; the message has the last line of its output.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url, said = f"http://127.0.0.1:{port}", folder / "minisgl.log"
    began_s = time.perf_counter()
    command = [sys.executable, str(program), "serve", "--port", str(port), "--data-dir", str(folder), *flags]
    with started(command, said) as process:
        while not _is_ready(url):
            late = time.perf_counter() - began_s > READY_TIMEOUT_S
            if late or process.poll() is not None:
                why = "was not ready" if late else "ended"
                raise SideFailed(f"minisgl serve {why}; its last line: {last_line(said)}")
            time.sleep(POLL_S)
        yield Served("minisgl", url, Form(CHAT_PROMPT, "default"), process.pid), time.perf_counter() - began_s


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=10) as response:
            return bool(response.status == 200)
    except OSError:  # so is URLError
        return False


@contextlib.contextmanager
def scratch_and_status() -> Iterator[tuple[Path, Status]]:
    """Give a folder for the data of targets, and the line that says what goes on. SIGTERM ends all as Ctrl-C does."""
    interrupt_on_sigterm()
    with (
        tempfile.TemporaryDirectory(prefix="minisgl-bench-", ignore_cleanup_errors=True) as folder,
        Console(stderr=True).status("starting minisgl", refresh_per_second=1) as status,  # targets need the cores
    ):
        yield Path(folder), status


def interrupt_on_sigterm() -> None:
    """Let SIGTERM end this program as Ctrl-C does: it first ends the processes that it started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


class Helper:
    """A program that answers questions, a line of JSON each."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self._process = process

    def ask(self, question: Any) -> Any:
        """Return its answer. Raises SideFailed if it has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; `answer` says so
            self._process.stdin.write(orjson.dumps(question) + b"\n")
            self._process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """Return the next line that it writes. Raises SideFailed if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideFailed(f"{self.name} ended with {self._process.wait()}; its output is above")
        return orjson.loads(line)

    def cpu_s(self) -> float:
        """Return its CPU time."""
        return tree_cpu_s(self._process.pid)


@contextlib.contextmanager
def helper(name: str, command: Sequence[str]) -> Iterator[Helper]:
    """Run a program that answers questions until the block ends."""
    with started(command, None) as process:
        yield Helper(name, process)


def program(function: str, *arguments: object) -> list[str]:
    """Return the command that calls *function*, `module:name`, with the texts of *arguments*."""
    module, _, name = function.partition(":")
    text = f"import sys; from ops.bench.{module} import {name}; {name}(*sys.argv[1:])"
    return [sys.executable, "-c", text, *map(str, arguments)]


@contextlib.contextmanager
def answering() -> Iterator[Callable[[Any], object]]:
    """Yield the function that writes an answer to stdout. What libraries print goes to stderr. Ctrl-C is left to the
    benchmark, which ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0) as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        yield lambda answer: answers.write(orjson.dumps(answer) + b"\n")


@contextlib.contextmanager
def started(
    command: Sequence[str],
    output: Path | None,
    *,
    environment: Mapping[str, str] | None = None,
    fds: Sequence[int] = (),
    alone: bool = False,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run *command* until the block ends, its output appended to a file. Without a file its stdin and stdout are pipes.

    It gets our environment without the MINISGL_ variables, and *environment*. *alone*: in a session of its own, so that
    Linux gives it a share of busy cores of its own.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MINISGL_")}
    process: subprocess.Popen[bytes] | None = None
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(output.open("ab")) if output else None
            stack.enter_context(_uninterrupted())
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL if file else subprocess.PIPE,
                stdout=file or subprocess.PIPE,
                stderr=file,
                env=kept | dict(environment or {}),
                cwd=None if file else ROOT,
                pass_fds=fds,
                start_new_session=alone,
            )
        yield process
    finally:
        if process is not None:
            _end(process)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM until the block ends: in the middle of Popen they would leave a process behind."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


def _end(process: subprocess.Popen[bytes]) -> None:
    family = tree_of(process.pid)
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def last_line(output: Path) -> str:
    """Return the start of the last line of a file; "nothing" if it has none."""
    with output.open("rb") as file:
        file.seek(max(output.stat().st_size - 8192, 0))
        lines = file.read().decode(errors="replace").strip().splitlines() or ["nothing"]
    return "".join(letter if letter.isprintable() else " " for letter in lines[-1]).strip()[:MOST_SAID]


def tree_cpu_s(pid: int) -> float:
    """Return the CPU time of process *pid* and of its descendants."""
    return sum(map(cpu_s, tree_of(pid)))


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process with all its threads; 0 if it has ended. /proc has it only in steps of 10 ms."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3), as Linux numbers these clocks
    except OSError:
        return 0.0


def tree_of(pid: int) -> list[int]:
    """Return *pid* and the ids of its descendants."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = path.read_text().rpartition(")")[2].split()[1]  # the name comes before and may hold anything
            children[int(parent)].append(int(path.parent.name))
    found = [pid]
    for one in found:  # grows on the way
        found += children[one]
    return found
