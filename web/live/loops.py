"""Endless tasks that live and die together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import NoReturn

CANCEL_AGAIN_S = 0.05


async def run_all(*loops: Coroutine[object, object, NoReturn]) -> None:
    """Run endless *loops* until cancelled, or until one breaks, whose error is raised; none is left behind.

    Each is cancelled until it heeds: in Python 3.11 `asyncio.wait_for`, through which redis-py sends, swallows a
    cancellation that comes as it is done.
    """
    tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        broken = [task for task in tasks if task.done()]
        while pending := [task for task in tasks if not task.done()]:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    for task in broken:
        task.result()
