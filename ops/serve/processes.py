"""The processes of one command: workers under a supervisor, with their flags, their environment and their log."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, BinaryIO, Final

from ops.serve.config import ServerConfig, StageConfig, stage_secrets
from pipeline.names import ARCHIVE, DETOKENIZE, GENERATE, TOKENIZE, WEB, Names
from stages.generate.setup.config import NodesConfig

if TYPE_CHECKING:
    from pipeline.log.redis import RedisLog
    from pipeline.stage.supervisor import Job, Supervisor

EXIT_CONFIG: Final = 2
ONE_MACHINE: Final = NodesConfig()
PROGRAM: Final = (sys.executable, str(Path(__file__).resolve().parents[2] / "minisgl.py"))
"""The command line of `minisgl`, for processes of ours."""


class Processes:
    """What a command starts, on the Redis at *url*. *watch_redis* keeps that one alive, if it is ours."""

    def __init__(
        self, config: ServerConfig | StageConfig, url: str, watch_redis: Callable[[], None] = lambda: None
    ) -> None:
        self._jobs: list[Job] = []
        self.url = url
        self._namespace, self._watch_redis = config.log.namespace, watch_redis
        ready_file = "" if isinstance(config, ServerConfig) else config.worker.ready_file
        self._ready_file = Path(ready_file) if ready_file else None
        self._secrets_of = partial(stage_secrets, config)
        self._environment = worker_environment(os.environ, url)

    def add(
        self,
        stage: str,
        flags: Sequence[str],
        *,
        fds: tuple[int, ...] = (),
        drain_s: float = 10.0,
        num_ranks: int = 1,
        nodes: NodesConfig = ONE_MACHINE,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Have one more worker of *stage* started, which inherits *fds* and has *drain_s* to end.

        An engine may be several processes, its ranks. Those are started that *nodes* gives to this machine. *variables*
        are added to their environment.
        """
        from pipeline.stage.supervisor import Job

        group = str(len(self._jobs)) if num_ranks > 1 else ""
        variables, spans = {**self._secrets_of(stage), **variables}, nodes != ONE_MACHINE
        for rank in nodes.ranks_here(num_ranks):
            self._jobs.append(Job(stage, tuple(flags), fds, drain_s, variables, rank, group, spans))

    def run(
        self,
        say_ready: Callable[[], None],
        ready_timeout_s: float,
        stay: Callable[[Supervisor], None] | None = None,
        *,
        output: BinaryIO | None = None,
        show: Callable[[Sequence[str]], None] | None = None,
    ) -> int:
        """Keep the workers running until a signal comes, or *stay* returns; return the exit code.

        They write to *output*, if it is given. *show* hears which of them are not ready yet.
        """
        from pipeline.stage.supervisor import ChildFailed, Supervisor

        logs = contextlib.ExitStack()

        def open_log() -> RedisLog:
            from pipeline.log.redis import RedisLog

            return logs.enter_context(contextlib.closing(RedisLog(self.url, Names(self._namespace))))

        supervisor = Supervisor(
            open_log,
            self._jobs,
            program=PROGRAM,
            environment=self._environment,
            watch_redis=self._watch_redis,
            output=output,
            ready_file=self._ready_file,
        )
        supervisor.listen()
        try:
            supervisor.start()
            if supervisor.wait_until_ready(ready_timeout_s, show):
                say_ready()
                (stay or Supervisor.run)(supervisor)
            # Web drains first; the others then leave what they have in hand in the log. Archivers see all that ended.
            supervisor.stop([[WEB], [TOKENIZE, GENERATE, DETOKENIZE], [ARCHIVE]])
        except ChildFailed:
            return EXIT_CONFIG  # the child has said why
        finally:
            supervisor.kill()
            logs.close()
        return 0


def worker_environment(environment: Mapping[str, str], url: str) -> dict[str, str]:
    """Return what every worker has in its environment: no flags, which are on its command line, but for the URL, which
    may hold a password.
    """
    from pipeline.process import failpoints

    tests = (failpoints.VARIABLE, failpoints.FOLDER_VARIABLE)
    kept = {name: value for name, value in environment.items() if not name.startswith("MINISGL_") or name in tests}
    # One thread of a worker does the work; with a heap for each, glibc keeps what another one could use. Torch warns of
    # addresses of ranks that have no name.
    return {"MALLOC_ARENA_MAX": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | kept | {"MINISGL_REDIS_URL": url}
