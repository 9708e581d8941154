"""An engine of several ranks without a supervisor, as in `LLM`: this process is rank 0 and starts the others.

They find each other by a file in its memory and need no log. They end with this process, however it ends. As a program,
this file is another rank: its arguments are the name of that file, and flags of `minisgl stage generate`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import structlog

from pipeline.errors import ConfigError, RankLost
from pipeline.flags import flags_for, parse_config
from pipeline.process.config import ModelConfig
from pipeline.process.parent import SUPERVISOR_VARIABLE, die_with_supervisor
from stages.generate.loop.worker import LOAD_TIMEOUT_S, Loaded
from stages.generate.model.checkpoint import check_folder
from stages.generate.model.ends import end_tokens
from stages.generate.ranks.channel import TIMEOUT_S, Follower, Leader, least
from stages.generate.ranks.links import connect_links
from stages.generate.ranks.steps import FollowingEngine, leading_engine
from stages.generate.ranks.stores import memory_store, reached_store
from stages.generate.setup.config import GenerateConfig, RankConfig
from stages.generate.setup.loading import load_engine
from stages.generate.setup.resolve import resolve

ROOT: Final = Path(__file__).resolve().parents[3]
PROGRAM: Final = (sys.executable, "-P", "-m", "stages.generate.ranks.children")
READY: Final = b"ready\n"
"""Line that another rank prints when it has read its flags and the model's folder, and waits for the others."""
LEAVE_S: Final = 5.0
"""Longest time that the other ranks may take to end."""
EXIT_CONFIG: Final = 2


@contextlib.contextmanager
def loaded_with_ranks(config: GenerateConfig, folder: Path, on_lost: Callable[[RankLost], object]) -> Iterator[Loaded]:
    """Load the model with all ranks of *config*. The other ranks are processes that end with the block.

    *on_lost* is called in another thread if a rank is found gone while nothing is computed.

    Raises:
        ConfigError: Folder, flags and machine do not fit together.
        RankLost: Another rank has ended.
    """
    size = config.engine.tp
    spec = check_folder(folder, config.engine.loading)
    settings = resolve(config.engine, spec)
    with _other_ranks(config, folder) as store:
        links = connect_links(store, 0, size, device=settings.device)
        settings = settings.with_pages(least(links.frames, settings.num_pages, TIMEOUT_S))
        collectives = links.collectives()
        engine = load_engine(config, spec, folder, settings, lambda progress: None, collectives)
        least(links.frames, 0, LOAD_TIMEOUT_S)  # all have loaded
        leader = Leader(links.frames, on_lost, bodies=links.bodies)
        leading = leading_engine(engine, leader, collectives, spec.vocab_size, overlap=settings.overlap)
        yield Loaded(leading, settings.with_fused(engine.fused), end_tokens(folder, spec))
        with contextlib.suppress(RankLost):  # a rank that is gone need not be told
            leader.leave()


@contextlib.contextmanager
def _other_ranks(config: GenerateConfig, folder: Path) -> Iterator[Any]:
    """Start the other ranks and yield the store where they wait. The block must let them leave.

    If the block fails, they are killed: they may wait for what rank 0 does not compute.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    name, store = memory_store(config.engine.tp)
    try:
        for rank in range(1, config.engine.tp):
            ranks.append(_start(config, folder, name, rank))
        for rank, process in enumerate(ranks, 1):
            assert process.stdout is not None
            if not any(line == READY for line in process.stdout):
                raise RankLost(f"rank {rank} ended with {process.wait()} at its start; its own lines say why")
        yield store
        deadline_s = time.monotonic() + LEAVE_S
        for process in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline_s - time.monotonic()))
    finally:
        for process in ranks:
            with process:  # closes its pipe and waits
                process.kill()


def _start(config: GenerateConfig, folder: Path, store: str, rank: int) -> subprocess.Popen[bytes]:
    flags = flags_for([ModelConfig(str(folder)), config.engine, RankConfig(rank)])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MINISGL_")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [*PROGRAM, store, *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment | {"PYTHONPATH": path, SUPERVISOR_VARIABLE: str(os.getpid())},
        process_group=0,  # Ctrl-C is for rank 0, which may go on
    )


def main() -> int:
    """Run another rank until rank 0 leaves; return the exit code."""
    die_with_supervisor(os.environ)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    store, *flags = sys.argv[1:]
    config = parse_config("stage generate", GenerateConfig, flags, {})
    try:
        _follow(config, store)
    except ConfigError as error:
        sys.stderr.write(f"minisgl: rank {config.ranks.rank}: {error}\n")
        return EXIT_CONFIG
    except RankLost:  # rank 0 reports the reason
        return 1
    return 0


def _follow(config: GenerateConfig, store: str) -> None:
    rank, size, folder = config.ranks.rank, config.engine.tp, Path(config.model.model)
    spec = check_folder(folder, config.engine.loading)
    settings = resolve(config.engine, spec, rank)
    sys.stdout.buffer.write(READY)
    sys.stdout.flush()
    os.dup2(2, 1)  # rank 0 no longer reads the pipe, and output of libraries would fill it
    links = connect_links(reached_store(store, size), rank, size, device=settings.device)
    settings = settings.with_pages(least(links.frames, settings.num_pages, TIMEOUT_S))
    engine = load_engine(config, spec, folder, settings, lambda progress: None, links.collectives())
    least(links.frames, 0, LOAD_TIMEOUT_S)
    following = FollowingEngine(engine, Follower(links.frames, bodies=links.bodies))
    while following.follow():
        pass


if __name__ == "__main__":
    sys.exit(main())
