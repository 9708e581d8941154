"""The command: a table of commands, each imported when it is called; and `LLM`, `SamplingParams` and `History`, for
Python.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # `python -m minisgl` puts the caller's folder first; a `web` or `stages` folder there must not win over ours.
    _HOME = str(Path(__file__).resolve().parent)
    if sys.path[0] != _HOME:
        sys.path[0] = _HOME

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from pipeline.errors import ConfigError, MiniSGLError

if TYPE_CHECKING:
    from ops.offline import LLM as LLM
    from ops.replay.source import History as History
    from pipeline.events import SamplingParams as SamplingParams

USAGE: Final = """\
usage: minisgl serve [flags]                everything on this machine; `python -m minisgl [flags]` means the same
       minisgl stage STAGE [flags]          one stage alone: tokenize, generate, detokenize, web or archive
       minisgl shell [flags]                chat in the terminal, with any OpenAI server
       minisgl trace UID [flags]            what happened to a request
       minisgl top [flags]                  a running server, live in the terminal
       minisgl dead ACTION [flags]          requests that crashed their workers: ls, show, requeue or drop
       minisgl keys ACTION [flags]          API keys in the file of --limits: add, ls, revoke or rotate
       minisgl replay ACTION [flags]        recorded requests: show, run, diff, drive, schedule, dump, import, forget
       minisgl bench KIND [flags]           measure: offline, serve, compare, speculate ..
       minisgl --version

Each command explains its flags with --help; MINISGL_<FLAG> in the environment sets any flag.
"""
COMMANDS: Final[Mapping[str, str]] = {
    "serve": "ops.serve.command",
    "stage": "ops.serve.command",
    "shell": "ops.shell.command",
    "trace": "ops.trace",
    "replay": "ops.replay",
    "top": "ops.top.command",
    "dead": "ops.dead",
    "keys": "ops.keys",
    "bench": "ops.bench",
}
"""Each module has `main(arguments, environment)`, which returns the exit code."""
WITH_THEIR_NAME: Final = ("serve", "stage")
"""Commands of one module, which is told by which name it was called."""
EXIT_CONFIG: Final = 2
EXIT_INTERRUPTED: Final = 130


def __getattr__(name: str) -> object:
    """Import what `from minisgl import ...` names, and torch with it, only now: the command must start fast."""
    if name == "LLM":
        from ops.offline import LLM

        return LLM
    if name == "SamplingParams":
        from pipeline.events import SamplingParams

        return SamplingParams
    if name == "History":
        from ops.replay.source import History

        return History
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code.

    0; 1 for a failure; 2 for a command line or set-up that cannot work; 130 for Ctrl-C before anything ran.
    """
    if arguments is None:
        _hide_secrets()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments in (["--help"], ["-h"]):
            print(USAGE, end="")
            return 0
        if arguments == ["--version"]:
            from pipeline import VERSION

            print(f"minisgl {VERSION}")
            return 0
        if not arguments or arguments[0].startswith("-"):
            arguments = ["serve", *arguments]
        command = arguments[0]
        if command not in COMMANDS:
            known = ", ".join(COMMANDS)
            raise ConfigError(f"{command}: no such command; expected one of {known} (see minisgl --help)")
        rest = arguments if command in WITH_THEIR_NAME else arguments[1:]
        code: int = importlib.import_module(COMMANDS[command]).main(rest, os.environ)
        return code
    except ConfigError as error:
        print(f"minisgl: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:  # before there were workers to drain
        return EXIT_INTERRUPTED
    except MiniSGLError as error:
        print(f"minisgl: {error}", file=sys.stderr)
        return 1


def _hide_secrets() -> None:
    """Start again, as the same process, when the command line has secrets: everybody here can read it."""
    from ops.serve.config import without_secrets

    kept, variables = without_secrets(sys.argv[1:])
    if variables:
        program = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
        os.execve(sys.executable, [*program, *kept], dict(os.environ) | variables)


if __name__ == "__main__":
    sys.exit(main())
