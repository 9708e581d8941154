"""`minisgl replay dump`: writes requests of a server or an archive into a file, with all that happened to them."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ops.config import ArchivedConfig, ConnectConfig, PrintConfig, RetentionConfig
from ops.replay.choice import ChoiceConfig, Past
from ops.replay.files import write_dump, write_lines
from ops.replay.formats import to_mooncake, to_openai
from ops.replay.redact import SALT_BYTES, redacted
from ops.replay.source import open_source
from ops.trace import as_json
from pipeline.errors import ConfigError, UndecodableEvent
from pipeline.flags import flag, parse_flags, split_names, yes_or_no
from pipeline.recording import Recording

ABOUT: Final = """\
Writes requests that have ended into a new FILE, with all their events: those of the UIDs, or all that the flags choose.
Times are UTC. Only its owner can read the file: it has prompts and answers.
"""
OTHER_FORMATS: Final[Mapping[str, Callable[[Iterable[Recording], Callable[[], None]], Iterator[bytes]]]] = {
    "openai": to_openai,
    "mooncake": to_mooncake,
}


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
    """
    names, flags = split_names(arguments, FLAGS)
    connect, retention, archived, choice, how, prints = parse_flags(
        "replay dump [UID ..] FILE", FLAGS, flags, environment, about=ABOUT
    )
    if not names:
        raise ConfigError("minisgl replay dump: expected a FILE to write (see minisgl replay dump --help)")
    *named, file = names
    if named and choice.names_moments:
        raise ConfigError("minisgl replay dump: name UIDs, or moments with --since and --until, not both")
    with open_source(connect, archived.archive, retention.retention_s) as source:
        uids = dict.fromkeys(recording.uid for recording in source.recordings(named))
        past, unfit = Past(source, choice, wait=how.wait), Unfit()
        recordings = past.recordings(list(uids)) if named else past.chosen()
        if how.redact:
            recordings = unfit.redacted(recordings)
        if how.form in OTHER_FORMATS:
            count = write_lines(Path(file), OTHER_FORMATS[how.form](recordings, unfit.leave_out))
        else:
            count = write_dump(Path(file), recordings, {"namespace": connect.namespace, "redacted": how.redact})
    size = Path(file).stat().st_size
    if prints.as_json:
        left_out = {"running": past.num_running, "expired": past.num_gone, "unfit": unfit.count}
        sys.stdout.write(as_json({"file": file, "bytes": size, "requests": count, "left_out": left_out}))
    else:
        sys.stdout.write("".join(f"{line}\n" for line in said(file, size, count, past, unfit)))
    return 0


def said(file: str, size: int, count: int, past: Past, unfit: Unfit) -> list[str]:
    """Return what was done, for people."""
    lines = [f"{file}: {count:,} requests, {size:,} bytes"]
    if past.num_running:
        lines.append(f"left out: {past.num_running:,} requests that have not ended (--wait waits for them)")
    if past.num_gone:
        lines.append(f"left out: {past.num_gone:,} requests that expired meanwhile")
    if unfit.count:
        lines.append(f"left out: {unfit.count:,} requests that cannot be redacted, or that the format cannot hold")
    return lines


class Unfit:
    """Counts requests that are left out because of what they hold."""

    def __init__(self) -> None:
        self.count = 0

    def leave_out(self) -> None:
        self.count += 1

    def redacted(self, recordings: Iterable[Recording]) -> Iterator[Recording]:
        """Yield *recordings* without a word of prompt or answer. Each call draws a salt."""
        salt = secrets.token_bytes(SALT_BYTES)
        for recording in recordings:
            try:
                yield redacted(recording, salt)
            except UndecodableEvent:
                self.leave_out()
