"""The command: arguments -> config -> processes; and `LLM`, for use from Python.

The one file that knows all packages; it imports them when needed.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # `python -m minisgl` puts the caller's folder first; a `web` or `stages` folder there must not win over ours.
    _HOME = str(Path(__file__).resolve().parent)
    if sys.path[0] != _HOME:
        sys.path[0] = _HOME

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, BinaryIO

from pipeline.config import Config, arguments_for, parse_command, secrets_of
from pipeline.errors import ConfigError, MiniSGLError
from pipeline.names import DETOKENIZE, GENERATE, TOKENIZE, WEB, Names

if TYPE_CHECKING:
    from ops.offline import LLM as LLM
    from pipeline.events import SamplingParams as SamplingParams
    from pipeline.log.redis import RedisLog
    from pipeline.process.supervisor import Job, Supervisor

USAGE = """\
usage: minisgl serve [flags]                everything on this machine; `python -m minisgl [flags]` means the same
       minisgl stage STAGE [flags]          one stage alone: tokenize, generate, detokenize or web
       minisgl shell [flags]                chat in the terminal, with any OpenAI server
       minisgl trace UID [flags]            what happened to a request of a server that runs
       minisgl top [flags]                  all of a server that runs, live in the terminal
       minisgl dead ACTION [flags]          requests that killed their workers: ls, show, requeue or drop
       minisgl bench KIND [flags]           measure: offline, serve, pipeline, compare or gpu
       minisgl --version

Each command explains its flags with --help; MINISGL_<FLAG> in the environment sets any flag.
"""
DEMO_ANSWERS = "No --model was given, so the demo model answers; ask it what it can do."
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130
READY_TIMEOUT_S = 600.0
FOREVER_S = float("inf")


def __getattr__(name: str) -> object:
    """Import what `from minisgl import ...` names, and torch with it, only now: the command must start fast."""
    if name == "LLM":
        from ops.offline import LLM

        return LLM
    if name == "SamplingParams":
        from pipeline.events import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code.

    0; 1 for a failure; 2 for a command line or set-up that cannot work; 130 for Ctrl-C before anything ran.
    """
    if arguments is None:
        _hide_secrets()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments in (["--help"], ["-h"]):
            print(USAGE, end="")
            return 0
        if arguments == ["--version"]:
            from pipeline import VERSION

            print(f"minisgl {VERSION}")
            return 0
        if not arguments or arguments[0].startswith("-"):
            arguments = ["serve", *arguments]
        if arguments[0] == "bench":
            from ops.bench import command

            return command.run(arguments[1:], os.environ)
        if arguments[0] == "shell":
            from ops.shell import command as shell

            return shell.main(arguments[1:], os.environ)
        if arguments[0] == "trace":
            from ops import trace

            return trace.main(arguments[1:], os.environ)
        if arguments[0] == "top":
            from ops.top import command as top

            return top.main(arguments[1:], os.environ)
        if arguments[0] == "dead":
            from ops import dead

            return dead.main(arguments[1:], os.environ)
        if arguments[0] not in ("serve", "stage"):
            known = "serve, stage, shell, trace, top, dead or bench"
            raise ConfigError(f"{arguments[0]}: no such command; expected {known} (see minisgl --help)")
        config = parse_command(arguments, os.environ)
        if config.worker.slot is not None:
            return run_worker(config)
        return serve(config) if config.command == "serve" else run_stage(config)
    except ConfigError as error:
        print(f"minisgl: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:  # before there were workers to drain
        return EXIT_INTERRUPTED
    except MiniSGLError as error:
        print(f"minisgl: {error}", file=sys.stderr)
        return 1


def _hide_secrets() -> None:
    """Begin again, as the same process, when the command line has secrets: everybody here can read it."""
    from pipeline.config import concealed

    kept, variables = concealed(sys.argv[1:])
    if variables:
        program = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
        os.execve(sys.executable, [*program, *kept], dict(os.environ) | variables)


def serve(config: Config) -> int:
    """Start Redis, where none is given, and every stage; stay until a signal comes."""
    from pipeline.process.observe import configure_logging
    from web.listener import open_listener

    configure_logging()
    began_s = time.monotonic()
    if config.serve.shell:
        from ops.shell.foreground import check_terminal

        check_terminal()
    _check_keys(config)
    folder = model_folder(config)
    with contextlib.ExitStack() as stack:
        url, watch_redis = stack.enter_context(_redis(config))
        listener = stack.enter_context(open_listener(config.web.host, config.web.port))
        config = _with_model(config, folder)

        def job(stage: str, *extra: str, fds: tuple[int, ...] = (), drain_s: float = 10.0) -> Job:
            return _job(config, stage, *extra, fds=fds, drain_s=drain_s)

        jobs = [
            job(GENERATE),  # first, because it takes longest to be ready
            job(WEB, "--listen-fd", str(listener.fileno()), fds=(listener.fileno(),), drain_s=30.0),
            *(job(TOKENIZE) for _ in range(max(config.serve.tokenizers, 1))),
            job(DETOKENIZE),
        ]

        if config.serve.shell:
            return _supervise_with_shell(config, folder, url, jobs, watch_redis)

        def say_ready() -> None:
            _banner(config, folder, time.monotonic() - began_s)

        return _supervise(config, url, jobs, say_ready, READY_TIMEOUT_S, watch_redis)


def run_stage(config: Config) -> int:
    """Start the workers of one stage against a Redis that is there; stay until a signal comes."""
    from pipeline.process.observe import configure_logging

    configure_logging()

    import structlog

    from pipeline.log.check import check_server
    from web.listener import open_listener

    if not config.log.redis_url:
        raise ConfigError(f"minisgl stage {config.stage}: --redis-url is missing; pass the URL all stages share")
    _check_keys(config)
    check_server(config.log.redis_url)
    with contextlib.ExitStack() as stack:
        if config.stage == WEB:
            listener = stack.enter_context(open_listener(config.web.host, config.web.port))
            fd = listener.fileno()
            jobs = [
                _job(config, WEB, "--listen-fd", str(fd), fds=(fd,), drain_s=30.0)
                for _ in range(config.worker.replicas)
            ]
        else:
            config = _with_model(config, model_folder(config))
            jobs = [_job(config, config.stage) for _ in range(config.worker.replicas)]

        def say_ready() -> None:
            structlog.get_logger().info("stage_ready", stage=config.stage, replicas=config.worker.replicas)

        return _supervise(config, config.log.redis_url, jobs, say_ready, FOREVER_S, _nothing)  # others may come later


def run_worker(config: Config) -> int:
    """Be one worker of a stage: a process that a supervisor started, or a container."""
    from pipeline.process.observe import configure_logging
    from pipeline.process.parent import die_with_supervisor

    die_with_supervisor(os.environ)
    configure_logging(stage=config.stage)
    gc.disable()  # nothing that is imported is garbage, and looking for it takes a tenth of the time

    from pipeline.log.protocol import RequestLimits
    from pipeline.log.redis import RedisLog
    from pipeline.process import failpoints

    failpoints.arm(os.environ)
    if config.stage == WEB:
        from web.server import run as run_web

        gc.enable()
        return run_web(config)
    run = _stage_run(config.stage)
    gc.freeze()
    gc.enable()
    names, limits = Names(config.log.namespace), RequestLimits(retention_s=config.log.retention_s)
    folder = Path(config.model.model) if config.model.model else model_folder(config)
    return run(config, lambda: RedisLog(config.log.redis_url, names, limits), folder)


def _stage_run(stage: str) -> Callable[[Config, Callable[[], RedisLog], Path], int]:
    if stage == TOKENIZE:
        from stages.tokenize.worker import run as run_tokenize

        return run_tokenize
    if stage == GENERATE:
        from stages.generate.worker import run as run_generate

        return run_generate
    from stages.detokenize.worker import run as run_detokenize

    return run_detokenize


def model_folder(config: Config) -> Path:
    """Return the folder of the model, checked without torch; one of the hub is fetched, without --model it is the demo.

    Raises:
        ConfigError: The folder does not hold what this command needs; the message names the file or tensor.
    """
    from stages.generate.model.checkpoint import DEMO_FOLDER, check_folder, check_tokenizer
    from stages.generate.model.hub import fetch, hub_model

    text_alone, dummy = config.stage in (TOKENIZE, DETOKENIZE), config.engine.dummy_weight
    if not config.model.model:
        folder = DEMO_FOLDER
    elif (on_hub := hub_model(config.model.model)) is not None:
        folder = fetch(on_hub, weights=not text_alone and not dummy)
    else:
        folder = Path(config.model.model).expanduser().absolute()
    if text_alone:
        check_tokenizer(folder)
    else:
        check_folder(folder, dummy=dummy)
    return folder


def _with_model(config: Config, folder: Path) -> Config:
    """Return *config* for workers, which get the folder; a model of the hub is still served under its name there."""
    import dataclasses

    from stages.generate.model.hub import hub_model

    names, on_hub = config.names, hub_model(config.model.model)
    if on_hub is not None and not names.served_model_name:
        names = dataclasses.replace(names, served_model_name=(on_hub.id,))
    return dataclasses.replace(config, model=dataclasses.replace(config.model, model=str(folder)), names=names)


def _job(config: Config, stage: str, *extra: str, fds: tuple[int, ...] = (), drain_s: float = 10.0) -> Job:
    from pipeline.process.supervisor import Job

    return Job(stage, (*arguments_for(config, stage), *extra), fds, drain_s)


def _check_keys(config: Config) -> None:
    """Read the API keys and their limits as a frontend will, before anything is started. Raises ConfigError."""
    if not (config.keys.api_key or config.keys.limits):
        return
    from web.keys import read_keys

    read_keys(config.keys.api_key, config.keys.limits)


@contextlib.contextmanager
def _redis(config: Config) -> Iterator[tuple[str, Callable[[], None]]]:
    """Give the URL of the Redis to use and what keeps it alive; end it afterwards if it is ours."""
    if config.log.redis_url:
        from pipeline.log.check import check_server

        check_server(config.log.redis_url)
        yield config.log.redis_url, _nothing
        return
    from pipeline.process.redis_server import EmbeddedRedis

    server = EmbeddedRedis(config.data_dir)
    try:
        yield server.url, server.watch
    finally:
        server.stop()


def _supervise_with_shell(
    config: Config, folder: Path, url: str, jobs: Sequence[Job], watch_redis: Callable[[], None]
) -> int:
    """Run *jobs* until the shell before them ends, or a SIGTERM comes; return the exit code."""
    from ops.shell.foreground import Foreground
    from pipeline.process.observe import configure_logging
    from pipeline.process.supervisor import StartFailed
    from stages.generate.model.checkpoint import is_demo
    from web.listener import url_here

    front = Foreground(config.data_dir)
    configure_logging(to=front.log)

    def say_ready() -> None:
        if is_demo(folder):
            print(DEMO_ANSWERS)
        print(f"The server's log is {front.log_path}; Ctrl-D ends chat and server.", flush=True)

    def run(supervisor: Supervisor) -> None:
        from web.keys import first_key

        where = url_here(config.web.host, config.web.port)
        key = first_key(config.keys.api_key, config.keys.limits)
        front.run(supervisor, (sys.executable, __file__, "shell", "--url", where), key)

    try:
        code = _supervise(
            config, url, jobs, say_ready, READY_TIMEOUT_S, watch_redis, run, output=front.log, show=front.show_progress
        )
    except StartFailed:
        front.tell_why()
        raise
    finally:
        front.show_progress(())
    if code:
        front.tell_why()
    return code or front.code


def _supervise(
    config: Config,
    url: str,
    jobs: Sequence[Job],
    say_ready: Callable[[], None],
    ready_timeout_s: float,
    watch_redis: Callable[[], None],
    run: Callable[[Supervisor], None] | None = None,
    *,
    output: BinaryIO | None = None,
    show: Callable[[Sequence[str]], None] | None = None,
) -> int:
    """Keep *jobs* running until a signal comes, or *run* returns; return the exit code.

    They write to *output*, where it is given, and *show* is told who is not ready yet.
    """
    from pipeline.process.supervisor import ChildFailed, Supervisor

    logs = contextlib.ExitStack()

    def open_log() -> RedisLog:
        from pipeline.log.redis import RedisLog

        return logs.enter_context(contextlib.closing(RedisLog(url, Names(config.log.namespace))))

    supervisor = Supervisor(
        open_log,
        jobs,
        program=(sys.executable, __file__),
        environment=_child_environment(os.environ, url, secrets_of(config)),
        watch_redis=watch_redis,
        output=output,
    )
    supervisor.listen()
    try:
        supervisor.start()
        if supervisor.wait_until_ready(ready_timeout_s, show):
            say_ready()
            (run or Supervisor.run)(supervisor)
        supervisor.stop([[WEB], [TOKENIZE, GENERATE, DETOKENIZE]])  # web drains; what is in hand then stays in the log
    except ChildFailed:
        return EXIT_CONFIG  # the child has said why
    finally:
        supervisor.kill()
        logs.close()
    return 0


def _nothing() -> None:
    """Do nothing: a Redis that somebody else started is theirs to keep alive."""


def _child_environment(
    environment: Mapping[str, str], url: str, secrets: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of a worker: flags come by its command line, *secrets* and the URL, which may hold a
    password, here.
    """
    from pipeline.process import failpoints

    tests = (failpoints.VARIABLE, failpoints.FOLDER_VARIABLE)
    kept = {name: value for name, value in environment.items() if not name.startswith("MINISGL_") or name in tests}
    # One thread of a worker does the work; with a heap for each, glibc keeps what another one could use.
    return {"MALLOC_ARENA_MAX": "1"} | kept | dict(secrets or {}) | {"MINISGL_REDIS_URL": url}


def _banner(config: Config, folder: Path, seconds: float) -> None:
    from stages.generate.model.checkpoint import is_demo
    from web.listener import url_here

    url = url_here(config.web.host, config.web.port)
    if is_demo(folder):
        print(
            f"\n{DEMO_ANSWERS}\n"
            "For another, pass a model of the Hugging Face hub, or a folder: minisgl serve --model Qwen/Qwen3-0.6B",
            flush=True,
        )
    print(
        f"\nMiniSGL is ready after {seconds:.1f} s: {url}/v1\n\n"
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        '    -d \'{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}\'\n\n'
        "Ctrl-C ends it.\n",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
