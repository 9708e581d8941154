"""How the application is set up, where a test of what it does would take a minute."""

from __future__ import annotations

from pipeline.memory_log import MemoryLog
from web.app import MAX_BODY_BYTES, create_app
from web.frontend import Frontend
from web.ready import Limits
