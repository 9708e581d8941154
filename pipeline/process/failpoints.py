"""Named places where a test makes a process die, stop, or lose a reply. They do nothing unless the environment asks.

MINISGL_FAILPOINT="name=action[*count][@passing];..."  with the action exit, stop:SECONDS, raise or drop
MINISGL_FAILPOINT_DIR=folder                           remembers what fired, for all processes of a server
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import structlog

from pipeline.errors import ConfigError, LogUnavailable

logger = structlog.get_logger()

VARIABLE: Final = "MINISGL_FAILPOINT"
FOLDER_VARIABLE: Final = "MINISGL_FAILPOINT_DIR"

POINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "web.before_submit": "a request was read and checked, and is not in the log",
        "web.after_submit": "the log has accepted a request, and its client has no byte",
        "web.before_first_byte": "the first reply is here, and its client has no byte",
        "web.mid_stream": "a client has some frames of a stream, and more to come",
        "web.on_disconnect": "a client has left, and its request is not cancelled yet",
        "janitor.mid_sweep": "the first of the requests past their deadline was ended, the others were not",
        "tokenize.after_read": "requests were read from the log, and nothing was done to them",
        "tokenize.before_commit": "a prompt is encoded, and nobody knows it",
        "tokenize.after_commit": "a prompt is in the log, and others of the same read may not be",
        "generate.after_lease": "an engine has just got its slot",
        "generate.mid_takeover": "the entries of a dead engine were claimed, and their histories not folded",
        "generate.after_takeover_committed": "TakenOver is in the log, and nothing was computed since",
        "generate.after_take": "new requests were taken from the log, and the engine's loop has not heard of them",
        "generate.before_forward": "a step is planned, and not computed",
        "generate.after_forward": "a step is computed, and not committed",
        "generate.after_commit": "a step is committed, and its pages and requests are not let go",
        "generate.with_end_row": "a step that ends a request is computed, and not committed",
        "generate.during_drain": "an engine was told to stop and has requests in hand",
        "detokenize.after_read": "steps were read from the log, and nothing was done to them",
        "detokenize.before_commit": "a step is folded, and nobody knows its text",
        "detokenize.after_commit": "the text of a step is in the log, and other steps of the same read may not be",
        "detokenize.mid_character": "a step is committed, and text is held back inside a character or a stop string",
        "archive.before_commit": "requests are written or removed in a file, whose commit is yet to come",
        "archive.before_vacuum": "requests are gone from a file, which still takes their room",
        "forget.after_end": "what is to be forgotten has ended, and all of it is there",
        "forget.after_erase": "one history is a tombstone, and the next one may not be",
        "forget.after_purge": "only the archive and the files of Redis have still what is forgotten",
        "forget.before_mark": "everything is gone, and the tombstones do not say so",
    }
)
"""Every fail point: what has happened at that place, and what has not."""

LOSES_A_REPLY: Final = frozenset(
    {
        "web.after_submit",
        "janitor.mid_sweep",
        "tokenize.after_read",
        "tokenize.after_commit",
        "generate.mid_takeover",
        "generate.after_takeover_committed",
        "generate.after_take",
        "generate.after_commit",
        "detokenize.after_read",
        "detokenize.after_commit",
        "detokenize.mid_character",
    }
)
"""The points right after a command that changed something in Redis. `drop` makes the caller believe that it failed."""

_SPEC = re.compile(r"(?P<name>[^=]+)=(?P<action>\w+)(:(?P<seconds>[^*@]*))?(\*(?P<count>[1-9]\d*))?(@(?P<k>[1-9]\d*))?")


@dataclass(slots=True)
class _Armed:
    """A fail point that the environment asks for."""

    name: str
    action: str
    seconds: float
    count: int
    """Number of times that the point fires, in all processes together."""
    first: int
    """Passing from which the point may fire, counted in each process."""
    folder: Path
    num_passed: int = 0


# The only module state of the project: as an argument, a test's tool would be in every signature. `arm` fills it before
# a process has threads. In production it is empty.
_ARMED: Final[dict[str, _Armed]] = {}


def is_armed(name: str) -> bool:
    """Return whether anything happens at this place, where it takes long to find out that the process is there."""
    return name in _ARMED


def failpoint(name: str) -> None:
    """Do what the environment asks for at this place, if anything."""
    armed = _ARMED.get(name)
    if armed is not None:
        _pass(armed)


def arm(environment: Mapping[str, str]) -> None:
    """Prepare the fail points that *environment* names, and no others. Call it at the start of a process.

    Raises:
        ConfigError: A point or an action does not exist, or there is no folder to remember what fired.
    """
    _ARMED.clear()
    texts = [text.strip() for text in environment.get(VARIABLE, "").split(";") if text.strip()]
    if not texts:
        return
    folder = Path(environment.get(FOLDER_VARIABLE) or "/dev/null")
    if not folder.is_dir():
        seen = f"{folder}: not a folder" if environment.get(FOLDER_VARIABLE) else "missing"
        raise ConfigError(f"{FOLDER_VARIABLE} {seen}; set it to one, or a restarted worker fails at its point for ever")
    for text in texts:
        armed = _parse(text, folder)
        if armed.name in _ARMED:
            raise ConfigError(f"{VARIABLE}: {armed.name} is there twice; name it once")
        _ARMED[armed.name] = armed
    logger.warning("failpoints_armed", points=texts)


def _parse(text: str, folder: Path) -> _Armed:
    found = _SPEC.fullmatch(text)
    if found is None:
        raise ConfigError(f"{VARIABLE}: {text!r}; expected name=action[:seconds][*count][@passing]")
    name, action, seconds = found["name"], found["action"], found["seconds"]
    if name not in POINTS:
        raise ConfigError(f"{VARIABLE}: {name}: no fail point; expected one of {', '.join(POINTS)}")
    if action not in ("exit", "stop", "raise", "drop"):
        raise ConfigError(f"{VARIABLE}: {text!r}: {action} is no action; expected exit, stop:SECONDS, raise or drop")
    if action == "stop" and not re.fullmatch(r"\d*\.?\d+", seconds or ""):
        raise ConfigError(f"{VARIABLE}: {text!r}: expected stop:SECONDS, a number")
    if action != "stop" and seconds is not None:
        raise ConfigError(f"{VARIABLE}: {text!r}: {action} takes no seconds; leave {seconds} out")
    if action == "drop" and name not in LOSES_A_REPLY:
        raise ConfigError(
            f"{VARIABLE}: {text!r}: nothing was sent to Redis right before it, so no reply can be lost; use exit, "
            "stop:SECONDS or raise"
        )
    return _Armed(name, action, float(seconds or 0), int(found["count"] or 1), int(found["k"] or 1), folder)


def _pass(armed: _Armed) -> None:
    armed.num_passed += 1
    if armed.num_passed < armed.first:
        return
    if not _is_first_to_fire(armed):
        _ARMED.pop(armed.name, None)  # it has fired often enough, here or in other processes
        return
    logger.warning("failpoint", name=armed.name, action=armed.action, passing=armed.num_passed)
    match armed.action:
        case "exit":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            _stand_still(armed.seconds)
        case "raise":
            raise RuntimeError(f"fail point {armed.name}")
        case "drop":
            raise LogUnavailable(f"fail point {armed.name}: the reply was lost")


def _is_first_to_fire(armed: _Armed) -> bool:
    """Take one of the firings that are left. The folder has a file for each firing so far."""
    for number in range(1, armed.count + 1):
        file = armed.folder / (armed.name if number == 1 else f"{armed.name}.{number}")
        try:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            continue
        return True
    return False


def _stand_still(seconds: float) -> None:
    """Stop this process, and start another one that wakes it up.

    The other one does both: if this process stopped itself, the wake-up could come before the stop.
    """
    stop_and_wake = f"kill -STOP {os.getpid()}; (sleep {seconds}; kill -CONT {os.getpid()}) &"
    subprocess.run(
        ["sh", "-c", stop_and_wake],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
    )
