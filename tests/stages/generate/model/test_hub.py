"""A model of the hub comes from the library's cache or from the hub, and what goes wrong is one line.

The hub is a small server here; the library reads its environment when it is imported, so each fetch is a process.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import make_checkpoint
from support.selection import rest_at_night

from stages.generate.model.hub import HubModel, hub_model

ROOT = Path(__file__).parents[4]
ID, COMMIT = "someone/small-model", "0123456789abcdef0123456789abcdef01234567"
FETCH = """
import sys
from pipeline.errors import ConfigError
from stages.generate.model.hub import fetch, fetch_gguf, hub_model
code = 0
for given in sys.argv[2:]:
    model = hub_model(given)
    assert model is not None
    try:
        print(fetch_gguf(model) if model.file else fetch(model, weights=sys.argv[1] == "weights"))
    except ConfigError as error:
        print(f"minisgl: {error}", file=sys.stderr)
        code = 1
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-0.6B", HubModel("Qwen/Qwen3-0.6B", "")),
        ("Qwen/Qwen3-0.6B@v1.0", HubModel("Qwen/Qwen3-0.6B", "v1.0")),
        ("a/b@refs/pr/1", HubModel("a/b", "refs/pr/1")),
        ("a/b-GGUF:Q4_K_M", HubModel("a/b-GGUF", "", "Q4_K_M")),
        ("a/b-GGUF@v1:UD/b-1.5.gguf", HubModel("a/b-GGUF", "v1", "UD/b-1.5.gguf")),
        ("models/qwen3.gguf", None),
        ("models/qwen3.GGUF", None),
        ("qwen3:0.6b", None),
        ("a/b:", None),
        ("", None),
        ("Qwen3-0.6B", None),
        ("/Qwen/Qwen3-0.6B", None),
        ("./Qwen/Qwen3-0.6B", None),
        ("../Qwen3-0.6B", None),
        ("~/Qwen3-0.6B", None),
        ("models/Qwen/Qwen3-0.6B", None),
        ("Qwen/Qwen3 0.6B", None),
        ("a/b@", None),
    ],
)
def test_a_name_of_the_hub_is_told_from_a_path(text: str, expected: HubModel | None) -> None:
    assert hub_model(text) == expected
    assert expected is None or expected.given == text


@pytest.mark.parametrize("host", ["https://huggingface.co", "HTTP://www.huggingface.co", "hf.co", "https://hf.co"])
@pytest.mark.parametrize(
    ("rest", "given"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B/", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B?library=transformers#usage", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B/tree/main", "Qwen/Qwen3-0.6B@main"),
        ("a/b/tree/refs/pr/1/", "a/b@refs/pr/1"),
        ("a/b-GGUF:Q4_K_M", "a/b-GGUF:Q4_K_M"),
        ("a/b/tree/v1?show_file_info=x:b.gguf", "a/b@v1:b.gguf"),
    ],
)
def test_the_address_of_a_model_is_its_name(host: str, rest: str, given: str) -> None:
    model = hub_model(f"{host}/{rest}")
    assert model is not None and model.given == given


@pytest.mark.parametrize(
    "text",
    [
        "https://huggingface.co/Qwen",
        "https://huggingface.co/a/b/blob/main/config.json",
        "https://example.com/a/b",
    ],
)
def test_another_address_is_no_name(text: str) -> None:
    assert hub_model(text) is None


def test_a_folder_that_is_there_wins_over_a_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_model("models/qwen3") is not None
    (tmp_path / "models" / "qwen3").mkdir(parents=True)
    assert hub_model("models/qwen3") is None


def test_the_library_is_imported_only_for_a_model_of_the_hub() -> None:
    code = "import sys, stages.generate.model.hub; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def fetch(cache: Path, *models: str, what: str = "weights", **environment: str) -> subprocess.CompletedProcess[str]:
    """Fetch *models*, or that of the hub, into *cache*, with nothing of this machine's own settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    known = {"HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return subprocess.run(
        [sys.executable, "-c", FETCH, what, *(models or [ID])],
        cwd=ROOT,
        env=kept | known | environment,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
    )


def assert_refused(done: subprocess.CompletedProcess[str], *words_of_each: Sequence[str]) -> None:
    """See that each model was refused in a line, which has its words."""
    assert done.returncode == 1 and done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("minisgl: ")]
    assert done.stderr.endswith("\n".join(lines) + "\n"), done.stderr
    for line, words in zip(lines, words_of_each, strict=True):
        assert [word for word in words if word not in line] == [], line


# What is in the cache


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", shard_size="200KB")


@pytest.fixture
def cached(checkpoint: Path, tmp_path: Path) -> Path:
    """A folder for HF_HOME in which the model is, as the library would have put it there."""
    repository = tmp_path / "hub" / f"models--{ID.replace('/', '--')}"
    shutil.copytree(checkpoint, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return tmp_path


@pytest.mark.parametrize("model", rest_at_night([ID, f"{ID}@main", f"{ID}@{COMMIT}"]))
def test_offline_and_without_a_network_a_model_comes_from_the_cache(cached: Path, model: str) -> None:
    done = fetch(cached, model, HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert model != ID or fetch(cached, HF_ENDPOINT="http://127.0.0.1:1").stdout == done.stdout
    assert (Path(done.stdout.strip()) / "model.safetensors.index.json").is_file()


def test_offline_a_model_that_is_not_in_the_cache_is_refused(cached: Path) -> None:
    models = ("someone/else", f"{ID}@v2")
    expected = ((f"--model {model}: ", str(cached), "HF_HUB_OFFLINE") for model in models)
    assert_refused(fetch(cached, *models, HF_HUB_OFFLINE="1"), *expected)


def test_without_a_network_a_model_that_is_not_in_the_cache_is_refused(tmp_path: Path) -> None:
    done = fetch(tmp_path, HF_ENDPOINT="http://127.0.0.1:1")
    said = f"--model {ID}: not a folder, and http://127.0.0.1:1 cannot be reached"
    assert_refused(done, (said, "Connection refused"))


# What the hub says

GGUF_ID = "someone/small-GGUF"
GGUFS = (
    "small-Q4_K_M.gguf",
    "small.q8_0.gguf",
    "small-UD-IQ2_M.gguf",
    "other/small-UD-IQ2_M.gguf",
    "BF16/small-bf16-00001-of-00002.gguf",
    "BF16/small-bf16-00002-of-00002.gguf",
    "mmproj-Q4_K_M.gguf",
    "[x]-imatrix.gguf",
    "README.md",
)
CHOICES = "bf16, imatrix, other/small-UD-IQ2_M.gguf, Q4_K_M, small-UD-IQ2_M.gguf, q8_0"


class Hub(http.server.ThreadingHTTPServer):
    """As much of the hub as a download needs: public models, one that asks for consent, and nothing else."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _HubAnswers)
        self.repositories = {ID: files, GGUF_ID: {name: name.encode() for name in GGUFS}, "someone/empty": {}}
        self.sent: set[str] = set()
        self.broken = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _HubAnswers(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        model = next((one for one in self.server.repositories if f"/{one}/" in f"{path}/"), "")
        if self.server.broken:
            self._answer(500, b"out of order")
        elif "/consent/first" in path:
            self._answer(403, b"{}", **{"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        elif not model:
            self._answer(401, b"{}", **{"X-Error-Code": "RepoNotFound", "X-Error-Message": "Not found."})
        elif "/revision/v9" in path:
            self._answer(404, b"{}", **{"X-Error-Code": "RevisionNotFound", "X-Error-Message": "No such revision."})
        elif path.startswith(f"/api/models/{model}/tree/"):
            files = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.server.repositories[model].items()
            ]
            self._answer(200, json.dumps(files).encode())
        elif path.startswith(f"/api/models/{model}"):
            names = [{"rfilename": name} for name in self.server.repositories[model]]
            self._answer(200, json.dumps({"id": model, "sha": COMMIT, "siblings": names}).encode())
        else:
            name = urllib.parse.unquote(path.partition(f"/resolve/{COMMIT}/")[2])
            data = self.server.repositories[model][name]
            if self.command == "GET":
                self.server.sent.add(name)
            etag = hashlib.sha1(data).hexdigest()
            self._answer(200, data, **{"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    others = ("consolidated.safetensors", "pytorch_model.bin", "README.md", "tf_model.h5")
    with Hub(files | dict.fromkeys(others, b"not for us")) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_only_what_is_needed_is_downloaded_and_only_once(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    done = fetch(tmp_path, HF_ENDPOINT=hub.url)
    assert (done.returncode, done.stderr) == (0, ""), "and no bar is drawn into a file"
    folder = Path(done.stdout.strip())
    assert folder.name == COMMIT and folder.is_relative_to(tmp_path)
    assert hub.sent == {path.name for path in checkpoint.iterdir()}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in checkpoint.iterdir()
    }
    hub.sent.clear()
    assert fetch(tmp_path, HF_ENDPOINT=hub.url).stdout == done.stdout
    assert hub.sent == set()


def test_who_reads_text_alone_downloads_no_weights(hub: Hub, tmp_path: Path) -> None:
    done = fetch(tmp_path, what="text", HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    assert {"tokenizer.json", "config.json"} <= hub.sent
    assert not any("safetensors" in name for name in hub.sent)


REFUSED = {
    "no/such-model": ["neither a folder here nor a model that", "check the name", "hf auth login"],
    "consent/first": ["its owner asks for consent", "/consent/first", "hf auth login"],
    f"{ID}@v9": ["has no revision v9", "leave out @v9"],
    "a--b/c": ["could not be downloaded", "HFValidationError"],
    "someone/empty": ["has neither config.json nor GGUF files"],
    "someone/empty:Q4_0": ["has no GGUF files; leave out :Q4_0"],
    GGUF_ID: [f"has GGUF files; pass {GGUF_ID}:TYPE; there are {CHOICES}"],
    f"{GGUF_ID}:Q2_K": [f"no GGUF file has this name or type; there are {CHOICES}"],
    f"{GGUF_ID}:IQ2_M": ["2 GGUF files fit; pass one of other/small-UD-IQ2_M.gguf, small-UD-IQ2_M.gguf after the"],
    f"{GGUF_ID}@v9:Q4_K_M": ["has no revision v9"],
    "no/such-model:Q4_K_M": ["neither a folder here nor a model that", "check the name"],
    "consent/first:Q4_K_M": ["its owner asks for consent"],
}


@pytest.mark.parametrize(
    ("file", "sent"),
    [
        ("q4_K_m", {"small-Q4_K_M.gguf"}),
        ("Q8_0", {"small.q8_0.gguf"}),
        ("small.q8_0.gguf", {"small.q8_0.gguf"}),
        ("bf16", {"BF16/small-bf16-00001-of-00002.gguf", "BF16/small-bf16-00002-of-00002.gguf"}),
        ("small-bf16-00002-of-00002.gguf", {f"BF16/small-bf16-0000{part}-of-00002.gguf" for part in "12"}),
        ("other/small-UD-IQ2_M.gguf", {"other/small-UD-IQ2_M.gguf"}),
        ("imatrix", {"[x]-imatrix.gguf"}),
    ],
)
def test_a_type_or_a_name_downloads_this_gguf_file_alone(file: str, sent: set[str], hub: Hub, tmp_path: Path) -> None:
    done = fetch(tmp_path, f"{GGUF_ID}:{file}", HF_ENDPOINT=hub.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert hub.sent == sent
    path = Path(done.stdout.strip())
    assert path.read_text() == min(sent) and str(path).endswith(f"{COMMIT}/{min(sent)}")
    for away in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}):
        assert fetch(tmp_path, f"{GGUF_ID}:{file}", **away).stdout == done.stdout


def test_without_a_network_a_gguf_file_that_is_not_in_the_cache_is_refused(tmp_path: Path) -> None:
    model = f"{GGUF_ID}:Q4_K_M"
    assert_refused(
        fetch(tmp_path, model, HF_ENDPOINT="http://127.0.0.1:1"), [f"--model {model}: not a folder, and", "refused"]
    )
    assert_refused(fetch(tmp_path, model, HF_HUB_OFFLINE="1"), [f"--model {model}: not a folder, and", "OFFLINE"])


def test_what_the_hub_refuses_is_said_in_one_line(hub: Hub, tmp_path: Path) -> None:
    expected = ([f"--model {model}: ", *words] for model, words in REFUSED.items())
    assert_refused(fetch(tmp_path, *REFUSED, HF_ENDPOINT=hub.url), *expected)


def test_a_hub_that_is_out_of_order_is_said_in_one_line(hub: Hub, tmp_path: Path) -> None:
    hub.broken = True
    assert_refused(fetch(tmp_path, HF_ENDPOINT=hub.url), (f"--model {ID}: ", hub.url, "500"))
