"""A real tokenizer under its supervisor, and requests that would keep it for minutes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

import psutil
import pytest
from support.redis_servers import running_server, until
from support.servers import Command, run_command

from ops.bench.models import NONSENSE, write_all_but_weights
from pipeline.events import Answered, Failed, SamplingParams, Submitted, Task, Tokenized, decode, new_uid
from pipeline.log.protocol import Inbox
from pipeline.log.redis import RedisLog
from pipeline.names import SUBMITTED_ID, TOKENIZE, Names
from pipeline.process.redis_server import find_binary
from pipeline.sampling import Constraint
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


@contextmanager
def tokenizer(folder: Path, redis_url: str) -> Iterator[Command]:
    """Run `minisgl stage tokenize`."""
    (folder / "model").mkdir()
    write_all_but_weights(NONSENSE, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(CUBIC_TEMPLATE)
    flags = ["--redis-url", redis_url, "--model", str(folder / "model"), "--tokenize-timeout", str(LIMIT_S)]
    command = run_command(["stage", TOKENIZE, *flags], folder)
    try:
        yield command
    finally:
        command.stop()


def test_grammars_are_checked_by_another_process_and_again_if_that_or_the_tokenizer_is_killed(tmp_path: Path) -> None:
    bomb = json.dumps({"allOf": [{"type": "string", "pattern": f".*a.{{{number}}}"} for number in range(40)]})
    with (
        running_server(Path(find_binary()), tmp_path) as server,
        closing(RedisLog(server.url, Names())) as log,
    ):
        engine = log.acquire("generate-0", "n", LEASE_MS)
        assert engine is not None
        status = Status(slot="generate-0", owner=str(engine), pid=1, host="here", phase="ready", context=4096)
        log.prepare(Inbox.tokenized(log.names))

        def ask(text: str = "", kind: Literal["json", "regex"] = "json") -> str:
            uid, constraint = new_uid(), Constraint(kind=kind, text=text, param="field") if text else None
            event = Submitted(
                endpoint="e", frontend="web-0", prompt="Hello", sampling=SamplingParams(), constraint=constraint
            )
            log.submit(uid, [event])
            return uid

        def end(uid: str) -> Tokenized | Failed:
            def look() -> object:
                assert log.renew(engine, LEASE_MS, status.model_dump_json())
                return log.histories([uid], after=SUBMITTED_ID)[0]

            until(look, timeout_s=60)
            event = decode(log.histories([uid])[0][-1].fields)
            assert isinstance(event, Tokenized | Failed)
            return event

        def checkers() -> list[psutil.Process]:
            return [child for worker in command.workers(TOKENIZE) for child in psutil.Process(worker.pid).children()]

        with tokenizer(tmp_path, server.url) as command:
            assert "start" in getattr(end(ask("a+", "regex")), "grammar", "")
            (checker,) = checkers()
            checker.suspend()
            bound, plain = [ask(bomb), ask("ab+", "regex")], ask()
            assert isinstance(end(plain), Tokenized), "it does not wait for a check, which does not even go on"
            checker.kill()
            (worker,) = command.workers(TOKENIZE)
            worker.kill()
            ends = [end(uid) for uid in bound]
            assert isinstance(ends[0], Failed) and (ends[0].status, ends[0].code) == (400, "grammar_too_complex")
            assert isinstance(ends[1], Tokenized) and "start" in ends[1].grammar
            assert not worker.is_running() and len(command.log_lines("worker_died")) == 1
            left = checkers()
        assert left and not any(process.is_running() for process in left)
        assert log.dead_letters(9) == [] and log.backlog(Inbox.submitted(log.names)) == 0


def test_a_template_and_an_encoding_that_take_too_long_fail_alone(tmp_path: Path) -> None:
    with (
        running_server(Path(find_binary()), tmp_path) as server,
        closing(RedisLog(server.url, Names())) as log,
    ):
        engine = log.acquire("generate-0", "n", LEASE_MS)
        assert engine is not None
        status = Status(slot="generate-0", owner=str(engine), pid=1, host="here", phase="ready", context=4096)
        log.prepare(Inbox.tokenized(log.names))

        def seen(condition: Callable[[], object]) -> None:
            """Wait for it, with an engine that lives: it says how long a prompt may be."""

            def look() -> object:
                assert log.renew(engine, LEASE_MS, status.model_dump_json())
                return condition()

            until(look, timeout_s=60)

        def ask(task: Task, *contents: str, prompt: str = "") -> str:
            uid = new_uid()
            messages = tuple({"role": "user", "content": content} for content in contents)
            event = Submitted(
                endpoint="e", frontend="web-0", task=task, messages=messages, prompt=prompt, sampling=SamplingParams()
            )
            log.submit(uid, [event])
            return uid

        with tokenizer(tmp_path, server.url) as command:
            slow = [ask("generate", *["a"] * NUM_MESSAGES), ask("tokenize", prompt=SLOW_TEXT)]
            quick = [ask("generate", "Hello"), ask("tokenize", prompt="Hello")]
            seen(lambda: all(log.histories([*slow, *quick], after=SUBMITTED_ID)))
            ends = [decode(history[-1].fields) for history in log.histories([*slow, *quick], after=SUBMITTED_ID)]
            seen(lambda: len(command.log_lines("worker_died")) == 2)
        assert [(type(end), end.status, end.code) for end in ends[:2] if isinstance(end, Failed)] == [
            (Failed, 400, "tokenizer_timeout"),
            (Failed, 400, "tokenizer_timeout"),
        ]
        assert [type(end) for end in ends[2:]] == [Tokenized, Answered]
        died = command.log_lines("worker_died")
        assert [(line["code"], line["restart_in_s"]) for line in died] == [(4, 0.0), (4, 0.0)]
        told = command.log_lines("tokenizing_too_slow")
        assert [line["uids"] for line in told] == [[uid] for uid in slow]
        assert log.dead_letters(9) == [] and log.backlog(Inbox.submitted(log.names)) == 0
