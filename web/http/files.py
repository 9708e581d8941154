"""How many files this process may open, and how many connections it takes so that some are left."""

from __future__ import annotations

import resource
from typing import Final

import structlog

logger = structlog.get_logger()

MOST_FILES: Final = 65_536
OTHER_FILES: Final = 256
"""Files kept free for other uses: connections to Redis, the log, modules, and connections that are being closed."""
MOST_CONNECTIONS: Final = 2048
"""Each takes 15 KB, and one that has sent most of a long head 140 KB."""

LEAST_AHEAD: Final = 64
MOST_AHEAD: Final = 2048


def raise_file_limit() -> int:
    """Raise the soft limit on open files as far as the hard one allows; return it. The usual 1,024 are soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_FILES if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:  # macOS may allow less than its hard limit says
        logger.warning("file_limit_not_raised", limit=soft, wanted=wanted, error=str(error))
        return soft
    return wanted


def most_connections(num_files: int, max_queued_requests: int) -> int:
    """Return how many connections a process takes that may open *num_files* and has a queue of requests."""
    return min(max(num_files - OTHER_FILES, num_files // 2), max(MOST_CONNECTIONS, 2 * max_queued_requests))


def most_ahead(num_files: int, most: int) -> int:
    """Return how many connections may be accepted before the loop takes them into the *most* that it has. With few of
    them, a probe behind a burst of others would wait to be accepted."""
    return max(min(num_files - OTHER_FILES - most, MOST_AHEAD), LEAST_AHEAD)
