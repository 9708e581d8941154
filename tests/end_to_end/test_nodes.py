"""An engine on two machines, `--nnodes 2`: answers as on one, and goes on when a machine or the network dies.

The second machine is a network namespace of this one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.checkpoints import TEXT, make_checkpoint
from support.redis_servers import find_servers, running_server
from support.servers import ROOT, Command, Server, eventually, free_port, is_alive, run_command, serve
from support.streams import Stream, assert_nothing_is_left, events_of
from support.tool import Tool

from pipeline.events import Finished
from pipeline.names import GENERATE


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace, and both ends of its cable."""

    name: str
    here: str
    """The address of this machine's end."""
    there: str

    @property
    def program(self) -> Sequence[str]:
        """What runs a command in it."""
        return ("ip", "netns", "exec", self.name)

    def pull(self) -> None:
        """Take the cable out: packets are lost, and no connection breaks."""
        _ip("link", "set", self.name, "down")

    def plug(self) -> None:
        """Put it in again."""
        _ip("link", "set", self.name, "up")


@contextlib.contextmanager
def namespace() -> Iterator[Namespace]:
    """Make a namespace until the block ends. Where that is not possible, the test is skipped."""
    number = os.getpid() % 250
    made = Namespace(f"minisgl{number}", f"10.213.{number}.1", f"10.213.{number}.2")
    inside = ("-n", made.name)
    try:
        try:
            _ip("netns", "add", made.name)
            _ip("link", "add", made.name, "type", "veth", "peer", "name", "eth0", "netns", made.name)
            _ip("address", "add", f"{made.here}/30", "dev", made.name)
            _ip(*inside, "address", "add", f"{made.there}/30", "dev", "eth0")
            made.plug()
            for device in ("lo", "eth0"):
                _ip(*inside, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
            pytest.skip(f"no network namespace can be made here: {said}")
        yield made
    finally:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):  # the cable goes with it
            _ip("netns", "delete", made.name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


pytestmark = [pytest.mark.night, pytest.mark.slow, pytest.mark.xdist_group("nodes")]

FLAGS = ("--dtype", "float32", "--max-prefill-length", "64", "--page-size", "16", "--tp", "4")
NODES = ("--nnodes", "2", "--group", "far.and-near")
FEWER_PAGES = 90
"""Those of the far machine."""
LEASE_S = 3.0
NUM_STREAMS = 8


@dataclass
class Far:
    """The second machine."""

    place: Namespace
    model: Path
    folder: Path
    redis_url: str
    commands: list[Command] = field(default_factory=list)

    def start(self, *more: str) -> Command:
        """Start its ranks."""
        flags = [*FLAGS, *NODES, "--node-rank", "1", "--redis-url", self.redis_url]
        flags += more or ["--model", str(self.model), "--num-pages", str(FEWER_PAGES)]
        program = (*self.place.program, sys.executable, str(ROOT / "minisgl.py"))
        self.commands.append(run_command(["stage", "generate", *flags], self.folder, program=program))
        return self.commands[-1]

    def ranks(self) -> list[psutil.Process]:
        """Return its ranks that live."""
        return [process for command in self.commands for process in command.workers(GENERATE) if is_alive(process)]


@pytest.fixture(scope="module")
def far(llama3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Far]:
    folder = tmp_path_factory.mktemp("far")
    with namespace() as place, contextlib.ExitStack() as stack:
        port = free_port()
        listens = ("--port", port, "--bind", place.here, "--protected-mode", "no")
        stack.enter_context(running_server(find_servers()["embedded"], folder, *listens))
        far = Far(place, llama3, folder / "far", f"redis://{place.here}:{port}/0")
        yield far
        for command in far.commands:
            command.stop()


@pytest.fixture(scope="module")
def server(far: Far, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The head, on this machine."""
    far.start()
    flags = ("--model", str(far.model), *FLAGS, *NODES, "--node-rank", "0")
    with serve(tmp_path_factory.mktemp("head"), *flags, redis_url=far.redis_url) as server:
        yield server
        assert server.command.stop(signal.SIGINT) == 0


def answers(server: Server) -> list[list[int]]:
    """Return the tokens that prompts of many lengths get, all at once."""
    fields = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def ask(length: int) -> list[int]:
        answer = server.ask("/v1/completions", {"prompt": TEXT[:length], **fields})
        token_ids: list[int] = answer["choices"][0]["token_ids"]
        return token_ids

    lengths = range(3, 243, 20)
    with ThreadPoolExecutor(len(lengths)) as threads:
        return list(threads.map(ask, lengths))


def phases(server: Server) -> dict[str, Any]:
    """Return what /ready says of the ranks."""
    stages = httpx.get(f"{server.url}/ready").json()["stages"]
    return {name: each for name, each in stages.items() if name.startswith("rank")}


def test_two_machines_answer_as_one(server: Server, far: Far, tmp_path: Path) -> None:
    found = answers(server)
    with serve(tmp_path, "--model", str(far.model), *FLAGS, "--num-pages", str(FEWER_PAGES)) as one:
        assert answers(one) == found


def test_the_ranks_of_both_machines_are_shown_and_have_the_fewest_pages_of_all(
    server: Server, far: Far, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {name: each["phase"] for name, each in phases(server).items()} == {
        f"rank-{rank}": "ready" for rank in range(4)
    }
    slots = Tool("top --once", far.redis_url, capsys).json()["slots"]
    shown = {slot["slot"] for slot in slots if slot["phase"] == "ready"}
    assert {"generate-0", *(f"rank-{rank}-0" for rank in range(4))} <= shown
    for command in (server.command, far.commands[0]):
        loaded = command.log_lines("engine_loaded")
        assert [line["pages"] for line in loaded] == [FEWER_PAGES] * 2


def listens(process: psutil.Process) -> set[str]:
    """Return the addresses at which anybody in the namespace of *process* listens. psutil knows only our own."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process.pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                address = bytes.fromhex(local.partition(":")[0])
                found.add(socket.inet_ntoa(address[::-1]) if name == "tcp" else address.hex())
    return found


def test_ranks_listen_at_the_address_that_reaches_redis_alone(server: Server, far: Far) -> None:
    for process in server.command.workers(GENERATE):
        here = [each.laddr.ip for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
        assert set(here) == {far.place.here}
    assert listens(far.ranks()[0]) == {far.place.there}


def test_a_second_machine_with_the_same_number_is_refused_in_one_line(server: Server, far: Far) -> None:
    second = far.start()
    assert second.process.wait(60) == 2
    assert "--node-rank" in second.output  # rank 2 or 3 is first
    assert phases(server)["rank-2"]["phase"] == "ready"


@contextlib.contextmanager
def undisturbed(server: Server) -> Iterator[list[Stream]]:
    """Give streams that have begun. After the block they end with the answers that others got before them."""
    prompts = [f"Story {index}." for index in range(NUM_STREAMS)]
    expected = [stream.answer for stream in [Stream(server, prompt, max_tokens=200) for prompt in prompts]]
    streams = [stream.begun() for stream in [Stream(server, prompt, max_tokens=200) for prompt in prompts]]
    yield streams
    assert [stream.answer for stream in streams] == expected
    with server.log() as log:
        assert all(isinstance(events_of(log, stream.uid)[-1], Finished) for stream in streams)
        assert_nothing_is_left(log)


def seconds_until_it_ends(rank_0: psutil.Process) -> float:
    began_s = time.monotonic()
    eventually(lambda: not is_alive(rank_0), "rank 0 ends")
    return time.monotonic() - began_s


def rank_0_of(server: Server) -> psutil.Process:
    return next(each for each in server.command.workers(GENERATE) if each.cmdline()[-2:] == ["--rank", "0"])


def test_the_death_of_a_machine_is_noticed_within_a_second_and_another_takes_its_place(
    server: Server, far: Far, tmp_path: Path
) -> None:
    with undisturbed(server):
        rank_0 = rank_0_of(server)
        for process in far.commands[0].processes():
            process.kill()
        assert seconds_until_it_ends(rank_0) < 1.0
        missing = "rank-2 (missing for 2 s)"
        eventually(lambda: missing in phases(server).get("rank-0", {}).get("detail", ""), "it is named")

        other = make_checkpoint(tmp_path / "other", "llama3", seed=7)
        differs = far.start("--model", str(other))
        assert differs.process.wait(60) == 2
        said = differs.output
        assert "rank 2 has the fingerprint" in said or "rank 3 has the fingerprint" in said
        assert "but rank 0 has" in said and phases(server)["rank-0"]["phase"] == "waiting"
        far.start()


def test_a_pulled_cable_is_noticed_within_the_lease_and_two_seconds(server: Server, far: Far) -> None:
    with undisturbed(server):
        rank_0, ranks = rank_0_of(server), far.ranks()
        far.place.pull()
        assert seconds_until_it_ends(rank_0) < LEASE_S + 2
        assert all(map(is_alive, ranks)), "the other machine notices nothing yet"
        far.place.plug()
        eventually(lambda: not any(map(is_alive, ranks)), "the ranks of the old start end")


def test_a_machine_that_is_stopped_leaves_at_once_and_the_others_wait(server: Server, far: Far) -> None:
    command = far.commands[-1]
    began_s = time.monotonic()
    assert command.stop() == 0
    assert time.monotonic() - began_s < 5 and not command.log_lines("worker_killed")
    waiting = "rank-2 (missing for 1 s), rank-3 (missing for 1 s)"
    eventually(lambda: phases(server).get("rank-0", {}).get("detail", "") == waiting, "the head waits")
