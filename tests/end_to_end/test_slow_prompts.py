"""A real tokenizer under its supervisor, and requests that would keep it for minutes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.redis_servers import running_server, until
from support.servers import Command, run_command

from ops.bench.models import NONSENSE, write_all_but_weights
from pipeline.events import Answered, AnyEvent, Failed, SamplingParams, Submitted, Tokenized, decode, new_uid
from pipeline.log.protocol import Inbox
from pipeline.log.redis import RedisLog
from pipeline.names import SUBMITTED_ID, TOKENIZE, Names
from pipeline.process.redis_server import find_binary
from pipeline.stage.slots import Status

# By day tests/stages/tokenize/test_worker.py has requests that take too long, and test_checker.py the other process.
pytestmark = [pytest.mark.slow, pytest.mark.night]

CUBIC_TEMPLATE = """\
{%- for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}{% endfor %}{% endfor %}
{{- messages[0].content }}"""
NUM_MESSAGES = 4000
LIMIT_S = 0.5
LEASE_MS = 60_000
SLOW_TEXT = "all work, and no [play] " * 100_000
"""2.4 MB, whose encoding takes several times the limit. Nothing in Python can stop it."""


class Scene:
    """A log with an engine that lives, which says how long a prompt may be."""

    def __init__(self, log: RedisLog) -> None:
        self.log = log
        self._engine = log.acquire("generate-0", "n", LEASE_MS)
        self._status = Status(
            slot="generate-0", owner=str(self._engine), pid=1, host="here", phase="ready", context=4096
        )
        log.prepare(Inbox.tokenized(log.names))

    def ask(self, **fields: Any) -> str:
        """Send a request; return its uid."""
        uid = new_uid()
        given = {"endpoint": "e", "frontend": "web-0", "sampling": SamplingParams()} | fields
        self.log.submit(uid, [Submitted.model_validate(given)])
        return uid

    def seen(self, condition: Callable[[], object]) -> None:
        """Wait for it."""

        def look() -> object:
            assert self._engine and self.log.renew(self._engine, LEASE_MS, self._status.model_dump_json())
            return condition()

        until(look, timeout_s=60)

    def end(self, uid: str) -> AnyEvent:
        """Return what becomes of a request."""
        self.seen(lambda: self.log.histories([uid], after=SUBMITTED_ID)[0])
        return decode(self.log.histories([uid])[0][-1].fields)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with running_server(Path(find_binary()), tmp_path) as server, closing(RedisLog(server.url, Names())) as log:
        yield Scene(log)


@pytest.fixture
def command(scene: Scene, tmp_path: Path) -> Iterator[Command]:
    """`minisgl stage tokenize`."""
    model = tmp_path / "model"
    model.mkdir()
    write_all_but_weights(NONSENSE, model)
    (model / "chat_template.jinja").write_text(CUBIC_TEMPLATE)
    flags = ["--redis-url", scene.log.url, "--model", str(model), "--tokenize-timeout", str(LIMIT_S)]
    command = run_command(["stage", TOKENIZE, *flags], tmp_path)
    yield command
    command.stop()


def test_grammars_are_checked_by_another_process_and_again_if_that_or_the_tokenizer_is_killed(
    scene: Scene, command: Command
) -> None:
    bomb = json.dumps({"allOf": [{"type": "string", "pattern": f".*a.{{{number}}}"} for number in range(40)]})

    def ask(text: str = "", kind: str = "json") -> str:
        constraint = {"kind": kind, "text": text, "param": "field"} if text else None
        return scene.ask(prompt="Hello", constraint=constraint)

    def checkers() -> list[psutil.Process]:
        return [child for worker in command.workers(TOKENIZE) for child in psutil.Process(worker.pid).children()]

    assert "start" in getattr(scene.end(ask("a+", "regex")), "grammar", "")
    (checker,) = checkers()
    checker.suspend()
    bound, plain = [ask(bomb), ask("ab+", "regex")], ask()
    assert isinstance(scene.end(plain), Tokenized), "it does not wait for a check, which does not even go on"
    checker.kill()
    (worker,) = command.workers(TOKENIZE)
    worker.kill()
    ends = [scene.end(uid) for uid in bound]
    assert isinstance(ends[0], Failed) and (ends[0].status, ends[0].code) == (400, "grammar_too_complex")
    assert isinstance(ends[1], Tokenized) and "start" in ends[1].grammar
    assert not worker.is_running() and len(command.log_lines("worker_died")) == 1
    left = checkers()
    command.stop()
    assert left and not any(process.is_running() for process in left)
    assert scene.log.dead_letters(9) == [] and scene.log.backlog(Inbox.submitted(scene.log.names)) == 0


def test_a_template_and_an_encoding_that_take_too_long_fail_alone(scene: Scene, command: Command) -> None:
    def chat(*contents: str) -> str:
        return scene.ask(messages=tuple({"role": "user", "content": content} for content in contents))

    slow = [chat(*["a"] * NUM_MESSAGES), scene.ask(task="tokenize", prompt=SLOW_TEXT)]
    quick = [chat("Hello"), scene.ask(task="tokenize", prompt="Hello")]
    ends = [scene.end(uid) for uid in (*slow, *quick)]
    scene.seen(lambda: len(command.log_lines("worker_died")) == 2)
    assert [(end.status, end.code) for end in ends[:2] if isinstance(end, Failed)] == [(400, "tokenizer_timeout")] * 2
    assert [type(end) for end in ends[2:]] == [Tokenized, Answered]
    died = command.log_lines("worker_died")
    assert [(line["code"], line["restart_in_s"]) for line in died] == [(4, 0.0), (4, 0.0)]
    told = command.log_lines("tokenizing_too_slow")
    assert [line["uids"] for line in told] == [[uid] for uid in slow]
    assert scene.log.dead_letters(9) == [] and scene.log.backlog(Inbox.submitted(scene.log.names)) == 0
