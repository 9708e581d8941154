"""What the end-to-end tests share: small random checkpoints and servers.

Modules that share a server are of one `xdist_group`, so that it is started once.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from support.checkpoints import make_checkpoint
from support.selection import group_of
from support.servers import MEASURED_CONTEXT, MEASURED_RETENTION_S, MEASURED_RUNNING, Server, is_alive, serve
from support.streams import PROMPTS, ask_all, family_of

T = TypeVar("T")
Answers = dict[str, tuple[str, str]]
"""Prompt -> the text that answers it, and why it ended."""


@pytest.fixture(scope="session")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Llama 3 in float32."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "llama3", "llama3")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Qwen3 in float32."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "qwen3", "qwen3")


@pytest.fixture(scope="session")
def llama3_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `llama3_server` archives requests."""
    return tmp_path_factory.mktemp("archive")


class Shared:
    """What the modules of one `xdist_group` share: begun when a test first asks for it, ended with the group.

    A session's fixture would live until the last test of all, and even an idle server takes 3 % of a core.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._begun: dict[str, Any] = {}

    def get(self, name: str, begin: Callable[[], AbstractContextManager[T]]) -> T:
        """Return what *begin* gives. The next one who asks for *name* gets the same."""
        if name not in self._begun:
            self._begun[name] = self._stack.enter_context(begin())
        return cast("T", self._begun[name])

    def end(self) -> None:
        """End all that has begun."""
        self._begun.clear()
        self._stack.close()


SHARED = pytest.StashKey[Shared]()


@pytest.fixture(scope="session")
def shared(pytestconfig: pytest.Config) -> Iterator[Shared]:
    """What the modules of a group share."""
    shared = pytestconfig.stash[SHARED] = Shared()
    yield shared
    shared.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """After the last test of a group, end what its modules share."""
    try:
        return (yield)
    finally:
        if SHARED in item.config.stash and (nextitem is None or group_of(nextitem) != group_of(item)):
            item.config.stash[SHARED].end()


@pytest.fixture(scope="module")
def llama3_server(
    llama3: Path, llama3_archive: Path, shared: Shared, tmp_path_factory: pytest.TempPathFactory
) -> Server:
    """A server of `llama3`, which computes long prompts in chunks and has an archive."""
    flags = ("--model", str(llama3), "--dtype", "float32", "--max-prefill-length", "64")
    archive = ("--archive", str(llama3_archive))
    return shared.get("llama3", lambda: serve(tmp_path_factory.mktemp("llama3"), *flags, *archive))


@pytest.fixture(scope="module")
def demo_server(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server of the demo model that computes as transformers does."""
    return shared.get("demo", lambda: serve(tmp_path_factory.mktemp("demo"), "--dtype", "float32", demo=True))


def _with_long_answers(folder: Path) -> AbstractContextManager[Server]:
    """A server whose answers can outlast any look at it."""
    model = make_checkpoint(folder / "llama3", "llama3", max_positions=MEASURED_CONTEXT)
    limits = ("--max-running-requests", str(MEASURED_RUNNING), "--retention", str(MEASURED_RETENTION_S))
    return serve(folder, "--model", str(model), "--served-model-name", "llama", "--page-size", "16", *limits)


@pytest.fixture(scope="module")
def measured_server(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server whose figures are compared with what was asked of it. Its tests kill engines."""
    return shared.get("measured", lambda: _with_long_answers(tmp_path_factory.mktemp("measured")))


@pytest.fixture(scope="module")
def forgetting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own: a request that is forgotten while it runs counts where it began, and nowhere as ended."""
    with _with_long_answers(tmp_path_factory.mktemp("forgetting")) as server:
        yield server


@contextlib.contextmanager
def _as_it_comes(folder: Path) -> Iterator[Server]:
    with serve(folder) as server:
        yield server
        with family_of(server.command) as family:
            assert server.command.stop(signal.SIGINT) == 0
            assert not any(map(is_alive, family))
        assert "Traceback" not in server.command.output


@pytest.fixture(scope="module")
def plain_server(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server as it comes. Its tests kill workers and Redis: it is whole again after each, and ends well at last."""
    return shared.get("plain", lambda: _as_it_comes(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def undisturbed(shared: Shared, plain_server: Server) -> Answers:
    """What `plain_server` answers to the prompts when nothing happens."""

    @contextlib.contextmanager
    def asked() -> Iterator[Answers]:
        answers = {stream.prompt: stream.answer for stream in ask_all(plain_server)}
        assert len(set(answers.values())) == len(PROMPTS)
        assert {reason for _, reason in answers.values()} == {"length"}
        yield answers

    return shared.get("undisturbed", asked)
