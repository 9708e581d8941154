"""Build the image, and check in real containers what docs/containers.md promises. Needs Docker and Compose 2.24.

    make containers [ARGS=--no-build]

Its own project name, volumes and port; nothing is left. Standard library only, so that it runs beside any checkout.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PORT = int(os.environ.get("SMOKE_PORT", "19190"))
URL = f"http://127.0.0.1:{PORT}"
PROJECT = "minisgl-smoke"
IDS = {"x-minisgl-event-ids": "1"}
LONG = {
    "messages": [{"role": "user", "content": "Count from 1 to 400."}],
    "max_tokens": 1500,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}
READY_TIMEOUT_S = 120.0


def compose(*words: str, quiet: bool = False) -> str:
    """Run `docker compose` as a user does, in the project's root, with a project name and a port of its own."""
    print("$ docker compose", *words, flush=True)
    # In bfloat16, another engine that computes the prompt and the answer so far in one step may choose another token.
    more = {"MINISGL_PUBLISH": f"127.0.0.1:{PORT}", "MINISGL_LEASE": "1", "MINISGL_DTYPE": "float32"}
    environment = os.environ | more
    ended = subprocess.run(
        ["docker", "compose", "--project-name", PROJECT, "--progress", "quiet", *words],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if ended.returncode or not quiet:
        print(ended.stdout, end="", flush=True)
    if ended.returncode:
        raise SystemExit(f"docker compose {' '.join(words)}: ended with {ended.returncode}")
    return ended.stdout


def wait_until_ready() -> float:
    """Wait for 200 of /ready; return how long that took, in seconds."""
    began_s = time.monotonic()
    while True:
        try:
            with urllib.request.urlopen(f"{URL}/ready", timeout=5):
                return time.monotonic() - began_s
        except OSError:
            if time.monotonic() - began_s > READY_TIMEOUT_S:
                compose("ps", "--all")
                compose("logs", "--tail", "50")
                raise SystemExit(f"not ready after {READY_TIMEOUT_S:.0f} s") from None
            time.sleep(0.1)


def request(path: str, body: Any = None, **headers: str) -> urllib.request.Request:
    """Return a request to the server: a POST where there is a body."""
    data = json.dumps(body).encode() if body is not None else None
    return urllib.request.Request(URL + path, data, {"content-type": "application/json", **headers})


def ask(path: str, body: Any = None) -> tuple[Any, str]:
    """Return the answer, read as JSON, and its uid."""
    with urllib.request.urlopen(request(path, body), timeout=120) as answer:
        return json.load(answer), answer.headers.get("x-minisgl-uid", "")


class Stream:
    """One streamed answer, as far as it came."""

    def __init__(self) -> None:
        self.uid = ""
        self.last_id = ""
        self.text = ""
        self.is_done = False
        self.began = threading.Event()

    def read(self, to: urllib.request.Request) -> None:
        """Read until the end, or until the connection breaks."""
        try:
            with urllib.request.urlopen(to, timeout=120) as answer:
                self.uid = answer.headers["x-minisgl-uid"]
                held = ""  # what came since the last id: an id ends what belongs to it
                for line in (raw.decode().rstrip("\n") for raw in answer):
                    if line == "data: [DONE]":
                        self.is_done = True
                    elif line.startswith("data: "):
                        chunk = json.loads(line[6:])
                        held += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                        self.text += held
                        held = ""
                        self.began.set()
                    elif line.startswith("id: "):
                        self.last_id = line[4:]
        except (OSError, ValueError):
            pass


def killed_and_up_again() -> None:
    """Kill the container in the middle of a stream; what it had accepted is finished by the next."""
    whole = Stream()
    whole.read(request("/v1/chat/completions", LONG, **IDS))
    assert whole.is_done and whole.text, "the first stream did not end"
    cut = Stream()
    reader = threading.Thread(target=cut.read, args=(request("/v1/chat/completions", LONG, **IDS),))
    reader.start()
    assert cut.began.wait(60)
    compose("kill", "--signal", "KILL", "minisgl")
    reader.join()
    assert not cut.is_done, "the stream ended before the container was killed"
    seen = len(cut.text)
    compose("up", "--detach", "redis", "minisgl")
    print(f"ready again after {wait_until_ready():.1f} s")
    headers = {"last-event-id": cut.last_id} if cut.last_id else {}
    rest = Stream()
    rest.read(request(f"/v1/requests/{cut.uid}/events", **headers))
    assert rest.is_done, "the request was not finished"
    assert cut.text + rest.text == whole.text, "the text is another than without the kill"
    print(f"killed after {seen} characters; the other {len(rest.text)} came from the next container, none twice")


def shared_by_three() -> None:
    """Let three tokenizers share the requests."""

    def one(number: int) -> str:
        body = {"messages": [{"role": "user", "content": f"Number {number}"}], "max_tokens": 1}
        _, uid = ask("/v1/chat/completions", body)
        return uid

    with ThreadPoolExecutor(8) as pool:
        uids = list(pool.map(one, range(60)))
    shares: Counter[str] = Counter()
    for uid in uids:
        with urllib.request.urlopen(f"{URL}/v1/requests/{uid}/events?format=events", timeout=60) as answer:
            found = re.search(r'"kind":"tokenized".*?"by":"([^"]+)"', answer.read().decode())
            assert found, f"{uid} was not tokenized"
            shares[found[1]] += 1
    print("requests of each tokenizer:", dict(shares))
    assert len(shares) == 3, "not all tokenizers had a share"


def main() -> None:
    """Run everything; what fails ends it with a sentence."""
    try:
        if "--no-build" not in sys.argv:
            compose("build", "minisgl", quiet=True)
        compose("up", "--detach", "redis", "minisgl")
        print(f"ready after {wait_until_ready():.1f} s")
        answer, _ = ask("/v1/chat/completions", {"messages": LONG["messages"], "max_tokens": 8})
        print("answer:", json.dumps(answer)[:200])
        killed_and_up_again()
        compose("stop", "minisgl")
        compose("--profile", "stages", "up", "--detach", "--scale", "tokenize=3")
        print(f"stages ready after {wait_until_ready():.1f} s")
        compose("--profile", "stages", "ps", "--format", "table {{.Service}}\t{{.Status}}")
        shared_by_three()
        print("all good")
    finally:
        compose("--profile", "stages", "--profile", "server", "down", "--volumes", "--timeout", "60", quiet=True)


if __name__ == "__main__":
    main()
