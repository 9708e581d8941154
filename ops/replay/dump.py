"""`minisgl replay dump`: writes requests of a server or an archive into a file, with all that happened to them.

`minisgl replay import` puts the requests of a file into the log of a running server, as they were.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from ops.config import ArchivedConfig, ConnectConfig, PrintConfig, RetentionConfig
from ops.connection import counted, one_line, running_log
from ops.replay.files import Dump, open_dump, write_dump, write_lines
from ops.replay.formats import UNREADABLE, LeftOut, incoming, to_mooncake, to_openai
from ops.replay.redact import SALT_BYTES, redacted
from ops.replay.source import ChoiceConfig, Past, open_source
from ops.trace import as_json, when
from pipeline.errors import ConfigError, MiniSGLError, UndecodableEvent
from pipeline.events import MOST_MS
from pipeline.flags import flag, parse_flags, seconds, split_names, yes_or_no
from pipeline.log.protocol import Forgotten, NotWhole, RequestLimits
from pipeline.log.redis import RedisLog
from pipeline.recording import SHOWN, Recording
from web.wire.uids import drawn_ms, uid_of

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


IMPORT_ABOUT: Final = """\
Puts the requests of a FILE into the log of a running server: of one that replay dump wrote, of a batch of OpenAI, or of
a trace of Mooncake. All tools show them. Nothing is computed. A request that the log has already stays as it is.
"""
DEFAULT_RETENTION_S: Final = 86400.0
MOST_TOLD: Final = 1000
"""Requests that are named with the reason why they were not imported."""


@dataclass(frozen=True, slots=True)
class ImportConfig:
    """What becomes of the requests of a file."""

    retention_s: float = flag(
        "--retention", default=DEFAULT_RETENTION_S, parse=seconds, help="seconds for which they are kept"
    )
    keep_owner: bool = flag(
        "--keep-owner",
        default=False,
        parse=yes_or_no,
        help="they belong to the same API keys as where they were recorded; without it, only the admin key sees them",
    )
    again: bool = flag(
        "--again", default=False, parse=yes_or_no, help="also those that `minisgl replay forget` has removed"
    )


IMPORT_FLAGS: Final = (ConnectConfig, ImportConfig, PrintConfig)


@dataclass(slots=True)
class Tally:
    """What became of the requests of a file."""

    imported: int = 0
    there: int = 0
    """The log had them already."""
    forgotten: int = 0
    """They were removed with `replay forget`."""
    forgotten_until_ms: int = 0
    """When the log has let the last of them go."""
    refused: list[str] = field(default_factory=list)
    """Why, for each of the others; at most MOST_TOLD of them."""
    num_untold: int = 0
    """The rest of them."""


def import_file(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Import the file; return the exit code: 1 if something in it could not be imported.

    Raises:
        ConfigError: The flags cannot work, or there is no such file.
        DamagedFile: The file could not be read to its end; what came before is imported.
        LogUnavailable: There is no such server; LogFull: it has no room for more.
    """
    names, flags = split_names(arguments, IMPORT_FLAGS)
    connect, how, prints = parse_flags("replay import FILE", IMPORT_FLAGS, flags, environment, about=IMPORT_ABOUT)
    if len(names) != 1:
        raise ConfigError(f"replay import: expected one FILE, got {len(names)}; name one after the other")
    path, tally = Path(names[0]), Tally()
    dump = open_dump(path)
    with running_log(connect, RequestLimits(retention_s=how.retention_s)) as log:
        try:
            take_in(log, dump, path.name, tally, keep_owner=how.keep_owner, again=how.again)
        finally:
            _say(names[0], tally, as_plain=prints.as_json)
    return 1 if tally.refused else 0


def take_in(log: RedisLog, dump: Dump, name: str, tally: Tally, *, keep_owner: bool, again: bool = False) -> None:
    """Import the requests of the file *name*, and count them in *tally*. Raises as `import_file` does."""
    origin = origin_of(name, dump)
    for recording in dump.recordings:
        try:
            if _import(log, recording, origin, keep_owner=keep_owner, again=again):
                tally.imported += 1
            else:
                tally.there += 1
        except Forgotten as gone:
            tally.forgotten += 1
            tally.forgotten_until_ms = max(tally.forgotten_until_ms, int(time.time() * 1000) + gone.left_ms)
        except (UndecodableEvent, NotWhole) as error:
            if len(tally.refused) == MOST_TOLD:
                tally.num_untold += 1
                continue
            where = f"line {dump.lines.number}, " if dump.lines is not None else ""
            tally.refused.append(f"{where}{one_line(recording.uid[:SHOWN])}: {one_line(' '.join(str(error).split()))}")


def origin_of(name: str, dump: Dump) -> dict[str, Any]:
    """Return what the label of an imported request says of its file."""
    said = {key: dump.header[key] for key in ("made_ms", "namespace", "version") if key in dump.header}
    return {"file": name} | said


def _import(log: RedisLog, recording: Recording, origin: Mapping[str, Any], *, keep_owner: bool, again: bool) -> bool:
    if uid_of(recording.uid) != recording.uid:
        raise UndecodableEvent("not a uid; expected 32 hex digits of a UUID version 7")
    if drawn_ms(recording.uid) > MOST_MS:
        raise UndecodableEvent("uid: it names a moment after the year 9999")
    if not recording.is_sealed:
        raise NotWhole("it has not ended; only whole requests can be imported")
    return log.import_history(recording.uid, incoming(recording, origin, keep_owner=keep_owner), again=again)


def _say(file: str, tally: Tally, *, as_plain: bool) -> None:
    if as_plain:
        told = {"file": file, "imported": tally.imported, "there": tally.there, "refused": tally.refused}
        told |= {"forgotten": tally.forgotten} if tally.forgotten else {}
        told |= {"untold": tally.num_untold} if tally.num_untold else {}
        sys.stdout.write(as_json(told))
        return
    sys.stdout.write(f"{file}: {counted(tally.imported, 'request')} imported\n")
    if tally.there:
        sys.stdout.write(f"there already, and left as it is: {counted(tally.there, 'request')}\n")
    if tally.forgotten:
        until = when(tally.forgotten_until_ms)
        sys.stdout.write(
            f"removed with `minisgl replay forget`, which counts until {until}: {counted(tally.forgotten, 'request')}; "
            "--again brings them back\n"
        )
    for line in tally.refused:
        sys.stderr.write(f"minisgl: not imported: {line}\n")
    if tally.num_untold:
        sys.stderr.write(f"minisgl: not imported: {tally.num_untold:,} more\n")
