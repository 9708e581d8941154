"""The Redis servers that any test may use, and how the tests of a run are chosen and dealt out."""

from __future__ import annotations

# First: otherwise structlog imports rich, which takes half a second to print one traceback.
import pipeline.process.observe  # noqa: F401  # isort: skip
import contextlib
import fcntl
import functools
import gc
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import settings
from support.memory_log.log import MemoryLog
from support.redis_servers import PLACES, Servers
from support.selection import by_night, chosen, group_of_file
from werkzeug.routing import Rule

from pipeline.log.redis import RedisLog
from pipeline.names import Names

# Tests in the background of a script ignore Ctrl-C, and what they start would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
# pytest-xdist tells its processes how wide its terminal is; what they print goes to none.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)
# How long an example takes is a matter of the machine.
settings.register_profile("default", deadline=None, max_examples=by_night(15, 100))
settings.load_profile("default")
gc.disable()  # until all tests are collected: a tenth of the time for that, and hardly any of it is garbage
# httpx reads the certificates of all authorities for each call, which takes 25 ms; tests make thousands of calls.
httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)  # type: ignore[attr-defined]
# A route of werkzeug compiles functions that make its URL: 20 ms for each of a thousand apps, which make none.
_compile_builder = Rule._compile_builder


def _compile_late(self: Rule, append_unknown: bool = True) -> Callable[..., tuple[str, str]]:
    return lambda self, **values: _compile_builder(self, append_unknown)(self, **values)


Rule._compile_builder = _compile_late  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Let one process of a run collect before the others: half of that work is to compile the tests for all."""
    if not hasattr(session.config, "workerinput"):
        return (yield)
    with Path(__file__).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)
        return (yield)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FailuresAtOnce(config))


class FailuresAtOnce:
    """Names a test when it fails: a long run may end before its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal: pytest.TerminalReporter | None = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:  # the processes of a run have none
            terminal.write_line(f" {report.nodeid}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what waits for the night or for a GPU, and begin with what is slow."""
    items[:], left = chosen(items)
    config.hook.pytest_deselected(items=left)


def pytest_collection_finish() -> None:
    """Spare the garbage collector what lasts as long as the run: modules of torch and transformers, and all tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Deal out whole files, since their tests share servers and models; files of one `xdist_group` to one process."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no annotations
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return group_of_file(config.rootpath / file) or file

        def _reschedule(self, node: Any) -> None:
            """Give *node* work until it has two tests or no more will come: it holds back its last one until then.

            xdist gives one unit. The process that replaces a dead one may get a unit whose tests have all run, and
            then it and the whole run would wait for ever.
            """
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return ByFile(config, log)


@pytest.fixture(scope="session")
def redis_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The servers of this test run, by the place that their binary comes from."""
    servers = Servers(lambda place: tmp_path_factory.mktemp(f"redis-{place}"))
    yield servers
    servers.close()


@pytest.fixture
def redis_url(redis_servers: Servers) -> str:
    """The address of an empty Redis: the one that `minisgl serve` starts."""
    return redis_servers.url("embedded")


@pytest.fixture(params=PLACES)
def each_redis_url(request: pytest.FixtureRequest, redis_servers: Servers) -> str:
    """The address of an empty Redis, once for each version."""
    return redis_servers.url(request.param)


@pytest.fixture(params=["memory", "redis"])
def another_log(request: pytest.FixtureRequest, redis_servers: Servers) -> Iterator[Callable[[], RedisLog]]:
    """Give a function that opens this test's log for another thread: the one in memory, then the one in Redis."""
    if request.param == "memory":
        shared = MemoryLog(Names())
        yield lambda: shared
        return
    url = redis_servers.url("embedded")
    with contextlib.ExitStack() as stack:

        def opened() -> RedisLog:
            log = RedisLog(url, Names())
            stack.callback(log.close)
            return log

        yield opened
