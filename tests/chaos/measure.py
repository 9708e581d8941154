"""What `make recovery` and `make soak` share: flags, the checkpoint, exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ops.bench.models import CheckpointConfig
from pipeline.errors import ConfigError, MiniSGLError
from pipeline.flags import at_least, build_parser, flag

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class MeasureConfig(CheckpointConfig):
    """The flags of both."""

    seed: int = flag("--seed", default=0, parse=at_least(0), help="seed of prompts and their lengths")
    output: str = flag("--output", default="", help="write the set-up and all figures to this file, as JSON")


def parsed(command: str, owner: type[C], about: str, arguments: Sequence[str], environment: Mapping[str, str]) -> C:
    """Return the *owner* that the flags of *command* fill.

    Raises:
        ConfigError: An unknown flag, or a value out of range.
    """
    parser = build_parser(command, (owner,), environment, about)
    parser.prog = command
    return owner(**vars(parser.parse_args(arguments)))


def exit_code(main: Callable[[Sequence[str], Mapping[str, str]], int], arguments: Sequence[str]) -> int:
    """Run *main*; an error becomes a line on stderr and the exit code that `minisgl` gives it."""
    try:
        return main(arguments, os.environ)
    except KeyboardInterrupt:
        return 130
    except MiniSGLError as error:
        sys.stderr.write(f"minisgl: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
