"""`minisgl bench attack`, or `make attack`: a server under hostile clients, and what innocent ones notice of it.

`wire` speaks HTTP, `bodies` has what attackers send, `kinds` has the attackers. `clients` is a process of attackers or
of innocent clients. `target` starts the server and looks at it, `together` and `alone` measure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Attack; return the exit code.

    Raises:
        ConfigError: The flags cannot work.
        MiniSGLError: The server did not start, or a process of the clients failed.
    """
    from ops.bench.attack import command

    return command.main(arguments, environment)
