"""Records what this version writes, for `test_versions.py` of later ones: run once for each release.

    PYTHONPATH=tests:. .venv/bin/python tests/versions/record.py

A server with the demo model answers requests of every kind, and is killed while it answers others. What stays is in
`tests/versions/<version>/`: the data of its Redis, its archive and a dump in one file, and in `seen.json` what its
clients saw.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import zstandard
from support.redis_servers import until
from support.servers import free_port

from pipeline import VERSION, events, markup, sampling, scores
from pipeline.sampling import Value

ROOT: Final = Path(__file__).resolve().parents[2]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODULES: Final = [module.__name__ for module in (events, markup, sampling, scores)]
WRITTEN: Final = "written.tar.zst"
FIFTY_YEARS_S: Final = str(50 * 365 * 86400)
"""So long its requests stay readable."""
TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
HI: Final = [{"role": "user", "content": "Hi"}]
BODIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": (CHAT, {"messages": HI, "max_tokens": 12, "seed": 1, "user": "ann"}),
    "greedy": (COMPLETIONS, {"prompt": "Once upon", "max_tokens": 12, "temperature": 0}),
    "choices of two prompts": (COMPLETIONS, {"prompt": ["One", "Two"], "n": 2, "max_tokens": 6, "seed": 2}),
    "scores": (COMPLETIONS, {"prompt": "Three", "max_tokens": 4, "logprobs": 3, "prompt_logprobs": 2, "seed": 3}),
    "a call": (CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": "required", "max_tokens": 40, "seed": 4}),
    "a schema": (CHAT, {"messages": HI, "guided_json": {"enum": ["a", "b"]}, "max_tokens": 20, "seed": 5}),
    "a stop": (COMPLETIONS, {"prompt": "Four", "stop": ["e", "zz"], "max_tokens": 30, "seed": 6}),
    "SGLang's form": ("/generate", {"text": "Five", "sampling_params": {"max_new_tokens": 5, "temperature": 0}}),
    "with metadata": (CHAT, {"messages": HI, "max_tokens": 3, "seed": 7, "metadata": {"a": "b"}, "priority": 2}),
}
LONG: Final = {"prompt": "For ever", "max_tokens": 900, "stream": True, "ignore_eos": True, "seed": 8}


def is_ready(url: str) -> bool:
    """Return whether the server answers requests."""
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def texts_of(path: str, told: dict[str, Any]) -> list[str]:
    """Return the texts of an answer, one for each choice."""
    if path == "/generate":
        return [told["text"]]
    return [choice["text"] if "text" in choice else choice["message"]["content"] or "" for choice in told["choices"]]


def ask(url: str) -> dict[str, Any]:
    """Send every body; return name -> uid and texts."""
    seen = {}
    for name, (path, body) in BODIES.items():
        answer = httpx.post(url + path, json=body, timeout=60)
        answer.raise_for_status()
        told = answer.json()
        seen[name] = {"uid": answer.headers["x-minisgl-uid"], "texts": texts_of(path, told)}
    return seen


def begin(url: str, num: int) -> list[tuple[str, Iterator[str]]]:
    """Begin long streams and wait for their first tokens. Return the uid and the lines of each; a stream ends when its
    lines are dropped."""
    client, streams = httpx.Client(timeout=60), []
    for _ in range(num):
        request = client.build_request("POST", url + COMPLETIONS, json=LONG)
        answer = client.send(request, stream=True)
        lines = answer.iter_lines()
        next(lines)
        streams.append((answer.headers["x-minisgl-uid"], lines))
    return streams


def fields_of_events() -> dict[str, list[str]]:
    """Return the fields of everything that events consist of."""
    values = list(Value.__subclasses__())
    for value in values:
        values += value.__subclasses__()
    return {value.__name__: sorted(value.model_fields) for value in values if value.__module__ in MODULES}


def main() -> int:
    """Record; return the exit code."""
    folder = ROOT / "tests" / "versions" / VERSION
    if folder.exists():
        sys.stderr.write(f"{folder} exists: a version is recorded once\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="minisgl-version-") as name:
        data, archive = Path(name, "data"), Path(name, "archive")
        minisgl = [sys.executable, str(ROOT / "minisgl.py")]
        port = free_port()
        flags = ["--port", str(port), "--data-dir", str(data), "--archive", str(archive), "--retention", FIFTY_YEARS_S]
        server = subprocess.Popen([*minisgl, "serve", *flags])
        url = f"http://127.0.0.1:{port}"
        until(lambda: is_ready(url), timeout_s=120)
        answered = ask(url)
        dump = [*minisgl, "replay", "dump", str(Path(name, "dump.zst")), "--data-dir", str(data), "--since", "-1h"]
        subprocess.run(dump, check=True)
        time.sleep(2)  # the archiver writes what has ended
        streams = begin(url, 2)
        for process in (psutil.Process(server.pid), *psutil.Process(server.pid).children()):
            process.kill()
        seen = {"answered": answered, "begun": [uid for uid, _ in streams]}
        folder.mkdir()
        (folder / "fields.json").write_text(json.dumps(fields_of_events()) + "\n")
        (folder / "seen.json").write_text(json.dumps(seen) + "\n")
        with zstandard.open(folder / WRITTEN, "wb") as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
            for each in (data / "appendonlydir", archive, Path(name, "dump.zst")):
                tar.add(each, each.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
