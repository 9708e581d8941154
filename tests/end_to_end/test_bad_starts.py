"""What cannot work is said at once: exit code 2 and one line with the remedy, before any worker has started."""

from __future__ import annotations

import contextlib
import json
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis_servers import Servers, command
from safetensors.numpy import load_file, save_file
from servers import ROOT, Server, free_port, serve

from ops.bench import nonsense
from pipeline.process.redis_server import EmbeddedRedis

pytestmark = pytest.mark.slow

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Ended:
    """A command that is over: what it said, and the workers that it had started."""

    code: int
    stdout: str
    stderr: str
    workers: list[str]


def run(*arguments: str, folder: Path, environment: Mapping[str, str] | None = None) -> Ended:
    """Run `minisgl <arguments>` to its end, and watch for workers all the while."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "minisgl.py"), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "XDG_STATE_HOME": str(folder / "state"), **(environment or {})},
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
    assert ended.code == 2, ended
    assert ended.stderr.startswith("minisgl: "), ended.stderr
    assert ended.stderr.count("\n") == 1 and ended.stderr.endswith("\n"), ended.stderr
    assert ended.stdout == ""
    for word in words:
        assert word in ended.stderr, ended.stderr
    assert ended.workers == []


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("running")) as server:
        yield server


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder in which everything is right."""
    folder = tmp_path / "model"
    folder.mkdir()
    nonsense.write(folder)
    return folder


# The command line


MEANINGLESS: Sequence[tuple[list[str], list[str]]] = (
    (["serve", "--no-such-flag"], ["--no-such-flag", "minisgl serve --help"]),
    (["serve", "--tokenizer", "2"], ["--tokenizer", "minisgl serve --help"]),  # no abbreviations
    (["serve", "--port", "eighty"], ["--port", "'eighty'", "at least 1"]),
    (["serve", "--port", "70000"], ["--port", "'70000'", "65535"]),
    (["serve", "--page-size", "24"], ["--page-size", "'24'", "power of two", "16"]),
    (["serve", "--lease", "0"], ["--lease", "'0'", "above 0"]),
    (["serve", "--memory-ratio", "1.5"], ["--memory-ratio", "'1.5'", "up to 1"]),
    (["serve", "--dtype", "int8"], ["--dtype", "'int8'", "bfloat16"]),
    (["serve", "--dummy-weight", "perhaps"], ["--dummy-weight", "'perhaps'", "yes or no"]),
    (["serve", "--model"], ["--model", "expected one argument"]),
    (["serve", "a-model"], ["a-model", "minisgl serve --help"]),
    (["stage", "prefill", "--redis-url", "redis://127.0.0.1:1"], ["prefill", "generate", "web"]),
    (["stage"], ["stage", "tokenize", "generate", "detokenize", "web"]),
    (["stage", "tokenize", "--port", "80"], ["--port", "minisgl stage tokenize --help"]),
    (["stage", "tokenize"], ["stage tokenize", "--redis-url"]),
    (["stage", "web"], ["stage web", "--redis-url"]),
    (["start"], ["start", "serve", "stage"]),
)


@pytest.mark.parametrize(("arguments", "words"), MEANINGLESS, ids=[" ".join(line) for line, _ in MEANINGLESS])
def test_a_command_line_that_means_nothing_is_refused(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    assert_refused(run(*arguments, folder=tmp_path), *words)


@pytest.mark.parametrize(
    ("name", "value"), [("MINISGL_PORT", "eighty"), ("MINISGL_DTYPE", "int8"), ("MINISGL_TOKENIZERS", "-1")]
)
def test_a_bad_value_in_the_environment_is_refused_as_the_flag_is(name: str, value: str, tmp_path: Path) -> None:
    flag = name.replace("MINISGL_", "--").lower()
    assert_refused(run("serve", folder=tmp_path, environment={name: value}), flag, f"'{value}'")


# The model


def test_a_model_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    assert_refused(run("serve", "--model", str(folder), folder=tmp_path), str(folder), "not a folder", "--model")


def _rewrite_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _scramble_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[8:16] = b"nonsense"
    path.write_bytes(data)


def _reshape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()
    save_file(tensors, folder / "model.safetensors")


def _leave_out(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def _leave_out_a_shard(folder: Path) -> None:
    """Spread the weights over two files, and lose the second."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    first = {name: tensor for name, tensor in tensors.items() if "00001-of" in names[name]}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def _add(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: tensors["model.norm.weight"]}, folder / "model.safetensors")


def _tie_and_differ(folder: Path) -> None:
    _rewrite_config(folder, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(lambda f: (f / "config.json").unlink(), ["config.json"], id="no config.json"),
        pytest.param(lambda f: (f / "config.json").write_text("{"), ["config.json"], id="config.json is no JSON"),
        pytest.param(lambda f: (f / "tokenizer.json").unlink(), ["tokenizer.json", "not found"], id="no tokenizer"),
        pytest.param(lambda f: (f / "model.safetensors").unlink(), ["model.safetensors", "not found"], id="no weights"),
        pytest.param(
            lambda f: (f / "model.safetensors").write_bytes(b""), ["model.safetensors", "corrupt"], id="empty"
        ),
        pytest.param(_cut_weights, ["model.safetensors", "truncated"], id="weights are cut off"),
        pytest.param(_scramble_header, ["model.safetensors", "header"], id="weights have a broken header"),
        pytest.param(_reshape, ["model.safetensors", "model.norm.weight", "(127,)", "(128,)"], id="wrong shape"),
        pytest.param(_leave_out, ["model.layers.1.mlp.up_proj.weight", "missing"], id="a tensor is missing"),
        pytest.param(lambda f: _add(f, "model.extra"), ["model.extra", "is not part of Qwen3"], id="a tensor too many"),
        pytest.param(_leave_out_a_shard, ["model-00002-of-00002.safetensors", "not found"], id="a shard is missing"),
        pytest.param(
            _tie_and_differ, ["model.safetensors", "lm_head.weight", "tie_word_embeddings"], id="tied weights twice"
        ),
        pytest.param(
            lambda f: _rewrite_config(f, rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
            ["config.json", "longrope", "yarn"],
            id="unsupported rope",
        ),
        pytest.param(
            lambda f: _rewrite_config(f, hidden_act="gelu"),
            ["config.json", "hidden_act", "gelu", "silu"],
            id="unsupported activation",
        ),
        pytest.param(
            lambda f: _rewrite_config(f, architectures=["MambaForCausalLM"], model_type="mamba"),
            ["config.json", "MambaForCausalLM", "Qwen3ForCausalLM"],
            id="unsupported architecture",
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_by_the_name_of_its_fault(
    spoil: Callable[[Path], None], words: list[str], model: Path, tmp_path: Path
) -> None:
    spoil(model)
    assert_refused(run("serve", "--model", str(model), folder=tmp_path), str(model), *words)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"HF_HUB_OFFLINE": "1"}, ["HF_HUB_OFFLINE", "pass a folder"]),
        ({"HF_ENDPOINT": "http://127.0.0.1:1"}, ["http://127.0.0.1:1 cannot be reached", "check the network"]),
    ],
    ids=["offline", "no network"],
)
def test_a_model_of_the_hub_that_cannot_be_had_is_refused(
    environment: Mapping[str, str], words: list[str], tmp_path: Path
) -> None:
    environment = {**environment, "HF_HOME": str(tmp_path / "hf")}
    ended = run("serve", "--model", "someone/small-model", folder=tmp_path, environment=environment)
    assert_refused(ended, "--model someone/small-model: ", *words)


def test_a_stage_alone_looks_at_the_model_too(model: Path, redis_url: str, tmp_path: Path) -> None:
    _reshape(model)
    ended = run("stage", "generate", "--model", str(model), "--redis-url", redis_url, folder=tmp_path)
    assert_refused(ended, str(model), "model.norm.weight")


# API keys


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["cannot be read", "No such file or directory"]),
        ("[[key]\n", ["is no TOML", "line 1"]),
        ("[default]\nrequests_per_second = 1\n", ["[default]", "requests_per_second", "requests_per_minute"]),
        ("[[key]]\nkey = 'hidden'\nconcurrent_requests = 0\n", ["[[key]] 1", "concurrent_requests", "at least 1"]),
    ],
    ids=["no file", "no TOML", "unknown name", "not positive"],
)
@pytest.mark.parametrize("arguments", [["serve"], ["stage", "web"]], ids=" ".join)
def test_a_file_of_limits_that_is_wrong_is_refused(
    arguments: list[str], text: str | None, words: list[str], redis_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "limits.toml"
    if text is not None:
        file.write_text(text)
    ended = run(*arguments, "--limits", str(file), "--redis-url", redis_url, folder=tmp_path)
    assert_refused(ended, f"--limits {file}: ", *words)
    assert "hidden" not in ended.stderr


@pytest.mark.parametrize("environment", [{"MINISGL_API_KEY": ""}, {"MINISGL_API_KEY": "hidden hidd\xe9n"}], ids=str)
def test_an_api_key_that_is_none_is_refused_and_not_shown(environment: Mapping[str, str], tmp_path: Path) -> None:
    ended = run("serve", folder=tmp_path, environment=environment)
    assert_refused(ended, "--api-key", "visible ASCII")
    assert "hid" not in ended.stderr


# The port and the data folder


def test_a_port_that_is_taken_is_refused_with_the_remedy(running: Server, tmp_path: Path) -> None:
    port = running.url.rpartition(":")[2]
    ended = run("serve", "--port", port, "--data-dir", str(tmp_path / "data"), folder=tmp_path)
    assert_refused(ended, f"--port {port}", f"127.0.0.1:{port}", "another --port")


def test_a_host_that_is_none_is_refused(tmp_path: Path) -> None:
    ended = run("serve", "--host", "no.such.host.invalid", "--data-dir", str(tmp_path / "data"), folder=tmp_path)
    assert_refused(ended, "--host no.such.host.invalid", "127.0.0.1")


def test_a_second_server_on_a_data_folder_is_told_who_holds_it(running: Server, tmp_path: Path) -> None:
    data = Path(running.redis_url.removeprefix("unix://")).parent
    ended = run("serve", "--port", str(free_port()), "--data-dir", str(data), folder=tmp_path)
    holder = running.command.process.pid
    assert_refused(ended, f"--data-dir {data}", f"process {holder}", "another --data-dir")
    assert running.post({"prompt": "still there", "max_tokens": 1}).status_code == 200


def test_a_data_folder_that_cannot_be_made_is_refused(tmp_path: Path, model: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "data"
    ended = run("serve", "--model", str(model), "--data-dir", str(folder), folder=tmp_path)
    assert_refused(ended, f"--data-dir {folder}", "can be written")


# Redis


@pytest.mark.parametrize("arguments", [["serve"], ["stage", "tokenize"], ["stage", "web"]], ids=" ".join)
def test_a_redis_that_cannot_be_reached_is_refused(arguments: list[str], tmp_path: Path) -> None:
    url = f"redis://someone:secret@127.0.0.1:{free_port()}/0"
    ended = run(*arguments, "--redis-url", url, folder=tmp_path)
    assert_refused(ended, "--redis-url", "cannot be reached", "start a redis-server")
    assert "secret" not in ended.stderr


def test_an_address_that_is_none_of_redis_is_refused(tmp_path: Path) -> None:
    assert_refused(run("serve", "--redis-url", "localhost", folder=tmp_path), "--redis-url", "expected redis://")


def test_a_redis_that_may_evict_is_refused_with_the_command_that_helps(
    redis_servers: Servers, redis_url: str, tmp_path: Path
) -> None:
    command(redis_url, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        ended = run("serve", "--redis-url", redis_url, folder=tmp_path)
    finally:
        command(redis_url, "CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert_refused(ended, "allkeys-lru", "redis-cli CONFIG SET maxmemory-policy noeviction")


def test_a_repair_of_a_redis_that_is_not_ours_is_refused(redis_url: str, tmp_path: Path) -> None:
    ended = run("serve", "--repair", "--redis-url", redis_url, folder=tmp_path)
    assert_refused(ended, "--repair is for the data of the embedded server", "leave out --redis-url")


def test_damaged_data_are_refused_with_the_flag_that_helps(redis_servers: Servers, model: Path, tmp_path: Path) -> None:
    redis_servers.binary("embedded")
    server = EmbeddedRedis(tmp_path / "data")
    command(server.url, "SET", "key", "value")
    server.stop()
    (file,) = (tmp_path / "data").glob("appendonlydir/*.incr.aof")
    file.write_bytes(file.read_bytes() + bytes(100_000))
    ended = run("serve", "--model", str(model), "--data-dir", str(tmp_path / "data"), folder=tmp_path)
    assert_refused(ended, f"{file} is damaged", "without the last 100,000 bytes", "pass --repair")
    with serve(tmp_path, "--model", str(model), "--repair") as again:
        assert command(again.redis_url, "GET", "key") == b"value"
        (line,) = again.command.log_lines("redis_data_cut")
        assert line["lost"] == "the last 100,000 bytes"


class _OldRedis(socketserver.StreamRequestHandler):
    """Answers as Redis 6.0.16 does what a client asks when it connects."""

    def handle(self) -> None:
        while (line := self.rfile.readline()).startswith(b"*"):
            words = []
            for _ in range(int(line[1:])):
                length = int(self.rfile.readline()[1:])
                words.append(self.rfile.read(length + 2)[:-2].decode())
            self.wfile.write(self._reply([word.upper() for word in words]))

    def _reply(self, words: list[str]) -> bytes:
        match words:
            case ["PING"]:
                return b"+PONG\r\n"
            case ["INFO", *_]:
                info = b"# Server\r\nredis_version:6.0.16\r\nredis_mode:standalone\r\nmaxmemory_policy:noeviction\r\n"
                return b"$%d\r\n%s\r\n" % (len(info), info)
            case ["SELECT" | "QUIT", *_] | ["CLIENT", "SETNAME", *_]:
                return b"+OK\r\n"
            case _:  # also HELLO's options and CLIENT SETINFO, which came later
                return b"-ERR unknown command or subcommand\r\n"


@pytest.fixture
def old_redis_url() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _OldRedis) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"redis://127.0.0.1:{server.server_address[1]}/0"
        server.shutdown()
        thread.join()


def test_a_redis_older_than_6_2_is_refused(old_redis_url: str, tmp_path: Path) -> None:
    ended = run("serve", "--redis-url", old_redis_url, folder=tmp_path)
    assert_refused(ended, "6.0.16", "6.2 or newer", "upgrade")
