"""The process that checks grammars: what it bounds, and that its end is the end of nothing else."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal

import psutil
import pytest
from support.servers import eventually

from pipeline.errors import RequestError
from pipeline.markup import Markup
from pipeline.sampling import Constraint
from pipeline.vocabulary import AddedTokens
from stages.tokenize.constraints.asked import Asked
from stages.tokenize.constraints.checker import MOST_TRIES, Checked, GrammarChecker
from stages.tokenize.markup import Dialect

DIALECT = Dialect("hermes", False, ("<think>", "</think>"), AddedTokens({"<s>": 0, "<think>": 7}, frozenset({0})))
BOMB = {"allOf": [{"type": "string", "pattern": f".*a.{{{number}}}"} for number in range(40)]}
"""Takes many seconds and gigabytes, if it may."""
OF_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps the limit of memory")


def asked(what: Any, kind: Literal["json", "regex", "grammar"] = "json") -> Asked:
    text = json.dumps(what) if kind == "json" else what
    constraint = Constraint(kind=kind, text=text, param="field")
    return Asked(constraint=constraint, calls=None, tools=(), thinking_budget=None, markup=Markup())


def checked(checker: GrammarChecker, question: Asked) -> Checked:
    checker.begin(question)
    result = checker.result(60)
    assert result is not None
    return result


def too_complex(result: Checked) -> str:
    assert isinstance(result, RequestError), result
    assert (result.status, result.code, result.param) == (400, "grammar_too_complex", "field")
    return result.message


@pytest.fixture
def make() -> Iterator[Callable[..., GrammarChecker]]:
    made: list[GrammarChecker] = []

    def checker(**limits: Any) -> GrammarChecker:
        made.append(GrammarChecker(DIALECT.written(), **limits))
        return made[-1]

    yield checker
    for each in made:
        each.close()


def test_a_dialect_is_read_as_it_was_written() -> None:
    assert Dialect.read(DIALECT.written()) == DIALECT


def test_a_check_that_takes_too_much_cpu_time_fails_alone_and_its_process_is_replaced(
    make: Callable[..., GrammarChecker],
) -> None:
    checker = make(limit_cpu_s=0.2)
    message = too_complex(checked(checker, asked(BOMB)))
    assert "the check takes more than 0.2 s of CPU time, which is the limit; ask for less" in message
    first = checker._process
    assert str(checked(checker, asked("a+", "regex"))).startswith("start: /a+/")
    assert checker._process is first, "it was started before anybody asked"


@OF_LINUX
def test_a_check_that_takes_too_much_memory_fails_alone(make: Callable[..., GrammarChecker]) -> None:
    checker = make(limit_cpu_s=60, limit_bytes=16 << 20)
    assert "memory" in too_complex(checked(checker, asked(BOMB)))
    assert isinstance(checked(checker, asked("a+", "regex")), str)


def test_a_check_whose_process_is_killed_is_done_again_but_not_for_ever(
    make: Callable[..., GrammarChecker], monkeypatch: pytest.MonkeyPatch
) -> None:
    checker, started = make(), []
    start = GrammarChecker._start

    def killed(self: GrammarChecker) -> Any:
        process = start(self)
        started.append(process.pid)
        if len(started) in kills:
            process.send_signal(signal.SIGKILL)
        return process

    monkeypatch.setattr(GrammarChecker, "_start", killed)
    kills = {1, 2}
    assert isinstance(checked(checker, asked("a+", "regex")), str) and len(started) == 3
    kills = set(range(100))
    os.kill(started[-1], signal.SIGKILL)
    failed = checked(checker, asked("ab", "regex"))
    assert isinstance(failed, RequestError) and (failed.status, failed.code) == (500, "tokenizer_error")
    assert f"{MOST_TRIES} processes" in failed.message and len(started) == 3 + MOST_TRIES


def test_the_process_starts_before_the_first_check(make: Callable[..., GrammarChecker]) -> None:
    checker = make()
    checker.start()
    eventually(lambda: checker._process is not None, "it starts")
    first = checker._process
    assert isinstance(checked(checker, asked("a+", "regex")), str) and checker._process is first
    unused = make()
    unused.start()
    unused.close()
    assert unused._process is None, "it ends also without a check"


def test_what_was_asked_before_is_known(make: Callable[..., GrammarChecker]) -> None:
    checker = make()
    assert checker.known(asked({})) is None
    first, wrong = checked(checker, asked({})), checked(checker, asked("(", "regex"))
    assert isinstance(wrong, RequestError) and wrong.code == "invalid_grammar"
    assert checker.known(asked({})) == first and checker.known(asked("(", "regex")) is wrong


def test_the_process_ends_with_its_tokenizer_in_the_midst_of_a_check(make: Callable[..., GrammarChecker]) -> None:
    checker = make(limit_cpu_s=60, limit_bytes=8 << 30)
    checked(checker, asked({}))
    assert checker._process is not None
    process = psutil.Process(checker._process.pid)
    checker.begin(asked(BOMB))
    began_s = process.cpu_times().user
    eventually(lambda: process.cpu_times().user > began_s, "the check has begun")
    checker.close()
    assert not process.is_running()
