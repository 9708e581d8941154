"""Deploy docker/stack.yaml on three nodes on this machine, and let nodes and links die under 20 streams.

    docker build -f docker/Dockerfile -t minisgl .; docker pull redis:8; docker save minisgl redis:8 -o images.tar
    sudo python3 tests/docker/swarm.py images.tar [kill cut update scale redis ..]

Each node is a dockerd in a network namespace of its own, joined by a bridge. Needs root, Docker 20.10 or newer and
iproute2. Standard library only. It ends with a sentence if a stream does not end once, with the text of an undisturbed
one. What the nodes keep on disk stays in --folder.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAME = "minisgl"
PORT = 1919
NETWORK = "192.168.77"
USERS = ("web", "tokenize", "generate", "detokenize", "operator")
WORKERS = ("tokenize", "generate", "detokenize")
NUM_CLIENTS = 20
KEY = "swarm-trial"
SETTINGS = {"MINISGL_API_KEY": KEY, "MINISGL_DTYPE": "float32", "MINISGL_THREADS": "1"}
"""In float32 any engine continues a request with the same text."""
PATIENCE_S = 120.0
SILENT_S = (2, 1, 3)
"""TCP keepalive of a client: idle time, interval and number of probes. It notices a dead machine after 5 s."""


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


def run(*words: str, may_fail: bool = False, stdin: str = "") -> str:
    ended = subprocess.run(words, text=True, input=stdin, capture_output=True, check=False)
    if ended.returncode and not may_fail:
        raise SystemExit(f"{' '.join(words)}: ended with {ended.returncode}: {ended.stdout}{ended.stderr}")
    return ended.stdout.strip()


def eventually(is_so: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> float:
    """Wait until *is_so*; return how long that took, in seconds."""
    began_s = time.monotonic()
    while not is_so():
        if time.monotonic() - began_s > patience_s:
            raise SystemExit(f"not so after {patience_s:.0f} s: {what}")
        time.sleep(0.2)
    return time.monotonic() - began_s


class Node:
    """A machine of the swarm: a dockerd with a network namespace, a host name and folders of its own."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name = f"{NAME}-{number}"
        self.address = f"{NETWORK}.{10 + number}"
        self._link = f"{NAME}{number}"  # here; its other end is the namespace's eth0
        self._folder = folder / self.name
        self._process: subprocess.Popen[bytes] | None = None

    def plug_in(self) -> None:
        """Make the namespace and the link."""
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        run("ip", "link", "set", self._link, "master", NAME, "up")
        for words in (f"addr add {self.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            run("ip", "-n", self.name, *words.split())
        run("ip", "-n", self.name, "route", "add", "default", "via", f"{NETWORK}.1")

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "pid").unlink(missing_ok=True)
        command = ["nsenter", f"--net=/run/netns/{self.name}", "unshare", "--uts", "sh", "-c"]
        command += ['hostname "$0"; exec dockerd "$@"', self.name, "-H", f"unix://{self._folder}/docker.sock"]
        command += ["--data-root", f"{self._folder}/data", "--exec-root", f"{self._folder}/exec"]
        command += ["--pidfile", f"{self._folder}/pid"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        eventually(
            lambda: self.docker("version", "-f", "{{.Server.Version}}", may_fail=True), f"{self.name} answers", 60
        )

    def docker(self, *words: str, may_fail: bool = False, stdin: str = "") -> str:
        return run("docker", "-H", f"unix://{self._folder}/docker.sock", *words, may_fail=may_fail, stdin=stdin)

    def link(self, way: str) -> None:
        """Cut the link ("down"), or join it again ("up")."""
        run("ip", "link", "set", self._link, way)

    def lose_power(self) -> None:
        """Cut the link and kill dockerd, its containerd and all containers at once. Nobody hears a last word."""
        self.link("down")
        parents, ours = {}, set()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has just ended
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if f"{self._folder}/exec" in (folder / "cmdline").read_text():  # dockerd, containerd, shims
                    ours.add(int(folder.name))
        while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
            ours |= more
        for pid in ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    def clear(self) -> None:
        """Leave the swarm of an earlier run, and forget its containers and data."""
        self.docker("swarm", "leave", "--force", may_fail=True)
        self.docker("system", "prune", "-f", "--volumes")
        self.docker("volume", "rm", "-f", f"{NAME}_redis", f"{NAME}_models")

    def stop(self) -> None:
        """Leave the swarm, end dockerd, and remove namespace and link."""
        self.docker("swarm", "leave", "--force", may_fail=True)
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
            self.lose_power()  # what is left
        for _, place, *_ in map(str.split, Path("/proc/mounts").read_text().splitlines()):
            if place.startswith(f"{self._folder}/"):
                run("umount", "-l", place, may_fail=True)
        run("ip", "netns", "del", self.name, may_fail=True)
        run("ip", "link", "del", self._link, may_fail=True)


class Swarm:
    """Three nodes with the stack, each with a web process. The first one is manager and has Redis."""

    def __init__(self, folder: Path, images: Path) -> None:
        self.nodes = [Node(number, folder) for number in (1, 2, 3)]
        self._images = images
        self.docker = self.nodes[0].docker

    def start(self) -> None:
        run("ip", "link", "add", NAME, "type", "bridge")
        run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", NAME)
        run("ip", "link", "set", NAME, "up")
        for node in self.nodes:
            node.plug_in()
            node.start()
            node.clear()
            node.docker("load", "-q", "-i", str(self._images))
        self.docker("swarm", "init", "--advertise-addr", self.nodes[0].address)
        token = self.docker("swarm", "join-token", "-q", "worker")
        for node in self.nodes[1:]:
            node.docker("swarm", "join", "--token", token, f"{self.nodes[0].address}:2377")
        for node in self.nodes:
            self.docker("node", "update", "--label-add", "minisgl.web=true", node.name)
        self.docker("node", "update", "--label-add", "minisgl.redis=true", self.nodes[0].name)
        for user in USERS:
            self.docker("secret", "create", f"minisgl-{user}", "-", stdin=secrets.token_hex(32))
        os.environ |= SETTINGS
        self.docker("stack", "deploy", "--resolve-image", "never", "-c", str(ROOT / "docker/stack.yaml"), NAME)

    def stop(self) -> None:
        for node in self.nodes[::-1]:
            node.stop()
        run("ip", "link", "del", NAME, may_fail=True)

    def tasks(self) -> list[tuple[str, str, str]]:
        """Return service, node and state of each task that should run."""
        shown = "{{.Name}}|{{.Node}}|{{.CurrentState}}"
        lines = self.docker("stack", "ps", "-f", "desired-state=running", "--format", shown, NAME).splitlines()
        found = (line.split("|") for line in lines)
        return [(name.partition("_")[2].partition(".")[0], node, state.split()[0]) for name, node, state in found]

    def runs(self, num_engines: int = 2, without: Node | None = None) -> bool:
        """Whether all tasks run, on nodes that are ready; *without* a node that is away."""
        states = dict(
            line.split() for line in self.docker("node", "ls", "--format", "{{.Hostname}} {{.Status}}").splitlines()
        )
        away = {without.name} if without else set()
        tasks = self.tasks()
        services = [service for service, _, _ in tasks]
        wanted = {"redis": 1, "operator": 1, "web": len(self.nodes) - len(away), "generate": num_engines}
        wanted |= {"tokenize": 2, "detokenize": 2}
        return (
            all(states[node.name] == "Ready" or node.name in away for node in self.nodes)
            and all(services.count(service) == count for service, count in wanted.items())
            and all(state == "Running" and node not in away for _, node, state in tasks)
        )

    def spread(self) -> None:
        """Start the workers again, spread over all nodes that are there."""
        for service in WORKERS:
            self.docker("service", "update", "-q", "--force", f"{NAME}_{service}")
        eventually(self.runs, "all tasks run")


@dataclass
class Client:
    """Sends one request after the other, and continues each of them over as many connections as that takes."""

    number: int
    whole: str = ""
    """The text without a disturbance."""
    num_ended: int = 0
    num_reconnects: int = 0
    longest_pause_s: float = 0.0
    heard: threading.Event = field(default_factory=threading.Event)
    wrong: str = ""

    def go_on(self, addresses: Sequence[str], enough: threading.Event) -> None:
        while not self.wrong and not (self.num_ended and enough.is_set()):
            try:
                uid, text = self.ask(addresses)
                if self.whole and text != self.whole:
                    self.wrong = (
                        f"{uid}: its text of {len(text)} characters is another than the {len(self.whole)} expected"
                    )
                self.whole = self.whole or text
                self.num_ended += 1
            except ValueError as error:
                self.wrong = str(error)

    def ask(self, addresses: Sequence[str]) -> tuple[str, str]:
        """Return uid and text of one request. Raises ValueError if it does not end well."""
        question = {"role": "user", "content": f"Count from {self.number + 1} to 400."}
        body = {"messages": [question], "max_tokens": 600 + 45 * self.number}
        body |= {"ignore_eos": True, "temperature": 0, "stream": True}
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        key = secrets.token_hex(16)
        uid = last_id = text = ""
        began_s = heard_s = time.monotonic()
        for number in itertools.count(self.number):
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = _connect(addresses[number % len(addresses)])
                with contextlib.closing(connection):
                    if uid:
                        resumed = {"last-event-id": last_id} if last_id else {}
                        connection.request("GET", f"/v1/requests/{uid}/events", headers=headers | resumed)
                    else:
                        asked = {"idempotency-key": key, "x-minisgl-event-ids": "1"}
                        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers | asked)
                    answer = connection.getresponse()
                    if answer.status < 500:
                        if answer.status != 200:
                            raise ValueError(f"{uid or 'a new request'}: {answer.status} {answer.read(300)!r}")
                        uid = answer.headers["x-minisgl-uid"]
                        for frame_id, content, is_end in _frames(answer):
                            if content:
                                self.longest_pause_s = max(self.longest_pause_s, time.monotonic() - heard_s)
                                heard_s = time.monotonic()
                                self.heard.set()
                            text, last_id = text + content, frame_id
                            if is_end:
                                return uid, text
            self.num_reconnects += 1
            if time.monotonic() - began_s > PATIENCE_S:
                raise ValueError(f"{uid or 'a new request'}: not ended after {PATIENCE_S:.0f} s")
            time.sleep(0.5)
        raise AssertionError


def _connect(address: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(address, PORT, timeout=5)
    connection.connect()
    idle_s, interval_s, count = SILENT_S
    for option, value in (
        (socket.TCP_KEEPIDLE, idle_s),
        (socket.TCP_KEEPINTVL, interval_s),
        (socket.TCP_KEEPCNT, count),
        (socket.TCP_USER_TIMEOUT, 1000 * (idle_s + interval_s * count)),
    ):
        connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.sock.settimeout(60)
    return connection


def _frames(answer: http.client.HTTPResponse) -> Iterator[tuple[str, str, bool]]:
    """Yield id, text and whether it is the end, for each frame with an id and for the end.

    What comes before an id belongs to it. Of a broken connection, the rest without an id comes again on the next one.
    """
    frame_id = content = ""
    for line in (raw.decode().rstrip("\n") for raw in answer):
        if line.startswith("id: "):
            frame_id = line[4:]
        elif line == "data: [DONE]":
            yield frame_id, content, True
            return
        elif line.startswith("data: "):
            chunk = json.loads(line[6:])
            if "error" in chunk:
                if chunk["error"].get("code") == "shutting_down":
                    return  # the web process; the request goes on
                raise ValueError(f"a stream ended with {chunk['error']}")
            content += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
        elif not line and frame_id:
            yield frame_id, content, False
            frame_id = content = ""


def trial(swarm: Swarm, clients: Sequence[Client], disturb: Callable[[Swarm], float]) -> tuple[str, ...]:
    """Disturb the swarm under the streams of all clients; return a row of the table."""
    enough = threading.Event()
    for client in clients:
        client.num_ended = client.num_reconnects = 0
        client.longest_pause_s = 0.0
        client.heard.clear()
    addresses = [node.address for node in swarm.nodes]
    threads = [threading.Thread(target=client.go_on, args=(addresses, enough), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    for client in clients:
        eventually(lambda client=client: client.heard.is_set() or client.wrong, "every stream has begun")  # type: ignore[misc]
    recovered_s = disturb(swarm)
    enough.set()
    deadline_s = time.monotonic() + PATIENCE_S
    for client, thread in zip(clients, threads, strict=True):
        thread.join(max(deadline_s - time.monotonic(), 0))
        if thread.is_alive():
            client.wrong = client.wrong or f"client {client.number}: its stream goes on after {PATIENCE_S:.0f} s"
    wrong = [client.wrong for client in clients if client.wrong]
    if wrong:
        raise SystemExit("\n".join(["a stream did not end once, with its whole text:", *wrong]))
    pauses_s = [client.longest_pause_s for client in clients]
    return (
        str(sum(client.num_ended for client in clients)),
        str(sum(client.num_reconnects for client in clients)),
        f"{statistics.median(pauses_s):.1f}",
        f"{max(pauses_s):.1f}",
        f"{recovered_s:.0f}",
    )


def nothing(_: Swarm) -> float:
    return 0.0


def kill(swarm: Swarm) -> float:
    """Let a node lose its power, and give it back once all runs on the others."""
    node = _with_engine(swarm)
    node.lose_power()
    recovered_s = eventually(lambda: swarm.runs(without=node), f"all tasks run without {node.name}")
    node.link("up")
    node.start()
    eventually(swarm.runs, f"{node.name} is back")
    return recovered_s


def redis(swarm: Swarm) -> float:
    """Let the node of Redis, which is the only manager, lose its power, and give it back after 10 s."""
    began_s = time.monotonic()
    swarm.nodes[0].lose_power()
    time.sleep(10)
    swarm.nodes[0].link("up")
    swarm.nodes[0].start()
    eventually(lambda: swarm.docker("stack", "ps", NAME, may_fail=True), "the manager leads again")
    eventually(swarm.runs, "all tasks run, also Redis")
    return time.monotonic() - began_s


def cut(swarm: Swarm) -> float:
    """Cut the link of a node for 15 s."""
    node = _with_engine(swarm)
    node.link("down")
    time.sleep(15)
    node.link("up")
    return 15 + eventually(swarm.runs, f"all tasks run, also on {node.name}")


def update(swarm: Swarm) -> float:
    """Replace the engines one by one, then the web processes."""
    began_s = time.monotonic()
    for service in ("generate", "web"):
        swarm.docker("service", "update", "-q", "--force", f"{NAME}_{service}")
    eventually(swarm.runs, "all tasks run")
    return time.monotonic() - began_s


def scale(swarm: Swarm) -> float:
    """From two engines to four, to one."""
    began_s = time.monotonic()
    for count in (4, 1):
        swarm.docker("service", "scale", "-d", f"{NAME}_generate={count}")
        eventually(lambda count=count: swarm.runs(count), f"{count} engines run")  # type: ignore[misc]
        time.sleep(2)
    scaled_s = time.monotonic() - began_s
    swarm.docker("service", "scale", "-d", f"{NAME}_generate=2")
    eventually(swarm.runs, "two engines run")
    return scaled_s


def _with_engine(swarm: Swarm) -> Node:
    """Return a node that runs an engine, and if possible a tokenizer, but not Redis."""
    while True:
        places = {(service, node) for service, node, _ in swarm.tasks()}
        found = [node for node in swarm.nodes[1:] if ("generate", node.name) in places]
        if found:
            return max(found, key=lambda node: ("tokenize", node.name) in places)
        swarm.spread()


TRIALS = {"nothing": nothing, "kill": kill, "cut": cut, "update": update, "scale": scale, "redis": redis}


def main() -> None:
    parser = argparse.ArgumentParser(description="Trials of docker/stack.yaml on three nodes on this machine.")
    parser.add_argument("images", type=Path, help="file of `docker save minisgl redis:8`")
    parser.add_argument("trials", nargs="*", default=list(TRIALS), metavar="trial", help=", ".join(TRIALS))
    parser.add_argument(
        "--folder", type=Path, default=Path("/var/tmp/minisgl-swarm"), help="data of the three dockerds"
    )
    parser.add_argument("--keep", action="store_true", help="at the end, leave the swarm running until Enter")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # after the clean-up
    swarm = Swarm(chosen.folder, chosen.images)
    clients = [Client(number) for number in range(NUM_CLIENTS)]
    head = ("trial", "streams ended", "reconnects", "longest pause: median s", "longest s", "all tasks run after s")
    rows = [head]
    try:
        swarm.start()
        say(f"all tasks run after {eventually(swarm.runs, 'all tasks run'):.0f} s")
        trial(swarm, clients, nothing)  # the texts to compare with
        for name in chosen.trials:
            rows.append((name, *trial(swarm, clients, TRIALS[name])))
            say("  ".join(f"{title}: {value}" for title, value in zip(head, rows[-1], strict=True)))
        print("\n".join("| " + " | ".join(row) + " |" for row in rows))
    finally:
        if chosen.keep:
            input("Press Enter to end the swarm. ")
        swarm.stop()


if __name__ == "__main__":
    main()
