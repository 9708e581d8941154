"""`minisgl top`: a running server's whole pipeline, live in the terminal, as text or as JSON."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Final

from rich.console import Console

from ops.config import ConnectConfig, PrintConfig
from ops.connection import running_log
from ops.top.config import TopConfig
from ops.top.screen import lines_of
from ops.top.terminal import show
from pipeline.flags import parse_flags
from pipeline.views.pipeline import PipelineView, view_of
from pipeline.views.reader import Reader, as_json

ABOUT: Final = """\
Shows every stage, stream and engine of a running server, and its newest requests, from any machine that reaches its
Redis. q quits, space pauses. If the output is not a terminal, it prints one snapshot and ends.
"""
FLAGS: Final = (ConnectConfig, TopConfig, PrintConfig)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Show the pipeline until the user leaves; return the exit code.

    Raises:
        ConfigError: The flags cannot work.
        LogError: There is no such server, or its log cannot be read.
    """
    connect, top, prints = parse_flags("top", FLAGS, arguments, environment, about=ABOUT)
    try:
        with running_log(connect) as log:
            reader = Reader(log)
            view = view_of(reader.read())
            console = Console(highlight=False)
            has_screen = console.is_terminal and not console.is_dumb_terminal
            if top.once or not (prints.as_json or has_screen):
                time.sleep(top.interval_s)
                view = view_of(reader.read())
                _print_json(view) if prints.as_json else _print_text(view, console, environment)
            elif prints.as_json:
                while True:
                    time.sleep(top.interval_s)
                    view = reader.view_after(view)
                    _print_json(view)
            else:
                show(reader, top.interval_s, view, console)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # who read it has seen enough; at its exit, Python writes what is left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _print_text(view: PipelineView, console: Console, environment: Mapping[str, str]) -> None:
    width = console.width if console.is_terminal or "COLUMNS" in environment else 0
    for line in lines_of(view, width):
        line.rstrip()
        console.print(line, soft_wrap=True)


def _print_json(view: PipelineView) -> None:
    sys.stdout.write(as_json(view).decode())
    sys.stdout.flush()
