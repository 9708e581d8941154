"""Traffic of every endpoint, recorded; as a script, it measures how exactly `minisgl replay drive` repeats it.

    PYTHONPATH=tests:. python tests/support/redrive.py [--seconds 300] [--rate 4] [--model FOLDER] [--keep FILE]

sends Poisson traffic with cancels to a server of its own, then drives it at 1x, at 2x, and at 1x by the client's clock.
The server is warm, and its prefix cache is empty before each: recorded prompts would be in it.
`minisgl replay drive FILE --url URL` then sends it to another server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
from support.servers import Server, eventually, serve

import minisgl
from ops.bench.load import Arrival, connected
from ops.replay.files import write_dump
from pipeline.names import sibling_uids
from pipeline.recording import Recording

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
WARM_UP = 16
"""Requests that are not recorded: the first ones are slow."""
LEAVES_AFTER = 6
"""Lines of a stream."""


def request(number: int, num_tokens: int = 24) -> tuple[str, dict[str, Any], int]:
    """Return path and body of a request, and how many choices it has. Clients leave the last three kinds."""
    text = f"Tell me story number {number}."
    chat = {"messages": [{"role": "user", "content": text}], "temperature": 1.0, "ignore_eos": True}
    sampled = chat | {"max_tokens": num_tokens}
    plain = {"prompt": [text, "And then"], "temperature": 1.0, "ignore_eos": True, "max_tokens": num_tokens}
    params = {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    kinds: Sequence[tuple[str, dict[str, Any], int]] = [
        (CHAT, sampled | {"stream": True, "logprobs": True}, 1),
        (CHAT, sampled | {"n": 2, "presence_penalty": 0.5}, 2),
        (COMPLETIONS, plain | {"stream": True, "echo": True}, 2),
        (GENERATE, {"text": text, "sampling_params": params, "stream": True}, 1),
        (GENERATE, {"prompt": text, "max_tokens": 9}, 1),
        (CHAT, chat | {"stream": True}, 1),
        (GENERATE, {"text": text, "sampling_params": {**params, "max_new_tokens": 400}, "stream": True}, 1),
        (GENERATE, {"prompt": text, "max_tokens": 400, "ignore_eos": True}, 1),
    ]
    return kinds[number % len(kinds)]


def leaves(number: int) -> bool:
    """Return whether the client of request *number* leaves before its end."""
    return number % 8 >= 5


class _Left(Exception):
    """The client has read enough."""


async def _sent(url: str, pauses_s: Sequence[float], num_tokens: Sequence[int]) -> list[str]:
    uids: list[tuple[str, ...]] = [()] * len(pauses_s)
    # The client is the one that drives: another would take more or less of the cores, and change the times.
    async with connected(url, timeout_s=60) as client, asyncio.TaskGroup() as group:

        async def send(number: int) -> None:
            path, body, choices = request(number, num_tokens[number])
            lines = 0

            def begun(headers: Mapping[str, str]) -> None:
                uids[number] = sibling_uids(headers["x-minisgl-uid"], choices)

            def came(arrival: Arrival, _: object) -> None:
                nonlocal lines
                lines += arrival[1].count(b"\n")
                if leaves(number) and lines >= LEAVES_AFTER:
                    raise _Left

            with contextlib.suppress(_Left):
                assert not (error := await client.receive(path, orjson.dumps(body), came, begun)), error

        for number, pause_s in enumerate(pauses_s):
            group.create_task(send(number))
            await asyncio.sleep(pause_s)
    return [uid for several in uids for uid in several]


def record(server: Server, file: Path, pauses_s: Sequence[float], num_tokens: Sequence[int]) -> list[str]:
    """Send a request before each pause; write their histories into *file*; return their uids."""
    uids = asyncio.run(_sent(server.url, pauses_s, num_tokens))
    with server.log() as log:
        eventually(lambda: not log.alive(uids), "all requests have ended")
        histories = [log.histories([uid])[0] for uid in uids]
    recordings = [Recording(uid, tuple(entries)) for uid, entries in zip(uids, histories, strict=True)]
    assert write_dump(file, recordings) == len(uids)
    return uids


def flush(server: Server) -> None:
    """Empty the prefix cache of *server*. What runs keeps its pages, so all requests have ended."""
    httpx.post(f"{server.url}/flush_cache").raise_for_status()


def main() -> int:
    """Record, then drive twice; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--model", default="")
    parser.add_argument("--keep", default="", help="new file for the recorded traffic")
    options = parser.parse_args()
    model = ["--model", options.model] if options.model else []
    draw = random.Random(0)
    pauses_s = [draw.expovariate(options.rate) for _ in range(int(options.seconds * options.rate))]
    num_tokens = [draw.randint(16, 128) for _ in pauses_s]
    codes = []
    with tempfile.TemporaryDirectory(prefix="minisgl-redrive-") as folder, serve(Path(folder), *model) as server:
        file = Path(options.keep or f"{folder}/traffic.zst")
        record(server, file, pauses_s[:WARM_UP], num_tokens[:WARM_UP])
        file.unlink()
        flush(server)
        record(server, file, pauses_s, num_tokens)
        for flags in (["--speed", "1"], ["--speed", "2"], ["--client-clock"]):
            flush(server)
            codes.append(minisgl.main(["replay", "drive", str(file), "--url", server.url, "--compare", *flags]))
            sys.stdout.write("\n")
            sys.stdout.flush()
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
