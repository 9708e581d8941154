"""A command that looks into a log, run in this process, and what it said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minisgl import main


class Tool:
    """`minisgl <command>` on the Redis at *url*."""

    def __init__(self, command: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._command = command.split()
        self.url = url
        self._capsys = capsys

    def __call__(self, *arguments: str) -> list[str]:
        """Run what works; return the lines that it prints."""
        code, out, err = self._run(arguments)
        assert (code, err) == (0, "")
        return out.splitlines()

    def json(self, *arguments: str) -> Any:
        """Run what works with --json; return what it prints."""
        return json.loads("\n".join(self(*arguments, "--json")))

    def failure(self, *arguments: str) -> str:
        """Run what fails; return the one line that it says."""
        code, out, err = self._run(arguments)
        assert (code, out, len(err.splitlines())) == (1, "", 1)
        return err

    def _run(self, arguments: tuple[str, ...]) -> tuple[int, str, str]:
        code = main([*self._command, *arguments, "--redis-url", self.url])
        return code, *self._capsys.readouterr()
