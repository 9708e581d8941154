"""The command `minisgl replay`: a table of its actions, each loaded when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from pipeline.errors import ConfigError

USAGE: Final = """\
usage: minisgl replay show UID [--at N] [flags]        a request when it had N tokens
       minisgl replay run UID.. [flags]                compute requests again, and compare token by token
       minisgl replay diff FILE_A FILE_B [flags]       compare two recordings of the same requests
       minisgl replay drive FILE|--since T [flags]     send recorded requests again, with their timing
       minisgl replay schedule ENGINE [flags]          plan an engine's last steps again, and compare
       minisgl replay dump [UID ..] [flags] FILE       write requests into a file, with all that happened to them
       minisgl replay import FILE [flags]              put the requests of a file into a log
       minisgl replay forget UID..|--user U [flags]    remove requests, with everything that is kept of them

Each explains its flags with --help.
"""
ACTIONS: Final[Mapping[str, str]] = {
    "show": "ops.replay.show:main",
    "run": "ops.replay.run:main",
    "diff": "ops.replay.run:diff",
    "drive": "ops.replay.drive:main",
    "schedule": "ops.replay.schedule:main",
    "dump": "ops.replay.dump:main",
    "import": "ops.replay.dump:import_file",
    "forget": "ops.replay.forget:main",
}
"""Module and function of each, which takes arguments and environment and returns the exit code."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Do one action; return its exit code.

    Raises:
        ConfigError: There is no such action.
    """
    if not arguments or arguments[0] in ("--help", "-h"):
        sys.stdout.write(USAGE)
        return 0
    if arguments[0] not in ACTIONS:
        raise ConfigError(f"replay: {arguments[0]} given, expected one of {', '.join(ACTIONS)}")
    module, _, function = ACTIONS[arguments[0]].partition(":")
    code: int = getattr(importlib.import_module(module), function)(arguments[1:], environment)
    return code
