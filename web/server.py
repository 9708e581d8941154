"""The web process: its slot, its listening socket, Hypercorn, and how it stops.

first signal    nothing new is taken; open streams have DRAIN_S; what is left ends as Failed(shutting_down); exit 0
second signal   exit at once; the log keeps what was accepted
in any case     HARD_EXIT_S after the server was told to stop, the process ends
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from typing import Any, Final

import hypercorn.asyncio
import hypercorn.config
import structlog

from pipeline.config import Config
from pipeline.names import WEB, Names
from pipeline.redis_log import AsyncRedisLog, RedisLog
from pipeline.slots import Place, acquire_slot
from web.app import create_app
from web.frontend import Frontend
from web.listener import BACKLOG, open_listener
from web.ready import Limits

logger = structlog.get_logger()

DRAIN_S: Final = 10.0
HARD_EXIT_S: Final = 3.0
EXIT_HARD: Final = 1


def run(config: Config) -> int:
    """Be one web process until a signal stops it; return the exit code.

    Raises:
        ConfigError: The address cannot be had.
    """
    if config.listen.listen_fd is None:
        listener = open_listener(config.web.host, config.web.port)
    else:
        listener = socket.socket(fileno=config.listen.listen_fd)
    url, names = config.log.redis_url, Names(config.log.namespace)
    lease_log = RedisLog(url, names)
    lease_ms = int(config.log.lease_s * 1000)
    place = Place(lease_log, acquire_slot(lease_log, WEB, lease_ms, preferred=config.worker.slot), lease_ms)
    structlog.contextvars.bind_contextvars(slot=place.owner.slot)
    hard_exit = threading.Timer(HARD_EXIT_S, os._exit, (EXIT_HARD,))
    hard_exit.daemon = True
    try:
        return asyncio.run(_serve(config, listener, place, hard_exit))
    finally:
        place.leave()
        lease_log.close()
        hard_exit.cancel()


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _serve(config: Config, listener: socket.socket, place: Place, hard_exit: threading.Timer) -> int:
    asyncio.get_running_loop().set_exception_handler(_log_loop_error)
    place.say(address=_address(listener))
    log = AsyncRedisLog(config.log.redis_url, Names(config.log.namespace))
    limits = Limits(
        timeout_s=config.requests.request_timeout_s,
        retention_s=config.log.retention_s,
        max_queued=config.requests.max_queued_requests,
    )
    frontend = Frontend(place.owner.slot, log, limits, place.say)
    stop = asyncio.Event()
    server = asyncio.create_task(_listen(frontend, listener, stop), name="server")
    beat = asyncio.create_task(_beat(place), name="beat")
    tail = asyncio.create_task(frontend.run(), name="frontend")
    signalled = asyncio.create_task(_first_signal(), name="signal")
    done, _ = await asyncio.wait({server, beat, tail, signalled}, return_when=asyncio.FIRST_COMPLETED)
    broken = done - {signalled}
    for task in broken:
        logger.error("task_ended", task=task.get_name(), exc_info=task.exception())
    await frontend.drain(DRAIN_S)
    hard_exit.start()  # a client that never reads holds Hypercorn for ever: its issue 308, StreamWriter.wait_closed
    stop.set()
    await asyncio.wait({server})
    for task in (beat, tail, signalled):
        task.cancel()
    await asyncio.wait({beat, tail, signalled})
    await log.close()
    return 1 if broken else 0


async def _listen(frontend: Frontend, listener: socket.socket, stop: asyncio.Event) -> None:
    config = hypercorn.config.Config()
    config.bind = [f"fd://{listener.detach()}"]  # Hypercorn closes it
    config.backlog = BACKLOG
    config.alpn_protocols = ["http/1.1"]
    config.h11_max_incomplete_size = 64 << 10
    config.include_server_header = False
    config.keep_alive_timeout = 120  # the default, 5 s, races with clients that reuse a connection
    config.keep_alive_max_requests = 10**9
    config.graceful_timeout = 1
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn.error")
    await hypercorn.asyncio.serve(create_app(frontend), config, shutdown_trigger=stop.wait)


async def _beat(place: Place) -> None:
    """Tell the watchdog that the loop is alive; end when somebody else has the slot."""
    while not place.lost.is_set():
        place.came_round()
        await asyncio.sleep(1)
    logger.error("slot_lost", slot=place.owner.slot)


async def _first_signal() -> None:
    """Wait for SIGTERM or SIGINT. The same one again ends the process at once.

    Not so the other one: at Ctrl-C the terminal sends SIGINT to all processes, and then the supervisor SIGTERM.
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


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if isinstance(error, OSError):  # a client whose connection broke: Hypercorn's issue 361
        logger.info("connection_broke", error=str(error))
        return
    logger.error("loop_error", reason=context.get("message"), exc_info=error)
