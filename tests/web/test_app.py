"""How the application is set up, where a test of what comes of it would take a minute: that one waits for the night."""

from __future__ import annotations

import asyncio

from pipeline.log.redis import AsyncRedisLog
from pipeline.names import Names
from web.app import create_app
from web.live.frontend import Frontend


def test_no_answer_is_cut_for_its_length(redis_url: str) -> None:
    """The stream of more than a minute is in `test_raw_sockets.py`."""

    async def scenario() -> None:
        log = AsyncRedisLog(redis_url, Names())
        try:
            app = create_app(Frontend("web-0", log, lambda **_: None))
            assert app.config["RESPONSE_TIMEOUT"] is None and app.config["BODY_TIMEOUT"] is None
        finally:
            await log.close()

    asyncio.run(scenario())
