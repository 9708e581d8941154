"""Several owners on one server, with two engines and two frontends: turns, weights, usage. All is killed, and the usage
is what clients and histories counted.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.selection import by_night
from support.servers import Server, eventually, free_port, run_command, serve, wait_until_ready

from pipeline.events import Admitted, AnyEvent, Failed, Finished, Submitted, Tokenized, decode
from pipeline.log.protocol import Used
from pipeline.log.redis import RedisLog
from pipeline.names import PROBE, base_uid

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ANN, BOB, CARL, ADMIN = "sk-ann", "sk-bob", "sk-carl", "sk-admin"
LIMITS = f"""
[[key]]
name = "ann"
key = "{ANN}"
[[key]]
name = "bob"
key = "{BOB}"
[[key]]
name = "carl"
key = "{CARL}"
weight = 3
"""
FLOOD = 200
TOKENS = 100
ROUNDS = by_night(2, 8)
"""How often all is killed."""


def limits_file(folder: Path) -> str:
    path = folder / "limits.toml"
    path.write_text(LIMITS)
    return str(path)


def clients() -> httpx.Client:
    return httpx.Client(timeout=120, limits=httpx.Limits(max_connections=1000))


def ask(http: httpx.Client, server: Server, key: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    asked = {"prompt": "Hello!", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, **body}
    return http.post(f"{server.url}/v1/completions", json=asked, headers=headers)


def usage_of(server: Server, key: str) -> dict[str, Used]:
    """Return owner -> usage of all days and models, as a key sees it."""
    answer = httpx.get(f"{server.url}/v1/usage?days=2", headers={"authorization": f"Bearer {key}"}).json()
    found: dict[str, Used] = {}
    for row in answer["data"]:
        one = Used(**{name: row[name] for name in Used._fields})
        found[row["owner"]] = Used(*map(sum, zip(found.get(row["owner"], Used()), one, strict=True)))
    return found


def histories(log: RedisLog) -> dict[str, list[AnyEvent]]:
    """Return the events of all requests but probes."""
    uids, cursor = set[str](), ""
    while cursor != "0":
        cursor, some = log.requests(cursor or "0", 1000)
        uids |= set(some)
    read = zip(sorted(uids), log.histories(sorted(uids)), strict=True)
    found = {uid: [decode(entry.fields) for entry in entries] for uid, entries in read if entries}
    return {uid: events for uid, events in found.items() if getattr(events[0], "endpoint", PROBE) != PROBE}


def admitted_ms(events: list[AnyEvent]) -> int:
    return next(event.ms for event in events if isinstance(event, Admitted))


@contextlib.contextmanager
def served(folder: Path, *flags: str) -> Iterator[tuple[Server, Server]]:
    """Give a server with two engines, and a second frontend of it."""
    keys = ("--limits", limits_file(folder), "--admin-key", ADMIN, "--max-queued-requests", "2000")
    with serve(folder, "--dp", "2", *keys, *flags) as server:
        port = str(free_port())
        line = ["stage", "web", "--redis-url", server.redis_url, "--port", port, *keys]
        command = run_command(line, folder)
        second = Server(command, f"http://127.0.0.1:{port}", server.redis_url)
        try:
            wait_until_ready(second.url, [command])
            yield server, second
        finally:
            command.stop()


@pytest.fixture(scope="module")
def frontends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    with served(tmp_path_factory.mktemp("people"), "--max-running-requests", "2") as frontends:
        yield frontends


@contextlib.contextmanager
def flood(server: Server, key: str, count: int, **body: Any) -> Iterator[list[Any]]:
    """Send *count* requests at once; give the answers to be."""
    with clients() as http, ThreadPoolExecutor(count) as threads:
        yield [threads.submit(ask, http, server, key, **body) for _ in range(count)]


def test_one_owner_floods_and_the_request_of_another_is_the_next_that_an_engine_takes(
    frontends: tuple[Server, Server],
) -> None:
    server, second = frontends
    before = usage_of(server, ADMIN)
    with server.log() as log:
        with clients() as http, flood(server, ANN, FLOOD) as flooding:
            eventually(lambda: log.snapshot().occupancy.tokenized.lag > FLOOD // 2, "they wait")
            answers = [ask(http, second, BOB) for _ in range(5)]
            assert sum(not each.done() for each in flooding) > FLOOD // 4, "bob did not wait for all of them"
        assert all(answer.status_code == 200 for answer in [*answers, *(each.result() for each in flooding)])
        lived = histories(log)
        of_ann = [admitted_ms(events) for events in lived.values() if owner(events) == "ann"]
        for answer in answers:
            events = lived[answer.headers["x-minisgl-uid"]]
            came_ms = next(event.ms for event in events if isinstance(event, Tokenized))
            between = sum(came_ms < ms < admitted_ms(events) for ms in of_ann)
            assert between <= 4, "each of the two engines may have taken two before"
    after = usage_of(server, ADMIN)
    for name, count in (("ann", FLOOD), ("bob", 5)):
        mine = [each.json()["usage"] for each in ([*answers] if name == "bob" else [one.result() for one in flooding])]
        used = Used(*(b - a for a, b in zip(before.get(name, Used()), after[name], strict=True)))
        assert (used.requests, used.failed) == (count, 0)
        assert used.prompt_tokens == sum(each["prompt_tokens"] for each in mine)
        assert used.output_tokens == sum(each["completion_tokens"] for each in mine) == TOKENS * count
    assert usage_of(second, BOB).keys() == {"bob"}


@pytest.mark.night
def test_two_owners_that_flood_are_served_by_their_weights(frontends: tuple[Server, Server]) -> None:
    server, second = frontends
    with server.log() as log:
        known = set(histories(log))
        with flood(server, ANN, 60) as of_ann, flood(second, CARL, 120) as of_carl:
            eventually(lambda: log.snapshot().occupancy.tokenized.lag > 100, "they wait")
        assert all(each.result().status_code == 200 for each in [*of_ann, *of_carl])
        lived = {uid: events for uid, events in histories(log).items() if uid not in known}
    both_wait_ms = max(events[1].ms for events in lived.values())
    order = sorted((admitted_ms(events), owner(events)) for events in lived.values())
    shares = Counter(name for ms, name in order if ms > both_wait_ms)
    while shares["ann"] and shares["carl"] and order[-1][1] == order[-2][1]:  # who is left alone at the end
        shares[order.pop()[1]] -= 1
    assert shares.total() >= 40
    assert shares["ann"] / shares.total() == pytest.approx(0.25, abs=0.06)


def keys(folder: Path, *words: str) -> str:
    """Run `minisgl keys`; return the key that it prints."""
    command = [sys.executable, str(ROOT / "minisgl.py"), "keys", *words, "--limits", str(folder / "limits.toml")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_keys_are_limited_rotated_expired_and_revoked_at_two_frontends_while_they_run(
    frontends: tuple[Server, Server],
) -> None:
    folder = frontends[0].command.output_file.parent
    file = folder / "limits.toml"

    def statuses(key: str) -> set[int]:
        headers = {"authorization": f"Bearer {key}"}
        return {httpx.get(f"{each.url}/v1/models", headers=headers).status_code for each in frontends}

    key = keys(folder, "add", "dora", "--limit", "requests_per_minute=3")
    eventually(lambda: statuses(key) == {200}, "both read the new key", 3)
    with clients() as http:
        answers = [ask(http, frontends[number % 2], key, max_tokens=1) for number in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert 1 <= int(answers[3].headers["retry-after"]) <= 20
        file.write_text(f"{file.read_text()}\n[[key\n")
        eventually(lambda: all(each.command.log_lines("limits_not_read") for each in frontends), "both say so", 3)
        assert statuses(key) == {200}, "a broken file changes nothing"
        file.write_text(file.read_text().removesuffix("\n[[key\n"))
        newer = keys(folder, "rotate", "dora")
        eventually(lambda: statuses(newer) == {200} and statuses(key) == {401}, "both rotate it", 3)
        assert ask(http, frontends[1], newer, max_tokens=1).status_code == 429, "it has the limits of its owner"
        brief = keys(folder, "add", "eve", "--expires", "4s")
        eventually(lambda: statuses(brief) == {200}, "both read it", 3)
        url, headers = f"{frontends[0].url}/v1/completions", {"authorization": f"Bearer {brief}"}
        asked = {"prompt": "Hello!", "max_tokens": 4000, "n": 16, "ignore_eos": True, "stream": True}
        with http.stream("POST", url, json=asked, headers=headers) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data:")
            eventually(lambda: statuses(brief) == {401}, "it expires", 6)
            assert next(line for line in lines if line).startswith("data: {"), "what runs goes on"
            keys(folder, "revoke", "eve")
            began_s = time.monotonic()
            assert "was revoked" in "".join(lines)
            assert time.monotonic() - began_s < 5


def owner(events: list[AnyEvent]) -> str:
    assert isinstance(events[0], Submitted)
    return events[0].owner


class Clients:
    """Clients of all kinds, who note the usage that they were told."""

    def __init__(self, servers: tuple[Server, Server], seed: int) -> None:
        self._servers = servers
        self._chance = random.Random(seed)
        self.told: dict[str, dict[str, int]] = {}
        self._http = clients()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(6)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(130)
        self._http.close()

    def _run(self, number: int) -> None:
        chance = random.Random(self._chance.random() + number)
        while not self._stop.is_set():
            with contextlib.suppress(httpx.TransportError, json.JSONDecodeError):
                self._one(chance, chance.choice([ANN, BOB, CARL]))

    def _one(self, chance: random.Random, key: str) -> None:
        server = chance.choice(self._servers)
        headers = {"authorization": f"Bearer {key}"}
        body: dict[str, Any] = {"prompt": "Hello!", "max_tokens": chance.randint(1, 60), "ignore_eos": True}
        match chance.choice(["plain", "plain", "several", "leaves", "fails", "background"]):
            case "plain":
                self._note(ask(self._http, server, key, **body))
            case "several":
                self._note(ask(self._http, server, key, **body | {"prompt": ["Hello!", "Who?"], "n": 4}))
            case "leaves":
                asked = body | {"stream": True, "max_tokens": 400}
                url = f"{server.url}/v1/completions"
                with self._http.stream("POST", url, json=asked, headers=headers, timeout=60) as response:
                    for _, _ in zip(response.iter_lines(), range(chance.randint(1, 9)), strict=False):
                        pass
            case "fails":
                ask(self._http, server, key, prompt="Hello! " * 3000)
            case "background":
                asked = {"input": "Hello!", "max_output_tokens": 30, "background": True, "store": True}
                self._http.post(f"{server.url}/v1/responses", json=asked, headers=headers, timeout=60)

    def _note(self, response: httpx.Response) -> None:
        if response.status_code == 200:
            self.told[response.headers["x-minisgl-uid"]] = response.json()["usage"]


@pytest.mark.night
def test_the_usage_is_what_clients_and_histories_counted_although_all_is_killed(tmp_path: Path) -> None:
    chance = random.Random(7)
    told: dict[str, dict[str, int]] = {}
    lived: dict[str, list[AnyEvent]] = {}
    """Of all requests: the log keeps refused ones for a minute."""
    for number in range(ROUNDS + 1):
        with served(tmp_path) as (server, second), server.log() as log:
            if number:
                lived |= histories(log)
            some = Clients((server, second), number)
            time.sleep(chance.uniform(0.5, 4))
            if number < ROUNDS:
                for process in [*server.command.processes(), *second.command.processes()]:
                    with contextlib.suppress(psutil.Error):
                        process.send_signal(signal.SIGKILL)
            some.stop()
            told |= some.told
            if number == ROUNDS:
                eventually(lambda log=log: not log.living(), "all have ended", 100)  # type: ignore[misc]
                assert_usage(lived | histories(log), usage_of(server, ADMIN), told)


def assert_usage(lived: dict[str, list[AnyEvent]], usage: dict[str, Used], told: dict[str, dict[str, int]]) -> None:
    expected: dict[str, Used] = {}
    of_base: dict[str, list[int]] = {}
    for uid, events in lived.items():
        submitted, end = events[0], events[-1]
        assert isinstance(submitted, Submitted)
        index = int(uid.partition(".")[2] or 0)
        admitted = next((event for event in events if isinstance(event, Admitted)), None)
        has_prompt = admitted is not None and index % max(submitted.presentation.choices, 1) == 0
        prompt, cached = (admitted.prompt_tokens, admitted.cached_tokens) if admitted and has_prompt else (0, 0)
        one = Used(1, isinstance(end, Failed), prompt, cached, int(getattr(end, "n", 0)))
        before = expected.get(submitted.owner, Used())
        expected[submitted.owner] = Used(*map(sum, zip(before, one, strict=True)))
        if isinstance(end, Finished):
            of_base.setdefault(base_uid(uid), [0, 0])
            of_base[base_uid(uid)][0] += prompt
            of_base[base_uid(uid)][1] += one.output_tokens
    assert usage == expected
    assert sum(used.failed for used in usage.values()) and len(told) > 20
    for uid, counted in told.items():
        assert of_base[uid] == [counted["prompt_tokens"], counted["completion_tokens"]], uid
