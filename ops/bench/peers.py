"""The sides of a comparison: a server that speaks OpenAI's protocol, ours started here or any by its URL, and
transformers in a process of its own, so that neither memory nor threads mix. Each answers the same `Workload`.

Run as a program it is that process: a line of JSON asks on stdin, a line of JSON answers on stdout.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from ops.bench import report
from ops.bench.datasets import Piece, Session, Turn
from ops.bench.load import CHAT_PROMPT, COMPLETIONS, Client, Form, Load, Measured
from pipeline.errors import MiniSGLError

ROOT: Final = Path(__file__).resolve().parent.parent.parent
READY_TIMEOUT_S: Final = 600.0
STOP_TIMEOUT_S: Final = 45.0
SILENCE_TIMEOUT_S: Final = 600.0
POLL_S: Final = 0.1
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class SideFailed(MiniSGLError):
    """One side of the comparison did not start, did not answer, or answered something else than was asked."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, the token ids that it is, and how many tokens shall follow it."""

    text: str
    ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of which *concurrency* are under way at a time."""

    prompts: tuple[Prompt, ...]
    concurrency: int

    @property
    def output_tokens(self) -> int:
        return sum(prompt.output_tokens for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class Run:
    """What one side made of a workload: all that was asked, in so long."""

    duration_s: float
    output_tokens: int
    requests: list[dict[str, Any]] = field(default_factory=list)
    """The measurements of each request, of a side that is asked one by one."""

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s


class Side(Protocol):
    """One of the two that are compared."""

    name: str

    def run(self, workload: Workload) -> Run:
        """Do the whole of *workload*.

        Raises:
            SideFailed: It did not, or did something else.
        """
        ...

    def cpu_s(self) -> float | None:
        """Return the CPU time that all its processes have used, None where they are not ours to see."""
        ...


class Served:
    """A server that speaks OpenAI's protocol."""

    def __init__(self, name: str, url: str, endpoint: str, model: str, pid: int = 0) -> None:
        self.name = name
        self.url = url
        self._form = Form(endpoint, model)
        self._pid = pid

    def run(self, workload: Workload) -> Run:
        """Send every prompt and see that it had as many tokens as it should; see `Side`."""
        measured = self.measure(workload)
        summary = report.summarize(measured)
        return Run(summary.duration_s, summary.output_tokens, report.requests_of(measured))

    def measure(self, workload: Workload) -> list[Measured]:
        """As `run`, with what was measured of each request.

        Raises:
            SideFailed: A request failed, or prompt or answer had another number of tokens than was planned.
        """
        measured = asyncio.run(self._send(workload))
        if failed := report.failures(measured):
            raise SideFailed(f"{self.name} at {self.url}: {failed}")
        for prompt, one in zip(workload.prompts, measured, strict=True):
            seen = (one.answer.prompt_tokens, one.answer.output_tokens)
            expected = (len(prompt.ids), prompt.output_tokens)
            if seen != expected:
                raise SideFailed(
                    f"{self.name} at {self.url} counts {seen[0]} tokens in and {seen[1]} out where {expected[0]} and "
                    f"{expected[1]} were asked: not the same tokenizer, or it does not heed ignore_eos"
                )
        return measured

    async def _send(self, workload: Workload) -> list[Measured]:
        texts = {str(index): prompt.text for index, prompt in enumerate(workload.prompts)}
        sessions = [
            Session((Turn((Piece(str(index), len(prompt.ids)),), prompt.output_tokens),))
            for index, prompt in enumerate(workload.prompts)
        ]
        async with Client(self.url, timeout_s=SILENCE_TIMEOUT_S) as client:
            load = Load(client, self._form, lambda turn: texts[turn.pieces[0].name], lambda _: None)
            return await load.at_once(sessions, workload.concurrency)

    def cpu_s(self) -> float | None:
        """See `Side`."""
        return tree_cpu_s(self._pid) if self._pid else None


def served_at(name: str, url: str) -> Served:
    """Return the side that is a server at *url*, which somebody else has started.

    Raises:
        ServerRefused: It does not say which model it serves.
    """

    async def model() -> str:
        async with Client(url, timeout_s=SILENCE_TIMEOUT_S) as client:
            return await client.served_model()

    return Served(name, url, COMPLETIONS, asyncio.run(model()))


@contextlib.contextmanager
def our_server(folder: Path, flags: Sequence[str]) -> Iterator[tuple[Served, float]]:
    """Run `minisgl serve` with *flags* on a free port, its data in *folder*; give it and its seconds to ready.

    Raises:
        SideFailed: It ended, or was not ready in time; the message has the last it said.
    """
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, str(ROOT / "minisgl.py"), "serve", "--port", str(port), "--data-dir", str(folder)]
    said = folder / "minisgl.log"
    began_s = time.perf_counter()
    with said.open("wb") as output:
        process = subprocess.Popen(
            [*command, *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(),
        )
    try:
        while not _is_ready(url):
            late = time.perf_counter() - began_s > READY_TIMEOUT_S
            if late or process.poll() is not None:
                last = said.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing"]
                raise SideFailed(f"minisgl serve {'was not ready' if late else 'ended'}; the last it said: {last[0]}")
            time.sleep(POLL_S)
        yield Served("minisgl", url, CHAT_PROMPT, "default", process.pid), time.perf_counter() - began_s
    finally:
        _end(process)


class Transformers:
    """`transformers` with a model of its own: many requests as one static batch, or one request after another."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.name = "transformers"
        self._process = process
        self.about = self._answer()

    def run(self, workload: Workload) -> Run:
        """Generate for the whole batch if more than one request may be under way; see `Side`."""
        question = {
            "ids": [prompt.ids for prompt in workload.prompts],
            "output_tokens": [prompt.output_tokens for prompt in workload.prompts],
            "batch": workload.concurrency > 1,
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and no answer will come
            self._process.stdin.write(orjson.dumps(question) + b"\n")
            self._process.stdin.flush()
        answer = self._answer()
        return Run(answer["duration_s"], workload.output_tokens)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideFailed(f"transformers ended with {self._process.wait()}; what it said is above")
        answer: dict[str, Any] = orjson.loads(line)
        return answer

    def cpu_s(self) -> float | None:
        """See `Side`."""
        return tree_cpu_s(self._process.pid)


@contextlib.contextmanager
def transformers_process(folder: Path, dtype: str, num_threads: int) -> Iterator[Transformers]:
    """Give transformers with the model of *folder* loaded, in a process of its own.

    Raises:
        SideFailed: It could not load it; it has said why.
    """
    command = [sys.executable, "-m", "ops.bench.peers", str(folder), dtype, str(num_threads)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment(), cwd=ROOT)
    try:
        yield Transformers(process)
    finally:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # it reads the end of its questions and ends
        _end(process)
        process.stdout.close()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("MINISGL_")}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=10) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End *process* and wait for it; what it has started ends with it, or is killed."""
    family = _descendants(process.pid)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for pid in (process.pid, *family):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def tree_cpu_s(pid: int) -> float:
    """Return the CPU time of process *pid* and of all below it."""
    return sum(_stat(one)[1] for one in (pid, *_descendants(pid)))


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            children.setdefault(_stat(int(entry.name))[0], []).append(int(entry.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _stat(pid: int) -> tuple[int, float]:
    """Return the parent of a process and the CPU time that it used; of one that has ended (0, 0.0)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0, 0.0
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def main(arguments: Sequence[str]) -> int:
    """Be transformers: load `FOLDER DTYPE THREADS`, then answer questions until there are no more."""
    folder, dtype, num_threads = arguments
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not be taken for an answer
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(int(num_threads))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)  # which also turns training off
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None  # an answer is as long as was asked
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": str(model.dtype)}
    answers.write(orjson.dumps(about) + b"\n")
    answers.flush()
    for line in sys.stdin.buffer:
        question = orjson.loads(line)
        requests = list(zip(question["ids"], question["output_tokens"], strict=True))
        began_s = time.perf_counter()
        for batch in [requests] if question["batch"] else [[request] for request in requests]:
            _generate(model, batch)
        answers.write(orjson.dumps({"duration_s": time.perf_counter() - began_s}) + b"\n")
        answers.flush()
    return 0


def _generate(model: Any, batch: Sequence[tuple[Sequence[int], int]]) -> None:
    """Generate greedily for a batch, padded on the left; it runs until the last of it has what was asked."""
    import torch

    longest = max(len(ids) for ids, _ in batch)
    most = max(output_tokens for _, output_tokens in batch)
    ids = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids, _ in batch])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in batch])
    with torch.inference_mode():
        made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0)
    assert made.shape == (len(batch), longest + most), f"{tuple(made.shape)} for {longest} + {most} tokens"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
