"""A command that looks into a log, run in this process, and what it said; and logging as a new process has it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from minisgl import main


class Tool:
    """`minisgl <command>`, on the Redis at *url* if there is one."""

    def __init__(self, command: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._command = command.split()
        self.url = url
        self._capsys = capsys

    def __call__(self, *arguments: str) -> list[str]:
        """Run what works; return the lines that it prints."""
        code, out, err = self.run(*arguments)
        assert (code, err) == (0, "")
        return out.splitlines()

    def json(self, *arguments: str, code: int = 0) -> Any:
        """Run what ends with *code* and works if that is 0, with --json; return what it prints."""
        ended, out, err = self.run(*arguments, "--json")
        assert ended == code and (code or not err), err
        return json.loads(out)

    def failure(self, *arguments: str) -> str:
        """Run what fails; return the one line that it says."""
        code, out, err = self.run(*arguments)
        assert (code, out, len(err.splitlines())) == (1, "", 1)
        return err

    def refusal(self, *arguments: str) -> str:
        """Run a command line that cannot work; return what it says."""
        code, out, err = self.run(*arguments)
        assert (code, out) == (2, "")
        return err

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Return the exit code and what is printed, as of a new process."""
        with fresh_logs():
            code = main([*self._command, *arguments, *(("--redis-url", self.url) if self.url else ())])
        return code, *self._capsys.readouterr()


@contextlib.contextmanager
def fresh_logs() -> Iterator[None]:
    """Begin without any set-up, as a program that imports `LLM` does, and give back what there was."""
    before, was_configured = structlog.get_config(), structlog.is_configured()
    structlog.reset_defaults()
    try:
        yield
    finally:
        structlog.reset_defaults()
        if was_configured:
            structlog.configure(**before)
