"""`minisgl serve` and `minisgl stage`: check the set-up, start the processes, stay until a signal comes."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from ops.serve.config import ServerConfig, StageConfig, parse_command, stage_flags, stage_of
from ops.serve.nodes import with_nodes
from ops.serve.processes import Processes
from ops.serve.shares import Share, shares_of
from pipeline.errors import ConfigError
from pipeline.flags import flags_for
from pipeline.names import ARCHIVE, DETOKENIZE, GENERATE, TOKENIZE, WEB, Names
from pipeline.process.config import ModelConfig
from stages.archive.config import ArchiveConfig, FilesConfig
from stages.detokenize.config import DetokenizeConfig
from stages.generate.model.spec import Loading
from stages.generate.setup.config import EngineConfig, GenerateConfig
from stages.generate.setup.contradictions import check_flags
from stages.tokenize.config import TokenizeConfig
from web.config import LEAST_LOG_BYTES, ArchivedConfig, KeysConfig, WebStageConfig

C = TypeVar("C", bound=ServerConfig | TokenizeConfig | GenerateConfig | DetokenizeConfig)
W = TypeVar("W", bound=ServerConfig | WebStageConfig)

DEMO_ANSWERS: Final = "No --model was given, so the demo model answers; ask it what it can do."
READY_TIMEOUT_S: Final = 600.0
FOREVER_S: Final = float("inf")
WEB_DRAIN_S: Final = 30.0
LOG_SHARE: Final = 10
"""The log of an embedded Redis may have a tenth of the memory. While Redis rewrites its file it can need twice that."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run `serve [flags]` or `stage STAGE [flags]`; return the exit code.

    Raises:
        ConfigError: The command line or the set-up cannot work.
    """
    config = parse_command(arguments, environment)
    if isinstance(config, ServerConfig):
        return serve(config)
    stage = stage_of(arguments[1:])
    if isinstance(config, ArchiveConfig) and config.files.leave:
        return leave_archive(config)
    if config.worker.slot is not None:
        if config.worker.ready_file:
            raise ConfigError("--ready-file: not with --slot, which starts a worker alone; leave one of them out")
        from ops.serve.worker import run_worker

        return run_worker(config, stage)
    return run_stage(config, stage)


def serve(config: ServerConfig) -> int:
    """Start Redis, unless its URL is given, and every stage; stay until a signal comes."""
    from pipeline.process.observe import configure_logging
    from stages.generate.model.folder import model_folder
    from web.http.listener import open_listener

    configure_logging()
    began_s = time.monotonic()
    _check_keys(config.keys)
    if config.serve.shell:
        from ops.serve.with_shell import check_terminal, with_shell_key

        check_terminal()
        config = with_shell_key(config)
    _check_origins(config)
    check_flags(config.engine)
    config = with_nodes(config)
    folder = model_folder(config.model.model, tokenizer=config.model.tokenizer, loading=config.engine.loading)
    _check_ranks(config.engine, folder)
    shares = shares_of(config.engine, config.serve.dp, "--dp")
    config = _with_archive(_with_budget(config))
    archive = config.archived.archive
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(_with_redis(config))
        listener = stack.enter_context(open_listener(config.web.host, config.web.port))
        config = _with_model(config, folder)
        if archive:  # only now: a server that cannot start leaves no folder behind
            _make_archive(Path(archive), f"--archive {archive}", processes.url, config.log.namespace)
        _say_redis(config)
        # First, because it takes longest to be ready.
        _add_engines(processes, config, shares)
        for _ in range(config.serve.frontends):
            _add_web(processes, config, listener.fileno())
        for _ in range(max(config.serve.tokenizers, 1)):
            processes.add(TOKENIZE, stage_flags(config, TOKENIZE))
        for _ in shares:
            processes.add(DETOKENIZE, stage_flags(config, DETOKENIZE))
        if archive:
            processes.add(ARCHIVE, flags_for([config.log, FilesConfig(to=archive)]))
        timeout_s = READY_TIMEOUT_S if config.nodes.nnodes == 1 else FOREVER_S
        if config.serve.shell:
            from ops.serve.with_shell import run_with_shell

            return run_with_shell(processes, config, DEMO_ANSWERS if _is_demo(folder) else "", timeout_s)
        return processes.run(lambda: _banner(config, folder, time.monotonic() - began_s), timeout_s)


def run_stage(config: StageConfig, stage: str) -> int:
    """Start the workers of one stage against a Redis that runs; stay until a signal comes."""
    from pipeline.process.observe import configure_logging

    configure_logging()

    import structlog

    from pipeline.log.check import check_server
    from stages.generate.model.folder import model_folder
    from web.http.listener import open_listener

    if not config.log.redis_url:
        raise ConfigError(f"stage {stage}: --redis-url is missing; pass the URL all stages share")
    if isinstance(config, WebStageConfig):
        _check_keys(config.keys)
        _check_origins(config)
        config = _with_archive(config)
    if isinstance(config, ArchiveConfig) and not config.files.to:
        raise ConfigError("stage archive: --to is missing; name the folder that all archivers share")
    if isinstance(config, GenerateConfig):
        check_flags(config.engine)
        config = with_nodes(config)
    max_log_bytes, acks_disk = 0, False
    if isinstance(config, WebStageConfig):
        max_log_bytes, acks_disk = config.clients.max_log_bytes or 0, config.requests.acks_disk
    check_server(config.log.redis_url, max_log_bytes, config.log.namespace, acks_disk, config.worker.wait_for_redis_s)
    if isinstance(config, ArchiveConfig):
        folder = config.files.folder
        _make_archive(folder, f"--to {config.files.to}", config.log.redis_url, config.log.namespace)
        config = dataclasses.replace(config, files=dataclasses.replace(config.files, to=str(folder)))
    processes = Processes(config, config.log.redis_url)
    with contextlib.ExitStack() as stack:
        if isinstance(config, WebStageConfig):
            listener = stack.enter_context(open_listener(config.web.host, config.web.port))
            for _ in range(config.worker.replicas):
                _add_web(processes, config, listener.fileno())
        elif isinstance(config, ArchiveConfig):
            for _ in range(config.worker.replicas):
                processes.add(stage, stage_flags(config, stage))
        else:
            text_alone = stage != GENERATE
            loading = config.engine.loading if isinstance(config, GenerateConfig) else Loading()
            model = config.model
            folder = model_folder(model.model, tokenizer=model.tokenizer, text_alone=text_alone, loading=loading)
            config = _with_model(config, folder)
            if isinstance(config, GenerateConfig):
                _check_ranks(config.engine, folder)
                _add_engines(processes, config, shares_of(config.engine, config.worker.replicas, "--replicas"))
            else:
                for _ in range(config.worker.replicas):
                    processes.add(stage, stage_flags(config, stage))

        def say_ready() -> None:
            structlog.get_logger().info("stage_ready", stage=stage, replicas=config.worker.replicas)

        return processes.run(say_ready, FOREVER_S)  # others may come later


def leave_archive(config: ArchiveConfig) -> int:
    """End the archiving of a namespace; return the exit code.

    Raises:
        ConfigError: An archiver runs, or there is no URL.
    """
    from pipeline.log.forgetting import ended_inbox
    from pipeline.log.redis import RedisLog

    if not config.log.redis_url:
        raise ConfigError("stage archive --leave: --redis-url is missing; pass the URL all stages share")
    with contextlib.closing(RedisLog(config.log.redis_url, Names(config.log.namespace))) as log:
        living = [slot for slot in log.statuses(ARCHIVE) if not log.lease(slot).is_free]
        if living:
            raise ConfigError(f"stage archive --leave: {', '.join(living)} runs; end every archiver first")
        waiting = log.backlog(ended_inbox(log.names))
        if not log.close_archive():
            print(f"The namespace {config.log.namespace} has no archive.")
            return 1
    print(f"The namespace {config.log.namespace} is not archived any more; {waiting} requests were waiting for it.")
    return 0


def _add_engines(processes: Processes, config: ServerConfig | GenerateConfig, shares: Sequence[Share]) -> None:
    for share in shares:
        flags = [*stage_flags(config, GENERATE), *flags_for([share.config])]
        processes.add(GENERATE, flags, num_ranks=config.engine.tp, nodes=config.nodes, variables=share.variables)


def _add_web(processes: Processes, config: ServerConfig | WebStageConfig, fd: int) -> None:
    processes.add(WEB, [*stage_flags(config, WEB), "--listen-fd", str(fd)], fds=(fd,), drain_s=WEB_DRAIN_S)


def _with_model(config: C, folder: Path) -> C:
    """Return *config* for workers, which get the folder. A model that was fetched is still served under its name."""
    from stages.generate.model.folder import served_name

    changes: dict[str, object] = {"model": ModelConfig(str(folder))}
    name = served_name(config.model.model)
    if name and isinstance(config, ServerConfig | GenerateConfig) and not config.names.served_model_name:
        changes["names"] = dataclasses.replace(config.names, served_model_name=(name,))
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]  # these are its fields


def _with_budget(config: ServerConfig) -> ServerConfig:
    """Return *config* with the default of --max-log-bytes: a Redis of our own must leave memory to the stages."""
    if config.clients.max_log_bytes is not None or config.log.redis_url:
        return config
    from pipeline.process.redis_server import machine_memory_bytes

    max_log_bytes = max(machine_memory_bytes() // LOG_SHARE, LEAST_LOG_BYTES)
    return dataclasses.replace(config, clients=dataclasses.replace(config.clients, max_log_bytes=max_log_bytes))


def _with_archive(config: W) -> W:
    """Return *config* with the whole path of --archive. Raises ConfigError if what is there is no archive."""
    if not config.archived.archive:
        return config
    from pipeline.archive.folder import archive_id

    folder = Path(config.archived.archive).expanduser().absolute()
    archive_id(folder)
    return dataclasses.replace(config, archived=ArchivedConfig(str(folder)))


def _make_archive(folder: Path, said: str, redis_url: str, namespace: str) -> None:
    """Make *folder* the archive of the namespace. *said*: the flag that names it.

    Raises:
        ConfigError: It cannot be one, or the namespace has another one; then nothing is made.
    """
    from pipeline.archive.folder import archive_id, make_archive
    from pipeline.log.redis import RedisLog

    with contextlib.closing(RedisLog(redis_url, Names(namespace))) as log:
        found = log.archive_id()
    if found and archive_id(folder) != found:
        raise ConfigError(
            f"{said}: the namespace {namespace} has another archive, {found}; name its folder, or end its archiving "
            "with minisgl stage archive --leave"
        )
    make_archive(folder, namespace)


def _check_keys(config: KeysConfig) -> None:
    """Read the API keys and their limits as a frontend will, before anything starts. Raises ConfigError."""
    if config.api_key or config.limits or config.admin_key is not None:
        from web.http.keys import read_keys

        read_keys(config.api_key, config.limits, config.admin_key)


def _check_ranks(config: EngineConfig, folder: Path) -> None:
    """Check that --tp can divide the model in *folder*, before anything starts. Raises ConfigError."""
    from stages.generate.model.checkpoint import check_folder

    if config.tp > 1:
        check_folder(folder, config.loading).sharded(0, config.tp)


def _check_origins(config: ServerConfig | WebStageConfig) -> None:
    """Read which proxies, names and pages are allowed, as a frontend will; warn once if any name is. Raises
    ConfigError."""
    import structlog

    from web.http.connection_limit import read_proxies
    from web.http.origins import ANY, read_origins

    read_proxies(config.clients.trusted_proxies)
    origins = read_origins(config.origins, config.web.host)
    if ANY in origins.hosts and not (config.origins.allow_host or config.keys.api_key or config.keys.limits):
        structlog.get_logger().warning(
            "any_host_allowed",
            host=config.web.host,
            risk="web pages whose name points here can use the server (DNS rebinding)",
            remedy="--allow-host NAME, or API keys",
        )


@contextlib.contextmanager
def _with_redis(config: ServerConfig) -> Iterator[Processes]:
    """Give the processes of a server on the Redis of --redis-url, or on an embedded one, which ends with the block."""
    if config.log.redis_url:
        from pipeline.log.check import check_server

        if config.data.repair:
            raise ConfigError("--repair is for the data of the embedded server; leave it out, or leave out --redis-url")
        max_log_bytes, acks_disk = config.clients.max_log_bytes or 0, config.requests.acks_disk
        check_server(config.log.redis_url, max_log_bytes, config.log.namespace, acks_disk)
        yield Processes(config, config.log.redis_url)
        return
    from pipeline.process.redis_server import EmbeddedRedis

    if config.requests.acks:
        raise ConfigError(
            f"--acks {config.requests.acks}: the embedded Redis has no replicas, so every request would get 503; pass "
            "--redis-url, or --acks-disk alone"
        )
    max_log_bytes = config.clients.max_log_bytes or 0
    server = EmbeddedRedis(
        config.data_dir,
        is_repair_allowed=config.data.repair,
        max_memory_bytes=max_log_bytes + max_log_bytes // 3,  # so web processes refuse requests long before Redis does
        syncs_all=config.requests.acks_disk,
    )
    try:
        if config.requests.acks_disk:  # its version is that of a server on PATH where there is no wheel
            from pipeline.log.check import check_server

            check_server(server.url, acks_disk=True)
        yield Processes(config, server.url, server.watch)
    finally:
        server.stop()


def _say_redis(config: ServerConfig) -> None:
    import structlog

    from pipeline.log.address import parse_address

    url = config.log.redis_url
    where = {"url": parse_address(url).shown} if url else {"data": str(config.data_dir)}
    structlog.get_logger().info("redis_ready", **where)


def _is_demo(folder: Path) -> bool:
    from stages.generate.model.checkpoint import is_demo

    return is_demo(folder)


def _banner(config: ServerConfig, folder: Path, seconds: float) -> None:
    from web.http.listener import url_here

    url = url_here(config.web.host, config.web.port)
    if _is_demo(folder):
        print(
            f"\n{DEMO_ANSWERS}\n"
            "For another, pass a model of the Hugging Face hub, or a folder: minisgl serve --model Qwen/Qwen3-0.6B",
            flush=True,
        )
    playground = f"In a browser: {url}\n" if config.clients.pages else ""
    key = " -H 'authorization: Bearer KEY'" if config.keys.api_key or config.keys.limits else ""
    print(
        f"\nMiniSGL is ready after {seconds:.1f} s.\n\n"
        f"{playground}"
        f"OpenAI API:   {url}/v1\n\n"
        f"  curl {url}/v1/chat/completions{key} -H 'content-type: application/json' \\\n"
        '    -d \'{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}\'\n\n'
        "Ctrl-C ends it.\n",
        flush=True,
    )
