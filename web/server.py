"""The web process: its slot, its listening socket, its server, and how it stops.

first signal    no new requests; open streams have DRAIN_S; the others end as Failed(shutting_down); exit 0
second signal   exit at once; the log keeps the accepted requests
in any case     the process ends HARD_EXIT_S after the server was told to stop
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, NoReturn

import structlog

from pipeline.errors import LogError, LogFull, LogUnavailable
from pipeline.log.protocol import RequestLimits
from pipeline.log.redis import AsyncRedisLog, RedisLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import HTTP_REQUESTS, HTTP_RESPONSES
from pipeline.metrics.process import ProcessMeasures
from pipeline.names import WEB, Names, slot_index
from pipeline.stage.slots import AGAIN_S, SlotLease, acquire_slot
from web.app import create_app
from web.config import ClientConfig, WebStageConfig
from web.http.asgi import HttpConfig
from web.http.connection_limit import Proxies, read_proxies
from web.http.connections import serve
from web.http.files import most_ahead, most_connections, raise_file_limit
from web.http.key_watch import KeyWatch
from web.http.keys import Keys, read_keys
from web.http.listener import open_listener, url_to
from web.http.log_limiter import LogLimiter
from web.http.origins import Origins, read_origins
from web.http.page_files import PAGES
from web.live.frontend import Frontend
from web.live.janitor import Janitor
from web.live.revoked import end_revoked

logger = structlog.get_logger()

DRAIN_S: Final = 10.0
HARD_EXIT_S: Final = 3.0
EXIT_HARD: Final = 1
BEAT_S: Final = 0.5
YOUNG: Final = 5_000
"""Objects between two collections of young ones. A step of many streams makes hundreds, none of them in a cycle."""
SWITCH_INTERVAL_S: Final = 0.0005
"""How long a thread that folds histories may hold the interpreter while the loop waits for it."""
COLLECT_EVERY_S: Final = 1.0
COLLECT_SHARE: Final = 0.001
"""Largest share of the time that full garbage collections take."""
SHARE_OF_STORED: Final = 4
"""Stored responses may take one part in so many of --max-log-bytes."""
JANITOR_PATIENCE_S: Final = 1.0


def run(config: WebStageConfig) -> int:
    """Run one web process until a signal stops it; return the exit code.

    Raises:
        ConfigError: The address is not available, or the API keys or the allowed names and pages are wrong.
    """
    of_keys, max_log_bytes = config.keys, config.clients.max_log_bytes or 0
    read = functools.partial(read_keys, of_keys.api_key, of_keys.limits, of_keys.admin_key)
    watch = KeyWatch(of_keys.limits, functools.partial(read, max_log_bytes=max_log_bytes, may_lack_keys=True))
    origins = read_origins(config.origins, config.web.host)
    proxies = read_proxies(config.clients.trusted_proxies)
    if config.listen.listen_fd is None:
        listener = open_listener(config.web.host, config.web.port)
    else:
        listener = socket.socket(fileno=config.listen.listen_fd)
    lease_ms = int(config.log.lease_s * 1000)
    hard_exit = threading.Timer(HARD_EXIT_S, os._exit, (EXIT_HARD,))
    hard_exit.daemon = True
    stop = threading.Event()
    measures = ProcessMeasures()

    def open_log() -> RedisLog:
        return RedisLog(config.log.redis_url, Names(config.log.namespace), _limits(config))

    with (
        contextlib.closing(open_log()) as janitor_log,
        Seat(open_log, lease_ms, config.worker.slot, measures) as seat,
    ):
        most_bytes = (config.clients.max_log_bytes or 0) // SHARE_OF_STORED
        janitor = Janitor(janitor_log, measures=measures, most_stored_bytes=most_bytes)
        sweeping = threading.Thread(target=janitor.run, args=(stop,), name="janitor", daemon=True)
        sweeping.start()
        try:
            return asyncio.run(_serve(config, watch, origins, proxies, listener, seat, hard_exit))
        finally:
            stop.set()
            sweeping.join(JANITOR_PATIENCE_S)
            hard_exit.cancel()


class Seat:
    """The slot of this process and its status. A lost slot is replaced, perhaps by another; the status stays."""

    def __init__(
        self, open_log: Callable[[], RedisLog], lease_ms: int, preferred: int | None, measures: Measures
    ) -> None:
        self._log, self._lease_log = open_log(), open_log()
        self._lease_ms = lease_ms
        self._said: dict[str, object] = {}
        self.measures = measures
        while True:
            try:
                self.slot_lease = self._take(preferred)
                return
            except (LogUnavailable, LogFull) as error:  # as the other stages do in `slot_leases`
                logger.warning("no_slot", stage=WEB, error=str(error))
                time.sleep(AGAIN_S)

    def __enter__(self) -> Seat:
        return self

    def __exit__(self, *_: object) -> None:
        self.slot_lease.leave()
        self._log.close()
        self._lease_log.close()

    @property
    def slot(self) -> str:
        return self.slot_lease.owner.slot

    def say(self, **changes: object) -> None:
        """As SlotLease.say."""
        self._said |= changes
        self.slot_lease.say(**changes)

    def retake(self) -> None:
        """Take a slot again, the lost one if it is free. Raises as the log does."""
        logger.warning("slot_lost", slot=self.slot, epoch=self.slot_lease.owner.epoch)
        before, self.slot_lease = self.slot_lease, self._take(slot_index(self.slot))
        before.leave()
        self.slot_lease.say(**self._said)

    def _take(self, preferred: int | None) -> SlotLease:
        owner = acquire_slot(self._log, WEB, self._lease_ms, preferred=preferred)
        structlog.contextvars.bind_contextvars(slot=owner.slot)
        return SlotLease(self._lease_log, owner, self._lease_ms, self.measures)


def _limits(config: WebStageConfig) -> RequestLimits:
    return RequestLimits(
        timeout_s=config.requests.request_timeout_s,
        retention_s=config.log.retention_s,
        response_retention_s=config.log.response_retention_s,
        background_timeout_s=config.background.background_timeout_s,
        max_background=config.background.max_background,
        max_queued=config.requests.max_queued_requests,
        acks=config.requests.acks,
        acks_disk=config.requests.acks_disk,
    )


def _address(listener: socket.socket) -> str:
    name = listener.getsockname()
    return url_to(*name[:2]) if isinstance(name, tuple) else f"unix:{name!s}"


async def _serve(
    config: WebStageConfig,
    watch: KeyWatch,
    origins: Origins,
    proxies: Proxies,
    listener: socket.socket,
    seat: Seat,
    hard_exit: threading.Timer,
) -> int:
    log_limiter = LogLimiter()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: _log_loop_error(context, log_limiter))
    seat.say(address=_address(listener))
    log = AsyncRedisLog(config.log.redis_url, Names(config.log.namespace), _limits(config))
    frontend = Frontend(
        seat.slot,
        log,
        seat.say,
        disconnect_grace_s=config.clients.disconnect_grace_s,
        strict_model_names=config.clients.strict_model_names,
        engines_on_demand=config.demand.engines_on_demand,
        max_log_bytes=config.clients.max_log_bytes or 0,
        measures=seat.measures,
        archive=config.archived.archive,
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _freeze()
    stop = asyncio.Event()
    beat = asyncio.create_task(_beat(seat, frontend), name="beat")
    await frontend.readiness.look()
    server = asyncio.create_task(
        _listen(
            frontend,
            watch.keys,
            origins,
            proxies,
            listener,
            config.clients,
            config.requests.max_queued_requests,
            log_limiter,
            stop,
        ),
        name="server",
    )
    tail = asyncio.create_task(frontend.run(), name="frontend")
    collector = asyncio.create_task(_collect(), name="collector")
    signalled = asyncio.create_task(_first_signal(), name="signal")
    others = {beat, tail, collector, signalled}
    if config.keys.limits:
        watching = watch.run(lambda owners: frontend.ask(end_revoked(frontend, owners)))
        others.add(asyncio.create_task(watching, name="limits"))
    done, _ = await asyncio.wait({server, *others}, return_when=asyncio.FIRST_COMPLETED)
    broken = {task for task in done if task is not signalled or task.exception() is not None}
    for task in broken:
        logger.error("task_ended", task=task.get_name(), exc_info=task.exception())
    await frontend.drain(DRAIN_S)
    hard_exit.start()
    stop.set()
    await asyncio.wait({server})
    for task in others:
        task.cancel()
    await asyncio.wait(others)
    await log.close()
    return 1 if broken else 0


def _freeze() -> None:
    """Leave modules and the app out of all collections, and full collections to `_collect`."""
    gc.collect()
    gc.freeze()
    _, middle, _ = gc.get_threshold()
    gc.set_threshold(YOUNG, middle, 1_000_000)


async def _collect() -> None:
    """Collect the cycles that requests leave behind before memory grows.

    Python decides by numbers of objects. This decides by time: with 1,500 connections, a full collection takes 100 ms.
    It finds little, because connections and bodies are in no cycles once they have ended.
    """
    while True:
        began_s = time.thread_time()
        if any(gc.get_count()[1:]):
            gc.collect()
        took_s = time.thread_time() - began_s
        await asyncio.sleep(max(COLLECT_EVERY_S, took_s / COLLECT_SHARE))


async def _listen(
    frontend: Frontend,
    keys: Keys,
    origins: Origins,
    proxies: Proxies,
    listener: socket.socket,
    clients: ClientConfig,
    max_queued: int,
    log_limiter: LogLimiter,
    stop: asyncio.Event,
) -> None:
    num_files = raise_file_limit()
    most = most_connections(num_files, max_queued)
    config = HttpConfig(clients.max_body_bytes, most, log_limiter, keys=keys, proxies=proxies)
    pages = PAGES if clients.pages else None
    app = create_app(frontend, keys, origins=origins, max_body_bytes=clients.max_body_bytes, pages=pages)

    def count_probe() -> None:
        frontend.measures.add(HTTP_REQUESTS, "/health", "GET")
        frontend.measures.add(HTTP_RESPONSES, "/health", "GET", "200")

    await serve(app, listener, config, stop, most_ahead=most_ahead(num_files, most), answered_probe=count_probe)


async def _beat(seat: Seat, frontend: Frontend) -> NoReturn:
    """Tell the watchdog that the loop is alive; when the slot is lost, take one again and listen under its name.

    The beat goes on meanwhile: the slot of a dead holder is free when its lease has run out, which may take long.
    """
    retaking: asyncio.Task[None] | None = None
    while True:
        seat.slot_lease.report_progress()
        if retaking is not None and retaking.done():
            try:
                retaking.result()
                frontend.rename(seat.slot)
            except LogError as error:
                logger.warning("no_slot", stage=WEB, error=str(error))
            retaking = None
        if retaking is None and seat.slot_lease.lost.is_set():
            retaking = asyncio.create_task(asyncio.to_thread(seat.retake))
        await asyncio.sleep(BEAT_S)


async def _first_signal() -> None:
    """Wait for SIGTERM or SIGINT. The same signal again ends the process at once.

    The other one does not: at Ctrl-C the terminal sends SIGINT to all processes, then the supervisor sends SIGTERM.
    """
    came: set[signal.Signals] = set()
    first = asyncio.Event()

    def handle(number: signal.Signals) -> None:
        logger.info("signal", name=number.name, again=number in came)
        if number in came:
            os._exit(EXIT_HARD)
        came.add(number)
        first.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, handle, number)
    await first.wait()


def _log_loop_error(context: dict[str, Any], log_limiter: LogLimiter) -> None:
    """Log an error that no task has handled. Without a free file, asyncio reports many each second."""
    error, reason = context.get("exception"), context.get("message")
    times = log_limiter.times(f"{reason} {error!r}"[:256])
    if not times:
        return
    if isinstance(error, OSError):  # a client whose connection broke
        logger.info("connection_broke", error=str(error), times=times)
        return
    logger.error("loop_error", reason=reason, times=times, exc_info=error)
