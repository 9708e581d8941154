"""What cannot work is said at once: exit code 2 and one line with the remedy, before any worker has started. What needs
torch to be known is said by the first engine.

Here is one case for each place that refuses. Every message has a test beside its code.
"""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from support.redis_servers import Servers, command
from support.selection import AT_NIGHT
from support.servers import ROOT, Server, free_port, serve

from ops.bench.models import nonsense, write_nonsense
from pipeline.process.redis_server import EmbeddedRedis

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("plain_server")]

TIMEOUT_S = 60.0
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Ended:
    """A command that is over: what it said, and the workers that it had started."""

    code: int
    stdout: str
    stderr: str
    workers: list[str]


def run(arguments: list[str], folder: Path, environment: dict[str, str]) -> Ended:
    """Run `minisgl <arguments>` to its end, and watch for workers all the while."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "minisgl.py"), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "XDG_STATE_HOME": str(folder / "state"), **environment},
    )
    workers: set[str] = set()
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    workers |= {" ".join(line) for line in [child.cmdline()] if "--slot" in line}
        try:
            stdout, stderr = process.communicate(timeout=0.02)
            return Ended(process.returncode, stdout, stderr, sorted(workers))
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline_s:
                process.terminate()  # its Redis and workers end with it
                stdout, stderr = process.communicate()
                pytest.fail(f"minisgl {' '.join(arguments)} did not end:\n{stdout}\n{stderr}")


def assert_refused(ended: Ended, *words: str) -> None:
    """The one line names each of *words*, and nothing else happened."""
    assert (ended.code, ended.stdout, ended.workers) == (2, "", []), ended
    assert ended.stderr.startswith("minisgl: "), ended.stderr
    assert ended.stderr.count("\n") == 1 and ended.stderr.endswith("\n"), ended.stderr
    assert [word for word in words if word not in ended.stderr] == [], ended.stderr
    assert "hidden" not in ended.stderr


FOREIGN = "avx2" if platform.machine() == "aarch64" else "neon"
CASES: dict[str, tuple[str, str, list[str]]] = {
    # what: (command line, variable of the environment, words of the refusal)
    "a flag cut short": ("serve --page 2", "", ["--page", "minisgl serve --help"]),
    "a bad value": ("serve --page-size 24", "", ["--page-size", "'24'", "power of two", "16"]),
    "a bad value in the environment": ("serve", "MINISGL_PORT=eighty", ["--port", "'eighty'"]),
    "a flag of another stage": ("stage tokenize --port 80", "", ["--port", "minisgl stage tokenize --help"]),
    "a stage that is none": ("stage prefill --redis-url redis://127.0.0.1:1", "", ["prefill", "generate", "web"]),
    "a stage without Redis": ("stage web", "", ["stage web", "--redis-url"]),
    "a command that is none": ("start", "", ["start", "serve", "stage"]),
    "a model that is not there": ("serve --model {folder}/none", "", ["{folder}/none", "not a folder", "--model"]),
    "a model of another program": (
        "serve --model qwen3:0.6b",
        "",
        ["qwen3:0.6b: this is a name for Ollama", "owner/name"],
    ),
    "a model that is cut off": ("serve --model {model}", "", ["{model}", "model.safetensors", "truncated"]),
    "a stage's model": ("stage generate --model {model} --redis-url {redis}", "", ["{model}", "truncated"]),
    "ranks that cannot divide the model": ("serve --tp 7", "", ["--tp 7", "query heads", "pass one of 1, 2"]),
    "weights that torch cannot read": (
        "serve --quantization int8 --kernels torch",
        "",
        ["--quantization int8 needs the CPU kernels; remove --kernels torch"],
    ),
    "kernels of another machine": ("serve", f"MINISGL_KERNELS={FOREIGN}", [f"--kernels {FOREIGN}: ", "--kernels auto"]),
    "tokens that wait too long": (
        "stage generate --redis-url {redis} --commit-interval 5000",
        "",
        ["--commit-interval 5000", "at most 1000 ms"],
    ),
    "machines without a common name": ("serve --tp 2 --nnodes 2", "", ["--nnodes 2", "--group is missing"]),
    "a model of the hub": (
        "serve --model someone/small-model",
        "HF_HUB_OFFLINE=1",
        ["--model someone/small-model: ", "HF_HUB_OFFLINE", "pass a folder"],
    ),
    "limits": ("serve --limits {folder}/limits", "", ["--limits {folder}/limits: [[key]] 1: ", "at least 1"]),
    "limits of a stage": (
        "stage web --limits {folder}/limits --redis-url {redis}",
        "",
        ["--limits {folder}/limits: [[key]] 1: ", "at least 1"],
    ),
    "an API key": ("serve", "MINISGL_API_KEY=hidden hidd\xe9n", ["--api-key", "visible ASCII"]),
    "an admin key": ("serve", "MINISGL_ADMIN_KEY=", ["--admin-key", "visible ASCII"]),
    "a page that is none": (
        "serve --allow-origin chat.example.com",
        "",
        ["--allow-origin", "https://chat.example.com"],
    ),
    "a proxy's name": ("serve --trusted-proxies proxy.local", "", ["--trusted-proxies: 'proxy.local'", "10.0.0.0/8"]),
    "a stage's name that is none": (
        "stage web --redis-url {redis}",
        "MINISGL_ALLOW_HOST=localhost http://gpu-box",
        ["--allow-host: 'http://gpu-box'", "without scheme"],
    ),
    "a host that is none": (
        "serve --host no.invalid --data-dir data",
        "",
        ["--host no.invalid", "127.0.0.1"],
    ),
    "a data folder that cannot be": ("serve --data-dir {folder}/limits/data", "", ["--data-dir", "can be written"]),
    "a Redis that is away": (
        "serve --redis-url redis://someone:hidden@127.0.0.1:{port}/0",
        "",
        ["--redis-url", "cannot be reached", "start a redis-server"],
    ),
    "a stage's Redis that is away": (
        "stage tokenize --redis-url redis://someone:hidden@127.0.0.1:{port}/0",
        "",
        ["--redis-url", "cannot be reached", "start a redis-server"],
    ),
    "a log that may be as large as its Redis": (
        "stage web --redis-url {redis} --max-log-bytes 64M",
        "",
        ["--max-log-bytes 67108864", "maxmemory 67108864", "pass less"],
    ),
    "a ready file in a folder that is not there": (
        "stage detokenize --redis-url {redis} --ready-file {folder}/none/ready",
        "",
        ["--ready-file {folder}/none/ready", "No such file", "where this user can write"],
    ),
    "a worker alone that should say when it is ready": (
        "stage detokenize --redis-url {redis} --slot 0 --ready-file {folder}/ready",
        "",
        ["--ready-file: not with --slot"],
    ),
    "a repair of a Redis that is not ours": (
        "serve --repair --redis-url {redis}",
        "",
        ["--repair is for the data of the embedded server", "leave out --redis-url"],
    ),
}


BY_DAY = {
    "a flag cut short",
    "a bad value in the environment",
    "a command that is none",
    "a model that is not there",
    "a stage's model",
    "ranks that cannot divide the model",
    "limits",
    "a Redis that is away",
}
"""Each is a process, which takes most of a second."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in BY_DAY else pytest.mark.night) for case in CASES]
)
def test_what_cannot_work_is_refused_with_the_remedy(case: str, redis_url: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_nonsense(model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    command(redis_url, "CONFIG", "SET", "maxmemory", 64 << 20)
    (tmp_path / "limits").write_text("[[key]]\nkey = 'hidden'\nconcurrent_requests = 0\n")

    def filled(text: str) -> str:
        return text.format(folder=tmp_path, model=model, redis=redis_url, port=free_port())

    line, variable, words = CASES[case]
    name, _, value = variable.partition("=")
    environment = {"HF_HOME": str(tmp_path / "hf")} | ({name: value} if name else {})
    assert_refused(run(filled(line).split(), tmp_path, environment), *map(filled, words))


@pytest.mark.night
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "cuda"], ["--device cuda: torch ", "or pass --device cpu"]),
        (["--attn", "fi"], ["--attn fi: ", "CUDA devices only"]),
        (["--graph", "8"], ["--graph 8: ", "pass --graph 0"]),
        (["--dp", "2", "--max-seq-len", "100000"], ["--max-seq-len 100000"]),
        (["--deterministic", "--kernels", "torch", "--dp", "2"], ["--deterministic needs the CPU kernels"]),
    ],
    ids=" ".join,
)
def test_what_only_an_engine_can_tell_is_told_once(flags: list[str], words: list[str], tmp_path: Path) -> None:
    ended = run(["serve", "--port", str(free_port()), "--data-dir", str(tmp_path / "data"), *flags], tmp_path, NO_GPU)
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("minisgl: "))
    assert ended.code == 2 and [word for word in words if word not in line] == [], ended.stderr


@pytest.mark.night
def test_a_chat_template_that_shows_no_user_is_told_once(tmp_path: Path) -> None:
    model = nonsense(tmp_path)
    (model / "chat_template.jinja").write_text("{{ messages[0].role }}")
    flags = ["--model", str(model), "--port", str(free_port()), "--data-dir", str(tmp_path / "data")]
    ended = run(["serve", *flags], tmp_path, {})
    (line,) = (line for line in ended.stderr.splitlines() if line.startswith("minisgl: "))
    assert ended.code == 2 and f"{model}: its chat template does not show a user's message" in line, ended.stderr


def test_a_port_that_is_taken_is_refused_with_the_remedy(plain_server: Server, tmp_path: Path) -> None:
    port = plain_server.url.rpartition(":")[2]
    ended = run(["serve", "--port", port, "--data-dir", str(tmp_path / "data")], tmp_path, {})
    assert_refused(ended, f"--port {port}", f"127.0.0.1:{port}", "another --port")


def test_a_second_server_on_a_data_folder_is_told_who_holds_it(plain_server: Server, tmp_path: Path) -> None:
    data = Path(plain_server.redis_url.removeprefix("unix://")).parent
    ended = run(["serve", "--port", str(free_port()), "--data-dir", str(data)], tmp_path, {})
    assert_refused(ended, f"--data-dir {data}", f"process {plain_server.command.process.pid}", "another --data-dir")
    assert plain_server.post({"prompt": "still there", "max_tokens": 1}).status_code == 200


def test_damaged_data_are_refused_with_the_flag_that_helps(redis_servers: Servers, tmp_path: Path) -> None:
    redis_servers.binary("embedded")
    server = EmbeddedRedis(tmp_path / "data")
    command(server.url, "SET", "key", "value")
    server.stop()
    (file,) = (tmp_path / "data").glob("appendonlydir/*.incr.aof")
    file.write_bytes(file.read_bytes() + bytes(100_000))
    ended = run(["serve", "--data-dir", str(tmp_path / "data")], tmp_path, {})
    assert_refused(ended, f"{file} is damaged", "without the last 100,000 bytes", "pass --repair")
    if not AT_NIGHT:  # by day tests/pipeline/process/test_aof_repair.py repairs them
        return
    with serve(tmp_path, "--repair") as again:
        assert command(again.redis_url, "GET", "key") == b"value"
        (line,) = again.command.log_lines("redis_data_cut")
        assert line["lost"] == "the last 100,000 bytes"
