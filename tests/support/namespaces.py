"""A second machine for tests: a network namespace, and a cable to it. Making one needs root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace, and both ends of its cable."""

    name: str
    here: str
    """The address of this machine's end."""
    there: str

    @property
    def program(self) -> Sequence[str]:
        """What runs a command in it."""
        return ("ip", "netns", "exec", self.name)

    def pull(self) -> None:
        """Take the cable out: packets are lost, and no connection breaks."""
        _ip("link", "set", self.name, "down")

    def plug(self) -> None:
        """Put it in again."""
        _ip("link", "set", self.name, "up")


@contextlib.contextmanager
def namespace() -> Iterator[Namespace]:
    """Make a namespace until the block ends. Where that is not possible, the test is skipped."""
    number = os.getpid() % 250
    made = Namespace(f"minisgl{number}", f"10.213.{number}.1", f"10.213.{number}.2")
    inside = ("-n", made.name)
    try:
        try:
            _ip("netns", "add", made.name)
            _ip("link", "add", made.name, "type", "veth", "peer", "name", "eth0", "netns", made.name)
            _ip("address", "add", f"{made.here}/30", "dev", made.name)
            _ip(*inside, "address", "add", f"{made.there}/30", "dev", "eth0")
            made.plug()
            for device in ("lo", "eth0"):
                _ip(*inside, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
            pytest.skip(f"no network namespace can be made here: {said}")
        yield made
    finally:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):  # the cable goes with it
            _ip("netns", "delete", made.name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
