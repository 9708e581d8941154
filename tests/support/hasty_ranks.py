"""`minisgl` whose ranks wait for a frame for only so long: `hasty_ranks.py SECONDS serve --tp 2 [flags]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import minisgl
from ops.serve import processes


def main(seconds: str, *arguments: str) -> int:
    """Run a command; return its exit code."""
    processes.PROGRAM = program(seconds)  # type: ignore[misc,assignment]  # what it starts, too
    if "--rank" in arguments:
        from stages.generate.ranks.channel import Follower, Leader

        for end in (Leader, Follower):
            defaults = end.__init__.__kwdefaults__
            assert defaults is not None
            defaults["timeout_s"] = float(seconds)
    return minisgl.main(arguments)


def program(seconds: str) -> Sequence[str]:
    """Return the start of such a command line."""
    return sys.executable, __file__, seconds


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
