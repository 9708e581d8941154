"""The sides of a comparison: OpenAI servers (ours, started here, or any by its URL), transformers, and llama.cpp.

Each side answers the same `Workload`. A library runs in a process of its own, so that memory and threads do not mix: a
line of JSON asks on stdin, a line of JSON answers on stdout. For transformers this module, run as a program, is that
process. llama.cpp is in another Python environment, which runs `llama.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import orjson

from ops.bench import report
from ops.bench.datasets import Piece, Session, Turn
from ops.bench.load import CHAT_PROMPT, COMPLETIONS, Form, Load, Measured, connected
from ops.bench.models import Workload
from ops.bench.processes import PROGRAM, last_line, started, tree_cpu_s
from pipeline.errors import ConfigError, MiniSGLError

READY_TIMEOUT_S: Final = 600.0
SILENCE_TIMEOUT_S: Final = 600.0
POLL_S: Final = 0.1
LLAMA: Final = Path(__file__).with_name("llama.py")
GGUF_KINDS: Final = ("bf16", "q8_0")


class SideFailed(MiniSGLError):
    """A side did not start, did not answer, or gave another answer than was asked for."""


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a workload that one side completed."""

    duration_s: float
    output_tokens: int
    requests: list[dict[str, Any]] = field(default_factory=list)
    """The figures of each request, if the side is a server."""

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s


class Side(Protocol):
    """One side of a comparison."""

    name: str

    def run(self, workload: Workload) -> Run:
        """Complete *workload*.

        Raises:
            SideFailed: It did not, or it did something else.
        """
        ...

    def cpu_s(self) -> float | None:
        """Return the CPU time of all its processes, or None if they run elsewhere."""
        ...


class Served:
    """A server that speaks OpenAI's protocol."""

    def __init__(self, name: str, url: str, endpoint: str, model: str, pid: int = 0) -> None:
        self.name = name
        self.url = url
        self._form = Form(endpoint, model)
        self.pid = pid

    def run(self, workload: Workload) -> Run:
        """Send every prompt and check the token counts; see `Side`."""
        measured = self.measure(workload)
        summary = report.summarize(measured)
        return Run(summary.duration_s, summary.output_tokens, report.requests_of(measured))

    def measure(self, workload: Workload) -> list[Measured]:
        """As `run`, but return the measurements of each request.

        Raises:
            SideFailed: A request failed, or a prompt or answer has another number of tokens than planned.
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
                    f"{expected[1]} were asked: it has another tokenizer, or ignores ignore_eos"
                )
        return measured

    async def _send(self, workload: Workload) -> list[Measured]:
        texts = {str(index): prompt.text for index, prompt in enumerate(workload.prompts)}
        sessions = [
            Session((Turn((Piece(str(index), len(prompt.ids)),), prompt.output_tokens),))
            for index, prompt in enumerate(workload.prompts)
        ]
        async with connected(self.url, timeout_s=SILENCE_TIMEOUT_S) as client:
            load = Load(client, self._form, lambda turn: texts[turn.pieces[0].name], lambda _: None)
            return await load.at_once(sessions, workload.concurrency)

    def cpu_s(self) -> float | None:
        """See `Side`."""
        return tree_cpu_s(self.pid) if self.pid else None


def served_at(name: str, url: str) -> Served:
    """Return the running server at *url* as a side.

    Raises:
        ServerRefused: It does not tell its model.
    """

    async def model() -> str:
        async with connected(url, timeout_s=SILENCE_TIMEOUT_S) as client:
            return await client.served_model()

    return Served(name, url, COMPLETIONS, asyncio.run(model()))


@contextlib.contextmanager
def our_server(folder: Path, flags: Sequence[str], *, program: Path = PROGRAM) -> Iterator[tuple[Served, float]]:
    """Run `minisgl serve` with *flags* on a free port, its data in *folder*; give it and its seconds to ready.

    *program* may be the minisgl.py of another version.

    Raises:
        SideFailed: It ended, or was not ready in time; the message has the last line of its output.
    """
    port = _free_port()
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
        yield Served("minisgl", url, CHAT_PROMPT, "default", process.pid), time.perf_counter() - began_s


def numerics_of(ours: Served) -> str:
    """Return how the engine of our server computes."""
    with urllib.request.urlopen(f"{ours.url}/version", timeout=10) as response:
        return str(orjson.loads(response.read())["engines"][0]["numerics"])


class InProcess:
    """A library in its process: it computes many requests as one batch, or one request after another."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self._process = process
        self.about = self._answer()

    def run(self, workload: Workload) -> Run:
        """Generate for the whole batch if requests may be concurrent, else one by one; see `Side`."""
        question = {
            "ids": [prompt.ids for prompt in workload.prompts],
            "output_tokens": [prompt.output_tokens for prompt in workload.prompts],
            "batch": workload.concurrency > 1,
        }
        return Run(self.ask(question)["duration_s"], workload.output_tokens)

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of the process.

        Raises:
            SideFailed: It has ended.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; `_answer` says so
            self._process.stdin.write(orjson.dumps(question) + b"\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SideFailed(f"{self.name} ended with {self._process.wait()}; its output is above")
        answer: dict[str, Any] = orjson.loads(line)
        return answer

    def cpu_s(self) -> float | None:
        """See `Side`."""
        return tree_cpu_s(self._process.pid)


@contextlib.contextmanager
def transformers_process(folder: Path, dtype: str, num_threads: int) -> Iterator[InProcess]:
    """Give transformers with the model of *folder* loaded. It computes a static batch.

    Raises:
        SideFailed: It could not load the model; its output says why.
    """
    with started([sys.executable, "-m", "ops.bench.peers", str(folder), dtype, str(num_threads)], None) as process:
        yield InProcess("transformers", process)


def find_llama(python: str) -> str:
    """Return the path of *python*, whose environment has llama.cpp.

    Raises:
        ConfigError: It has not.
    """
    found = shutil.which(python)
    if found is None:
        raise ConfigError(
            f"--llama-python {python}: no such program; pass the python of an environment, as DIR/bin/python"
        )
    path = os.path.abspath(found)
    command = [path, "-I", "-c", "import gguf, llama_cpp, numpy"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ConfigError(
            f"--llama-python {python}: has no llama.cpp ({reason}); run {python} -m pip install llama-cpp-python gguf"
        )
    return path


@contextlib.contextmanager
def llama_process(python: str, weights: str, folder: Path, scratch: Path, num_threads: int) -> Iterator[InProcess]:
    """Give llama.cpp, in the environment of *python*, with its *weights* loaded. It batches continuously.

    *weights* are a GGUF file, or one of GGUF_KINDS: then the checkpoint in *folder* is converted into *scratch*.

    Raises:
        SideFailed: The checkpoint could not be converted or loaded.
    """
    file = weights
    if weights in GGUF_KINDS:
        file, said = str(scratch / f"{weights}.gguf"), scratch / "gguf.log"
        command = [python, "-I", str(LLAMA), str(folder), file, weights]
        with started(command, said) as process:
            if process.wait():
                raise SideFailed(f"{folder} could not be converted for llama.cpp: {last_line(said)}")
    with started([python, "-I", str(LLAMA), file, str(num_threads)], None) as process:
        yield InProcess("llama.cpp", process)


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


def main(arguments: Sequence[str]) -> int:
    """Load `FOLDER DTYPE THREADS` with transformers, then answer questions until stdin ends."""
    folder, dtype, num_threads = arguments
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library's output is no answer
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(int(num_threads))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)  # which also turns training off
    assert model.generation_config is not None
    model.generation_config.eos_token_id = None  # an answer has exactly the length that was asked
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
    """Generate greedily for a batch, padded on the left, until its longest answer is complete."""
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
