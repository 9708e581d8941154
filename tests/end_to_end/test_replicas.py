"""Several tokenizers share the work, wherever they were started, and do each other's when one dies."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from support.servers import Command, Server, eventually, run_command, serve

from ops.bench.models import NONSENSE_ID
from pipeline.events import Finished, Submitted, Tokenized, decode
from pipeline.log.protocol import Entry, Inbox
from pipeline.log.redis import RedisLog
from pipeline.names import TOKENIZE
from pipeline.stage.slots import read_statuses

pytestmark = [pytest.mark.slow, pytest.mark.night]  # by day test_start_lines.py has two

NUM_REQUESTS = 150
NUM_CLIENTS = 4
"""Requests on their way at a time. With so few a tokenizer waits for each, and it goes to who has waited longest; in a
burst it is the operating system that decides who comes to read next, and reads up to eight."""
BURST = 32
NUM_TOKENIZERS = 3


@dataclass(frozen=True)
class Deployment:
    """A server, and every command that runs a tokenizer for it."""

    server: Server
    commands: Sequence[Command]

    def tokenizers(self) -> list[tuple[Command, psutil.Process]]:
        return [(command, worker) for command in self.commands for worker in command.workers(TOKENIZE)]


def _num_ready(log: RedisLog) -> int:
    return sum(status.phase == "ready" for status in read_statuses(log, TOKENIZE))


@contextlib.contextmanager
def started_together(folder: Path) -> Iterator[Deployment]:
    """`serve --tokenizers 3`."""
    with serve(folder, "--tokenizers", str(NUM_TOKENIZERS)) as server:
        yield Deployment(server, [server.command])


@contextlib.contextmanager
def started_apart(folder: Path) -> Iterator[Deployment]:
    """`serve --tokenizers 1` and `stage tokenize --replicas 2`, which knows nothing of the other but its Redis."""
    with serve(folder, "--tokenizers", "1") as server:
        model = folder / "models" / NONSENSE_ID
        arguments = ["stage", "tokenize", "--replicas", "2", "--redis-url", server.redis_url, "--model", str(model)]
        stage = run_command(arguments, folder)
        try:
            yield Deployment(server, [server.command, stage])
            assert stage.stop() == 0
        finally:
            stage.stop()


@pytest.fixture(scope="module", params=[started_apart, started_together], ids=lambda start: start.__name__)
def deployment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    start: Callable[[Path], contextlib.AbstractContextManager[Deployment]] = request.param
    with start(tmp_path_factory.mktemp("replicas")) as deployment, deployment.server.log() as log:
        eventually(lambda: _num_ready(log) == NUM_TOKENIZERS, "all tokenizers are ready")
        yield deployment


@contextlib.contextmanager
def asked(server: Server, num_clients: int) -> Iterator[list[Future[httpx.Response]]]:
    """Give the answers to be of all requests, of which *num_clients* are on their way at a time."""
    with httpx.Client(timeout=120) as client, ThreadPoolExecutor(num_clients) as clients:

        def ask(number: int) -> httpx.Response:
            body = {"prompt": f"Request number {number}.", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
            return client.post(f"{server.url}/v1/chat/completions", json=body)

        yield [clients.submit(ask, number) for number in range(NUM_REQUESTS)]


def tokenized_by(log: RedisLog, answers: Sequence[httpx.Response]) -> dict[str, str]:
    """Return uid -> the consumer that tokenized it, as its history says; each was answered, and ended once."""
    assert [answer.status_code for answer in answers] == [200] * NUM_REQUESTS
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {2}
    uids = [answer.headers["x-minisgl-uid"] for answer in answers]
    assert len(set(uids)) == NUM_REQUESTS
    said: dict[str, str] = {}
    for uid, history in zip(uids, log.histories(uids), strict=True):
        first, second, *_, last = [decode(entry.fields) for entry in history]
        assert isinstance(first, Submitted) and isinstance(second, Tokenized) and isinstance(last, Finished)
        said[uid] = second.by
    return said


def test_each_tokenizer_takes_its_share(deployment: Deployment) -> None:
    with deployment.server.log() as log, asked(deployment.server, NUM_CLIENTS) as coming:
        by = tokenized_by(log, [answer.result() for answer in coming])
        taken = Counter(by.values())
    assert sorted(taken) == [f"tokenize-{index}" for index in range(NUM_TOKENIZERS)]
    assert min(taken.values()) >= 0.1 * NUM_REQUESTS, taken


def test_what_a_killed_tokenizer_had_read_and_not_committed_is_tokenized_all_the_same(deployment: Deployment) -> None:
    command, victim = deployment.tokenizers()[-1]
    with deployment.server.log() as log:
        (slot,) = [status.slot for status in read_statuses(log, TOKENIZE) if status.pid == victim.pid]
        victim.suspend()
        with asked(deployment.server, BURST) as coming:
            eventually(lambda: bool(_in_hand(log, slot)), f"{slot} has read and not committed")
            in_hand = _in_hand(log, slot)
            victim.kill()
            answers = [answer.result() for answer in coming]
        by = tokenized_by(log, answers)
        assert in_hand and {entry.fields["uid"] for entry in in_hand} <= set(by)
        eventually(lambda: len(command.log_lines("worker_died")) > 0, "the supervisor notices")
        eventually(lambda: _num_ready(log) == NUM_TOKENIZERS, "all tokenizers are ready again")
        assert log.backlog(Inbox.submitted(log.names)) == 0


def _in_hand(log: RedisLog, slot: str) -> list[Entry]:
    """Return what a stopped worker has read: who waits in XREADGROUP then is handed the next entries all the same."""
    return log.pending(Inbox.submitted(log.names), slot)
