"""`minisgl dead ACTION`: the dead letters of a running server: see, retry, drop.

They are of requests that killed their workers, and of entries that could not be read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import orjson

from ops.config import ConnectConfig, PrintConfig, RetentionConfig
from ops.connection import NotThere, columns, learn_retention, one_line, running_log, split_named, uid_in
from ops.trace import as_json, lines_of, told_of, when
from pipeline.errors import ConfigError, MiniSGLError
from pipeline.events import Submitted, new_uid
from pipeline.flags import parse_flags
from pipeline.log.protocol import Entry, HistoryLog, RequestLimits, Submission
from pipeline.log.redis import RedisLog
from pipeline.views.history import REQUEUED_FROM, copied_history, plain_letter, sent_again
from web.config import RequestConfig

USAGE: Final = """\
usage: minisgl dead ls [flags]                   the requests that killed their workers, the newest first
       minisgl dead show ID_OR_UID [flags]       one of them: what it died of, and its story
       minisgl dead requeue ID_OR_UID [flags]    send it again under a new uid, and drop its letter
       minisgl dead drop ID_OR_UID [flags]       drop its letter

Each explains its flags with --help.
"""
FLAGS: Final = (ConnectConfig, PrintConfig)
REQUEUE_FLAGS: Final = (ConnectConfig, RequestConfig, RetentionConfig, PrintConfig)
WHICH: Final = "the id or uid of a dead letter"
ENTRY_SHOWN: Final = 500
"""Characters of what the worker died on, which may be a step of many rows; --json has all of it."""
READ_AT_ONCE: Final = 100
"""Letters, of which each may hold 64 KB."""

Action: TypeAlias = Callable[[Sequence[str], Mapping[str, str]], None]


class NotRequeued(MiniSGLError):
    """The request was not sent again; its letter is where it was."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Do one action; return the exit code.

    Raises:
        ConfigError: There is no such action, or its flags cannot work.
        NotThere: There is no such letter, or nothing is left of the request to send again.
        NotRequeued, LogFull: No new work is taken.
        LogUnavailable: There is no such server.
        UndecodableEvent: What the letter holds is damaged.
    """
    if not arguments or arguments[0] in ("--help", "-h"):
        sys.stdout.write(USAGE)
        return 0
    if arguments[0] not in ACTIONS:
        raise ConfigError(f"dead: {arguments[0]} given, expected one of {', '.join(ACTIONS)}")
    ACTIONS[arguments[0]](arguments[1:], environment)
    return 0


def ls(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Print all letters, the newest first."""
    about = "Lists the requests that killed their workers, the newest first."
    connect, prints = parse_flags("dead ls", FLAGS, arguments, environment, about=about)
    with running_log(connect) as log:
        letters = [plain_letter(letter) for letter in letters_in(log)]
    if prints.as_json:
        sys.stdout.write(as_json(letters))
    elif not letters:
        sys.stdout.write("no dead letters\n")
    else:
        rows: list[tuple[str, ...]] = [("when", "uid or id", "stage", "deaths", "error")]
        for letter in letters:  # an entry that is about no request has no uid
            named = "uid" if letter.get("uid") else "id"
            names = (named, "stage", "deaths", "error")
            rows.append((moment(letter), *(_text(letter, name) for name in names)))
        sys.stdout.write("\n".join(columns(rows, right=(3,))) + "\n")


def show(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Print one letter, and the story that its copy of the history tells."""
    about = "Shows what a request died of, and its story."
    named, flags = split_named("dead show", arguments, WHICH, FLAGS)
    connect, prints = parse_flags("dead show ID_OR_UID", FLAGS, flags, environment, about=about)
    with running_log(connect) as log:
        letter = find(log, named)
    said = plain_letter(letter)
    uid = letter.fields.get("uid", "")
    told = told_of(uid, copied_history(letter)) if "history" in letter.fields or "stream" not in letter.fields else {}
    if prints.as_json:
        sys.stdout.write(as_json({"letter": said, "story": told}))
        return
    if not told:
        lines = [
            f"dead letter {letter.id}, {moment(said)}",
            f"an entry of {_text(said, 'stream')} that {_text(said, 'stage')} could not read: {_text(said, 'error')}",
            f"entry: {_text(said, 'entry')[:ENTRY_SHOWN]}",
            f"its request ended; minisgl trace {one_line(uid)} tells its story" if uid else "it is about no request",
        ]
        sys.stdout.write("\n".join(lines) + "\n")
        return
    cut = f"; entries left out there: {_text(said, 'history_cut')}" if "history_cut" in said else ""
    lines = [
        f"dead letter {letter.id}, {moment(said)}",
        f"killed {_text(said, 'stage')} {_text(said, 'deaths')} times; the last time: {_text(said, 'error')}",
        f"entry: {_text(said, 'entry')[:ENTRY_SHOWN]}",
        f"what follows is told by its copy of the history{cut}",
        "",
        *lines_of(told),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def requeue(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Submit the request of a letter again, which drops the letter, and print its new uid."""
    about = (
        "Sends a request again that killed its workers, under a new uid, which it prints, and drops the letter. "
        "Nobody listens to it: see what becomes of it with minisgl trace."
    )
    named, flags = split_named("dead requeue", arguments, WHICH, REQUEUE_FLAGS)
    connect, limits, retention, prints = parse_flags(
        "dead requeue ID_OR_UID", REQUEUE_FLAGS, flags, environment, about=about
    )
    of_log = RequestLimits(timeout_s=limits.request_timeout_s, max_queued=limits.max_queued_requests)
    with running_log(connect, of_log) as log:
        learn_retention(log, retention.retention_s)
        letter = find(log, named)
        dead_uid, uid = letter.fields.get("uid", ""), new_uid()
        event = request_of(log, letter)
        submitted = log.submit(uid, [event], letter=letter.id).submission
        if submitted is Submission.BUSY:
            raise NotRequeued(
                f"{dead_uid}: not sent again; {limits.max_queued_requests} requests wait already "
                "(--max-queued-requests); try later"
            )
        if submitted is Submission.GONE:
            raise NotThere(f"{dead_uid}: its dead letter is gone; somebody else has sent it again, or dropped it")
        said = {"uid": uid, REQUEUED_FROM: dead_uid}
        sys.stdout.write(as_json(said) if prints.as_json else f"{uid}\n")


def drop(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Remove a letter; the history, where it is there still, stays for its retention."""
    about = "Drops the letter of a request that killed its workers."
    named, flags = split_named("dead drop", arguments, WHICH, FLAGS)
    connect, prints = parse_flags("dead drop ID_OR_UID", FLAGS, flags, environment, about=about)
    with running_log(connect) as log:
        letter = find(log, named)
        log.drop_dead(letter.id)
    said = {"id": letter.id, "uid": letter.fields.get("uid", "")}
    sys.stdout.write(as_json(said) if prints.as_json else f"dropped {letter.id}, {_text(said, 'uid')}\n")


ACTIONS: Final[Mapping[str, Action]] = {"ls": ls, "show": show, "requeue": requeue, "drop": drop}


def letters_in(log: HistoryLog) -> Iterator[Entry]:
    """Give all letters, the newest first."""
    before = ""
    while letters := log.dead_letters(READ_AT_ONCE, before=before):
        yield from letters
        before = letters[-1].id


def find(log: RedisLog, named: str) -> Entry:
    """Return the letter with the id, or of the request with the uid, *named*.

    Raises:
        NotThere: There is none.
    """
    uid = uid_in(named)
    for letter in letters_in(log):
        if named == letter.id or uid == letter.fields.get("uid"):
            return letter
    raise NotThere(f"{one_line(named)}: no such dead letter; minisgl dead ls shows which there are")


def request_of(log: RedisLog, letter: Entry) -> Submitted:
    """Return the request that asks again for what was asked, as the history says.

    Raises:
        NotThere: It is gone.
    """
    uid = letter.fields.get("uid", "")
    if not uid:
        raise NotThere(f"{letter.id}: an entry that is about no request; nothing can be sent again")
    event = sent_again(uid, log.histories([uid])[0])
    if event is not None:
        return event
    raise NotThere(
        f"{uid}: its history is gone (it is kept for --retention after the end); `minisgl dead show {uid}` has a copy, "
        "and its client can send it again"
    )


def moment(letter: Mapping[str, Any]) -> str:
    """Return when a letter was written, for people."""
    return when(letter["ms"]) if isinstance(letter.get("ms"), int) else "?"


def _text(letter: Mapping[str, Any], name: str) -> str:
    value = letter.get(name, "?")
    return one_line(value if isinstance(value, str) else orjson.dumps(value).decode())
