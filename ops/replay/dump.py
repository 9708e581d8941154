"""`minisgl replay dump`: writes requests of a server or an archive into a file, with all that happened to them."""

from __future__ import annotations

import secrets
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from ops.config import ArchivedConfig, ConnectConfig, PrintConfig, RetentionConfig
from ops.connection import counted
from ops.replay.choice import ChoiceConfig, Past
from ops.replay.files import write_dump, write_lines
from ops.replay.formats import UNREADABLE, LeftOut, to_mooncake, to_openai
from ops.replay.redact import SALT_BYTES, redacted
from ops.replay.source import open_source
from ops.trace import as_json
from pipeline.errors import ConfigError, MiniSGLError, UndecodableEvent
from pipeline.flags import flag, parse_flags, split_names, yes_or_no
from pipeline.recording import Recording

ABOUT: Final = """\
Writes requests that have ended into a new FILE, with all their events: those of the UIDs, or all that the flags choose.
Times are UTC. Only its owner can read the file: it has prompts and answers.
"""
OTHER_FORMATS: Final[Mapping[str, Callable[[Iterable[Recording], LeftOut], Iterator[bytes]]]] = {
    "openai": to_openai,
    "mooncake": to_mooncake,
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DumpConfig:
    """What becomes of the requests that are chosen."""

    wait: bool = flag("--wait", default=False, parse=yes_or_no, help="wait until those that still run have ended")
    redact: bool = flag(
        "--redact",
        default=False,
        parse=yes_or_no,
        help="leave out prompts, answers and labels; keep lengths, times and salted hashes of blocks of the prompts",
    )

    form: str = flag(
        "--format",
        default="minisgl",
        choices=("minisgl", *OTHER_FORMATS),
        help="minisgl has everything; openai: bodies of a batch; mooncake: times, lengths and shared blocks of a trace",
    )


FLAGS: Final = (ConnectConfig, RetentionConfig, ArchivedConfig, ChoiceConfig, DumpConfig, PrintConfig)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Write the file; return the exit code.

    Raises:
        ConfigError: The flags cannot work, or the file cannot be written.
        NotThere: A uid is not there.
        LogUnavailable: There is no such server, and no archive is named.
        NothingChosen: There is nothing to write.
    """
    names, flags = split_names(arguments, FLAGS)
    connect, retention, archived, choice, how, prints = parse_flags(
        "replay dump [UID ..] FILE", FLAGS, flags, environment, about=ABOUT
    )
    if not names:
        raise ConfigError("replay dump: expected a FILE to write (see minisgl replay dump --help)")
    *named, file = names
    if named and choice.names_moments:
        raise ConfigError("replay dump: name UIDs, or moments with --since and --until, not both")
    with open_source(connect, archived.archive, retention.retention_s) as source:
        uids = dict.fromkeys(recording.uid for recording in source.recordings(named))
        past, unfit = Past(source, choice, wait=how.wait), Unfit()
        recordings = past.recordings(list(uids)) if named else past.chosen()
        if how.redact:
            recordings = unfit.redacted(recordings)
        about = {"namespace": connect.namespace, "redacted": how.redact}
        try:
            if how.form in OTHER_FORMATS:
                count = write_lines(Path(file), some(OTHER_FORMATS[how.form](recordings, unfit.leave_out)))
            else:
                count = write_dump(Path(file), some(recordings), about, unfit.leave_out)
        except NothingChosen:
            reasons = "; ".join(left_out(past, unfit))
            raise NothingChosen(f"no request to write, so {file} is not there{reasons and f'; {reasons}'}") from None
    size = Path(file).stat().st_size
    if prints.as_json:
        counts = {"running": past.num_running, "expired": past.num_gone, "unfit": unfit.reasons.total()}
        left = {**counts, "reasons": dict(unfit.reasons)}
        sys.stdout.write(as_json({"file": file, "bytes": size, "requests": count, "left_out": left}))
    else:
        lines = [f"{file}: {counted(count, 'request')}, {size:,} bytes", *left_out(past, unfit)]
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


class NothingChosen(MiniSGLError):
    """No request is to be written."""


def some(items: Iterable[T]) -> Iterator[T]:
    """Yield *items*. Raises NothingChosen after them if there are none."""
    is_empty = True
    for item in items:
        is_empty = False
        yield item
    if is_empty:
        raise NothingChosen


def left_out(past: Past, unfit: Unfit) -> list[str]:
    """Return which requests are left out and why, for people."""
    counts = {"without an end (--wait waits for it)": past.num_running} | {
        "that expired meanwhile": past.num_gone,
        **unfit.reasons,
    }
    return [f"left out: {counted(count, 'request')} {reason}" for reason, count in counts.items() if count]


class Unfit:
    """Counts requests that are left out because of what they hold."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()

    def leave_out(self, reason: str) -> None:
        self.reasons[reason] += 1

    def redacted(self, recordings: Iterable[Recording]) -> Iterator[Recording]:
        """Yield *recordings* without a word of prompt or answer. Each call draws a salt."""
        salt = secrets.token_bytes(SALT_BYTES)
        for recording in recordings:
            try:
                yield redacted(recording, salt)
            except UndecodableEvent:
                self.leave_out(f"{UNREADABLE}, and so not redacted")
