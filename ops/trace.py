"""`minisgl trace UID`: the story of one request, from the log of a server that runs, as a table or as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from ops.config import ArchivedConfig, ConnectConfig, PrintConfig, RetentionConfig
from ops.connection import NotThere, columns, learn_retention, log_and_archive, one_line, split_named, uid_in
from pipeline.archive.reader import Archive
from pipeline.errors import UndecodableEvent
from pipeline.events import Presentation, SamplingParams, Templating, Value
from pipeline.flags import parse_flags
from pipeline.log.entries import BRIEF_MS
from pipeline.log.protocol import Entry, HistoryLog
from pipeline.names import SEAL, sibling_uids
from pipeline.views.history import story
from web.wire.uids import drawn_ms, uid_of

ABOUT: Final = """\
Shows what happened to a request. UID is in the answer's header x-minisgl-uid; the answer's id works too.
"""
FLAGS: Final = (ConnectConfig, RetentionConfig, ArchivedConfig, PrintConfig)
TEXT_SHOWN: Final = 200
"""Characters of the text; --json has all of it."""
GROUPS: Final[Mapping[str, Value]] = {"presentation": Presentation(), "templating": Templating()}
"""Fields of a request that hold fields, with their defaults."""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Print the story of one request; return the exit code.

    Raises:
        ConfigError: The flags cannot work.
        NotThere: The log has no such request, or none any more.
        LogUnavailable: There is no such server, and no archive is named.
        UndecodableEvent: The history is damaged.
    """
    name, flags = split_named("trace", arguments, "the uid of a request", FLAGS)
    connect, retention, archived, prints = parse_flags("trace UID", FLAGS, flags, environment, about=ABOUT)
    uid = uid_in(name)
    with log_and_archive(connect, archived.archive) as (log, archive):
        history: Sequence[Entry] = log.histories([uid])[0]
        if not history and archive is not None and not removed_of(log, [uid]) and (found := archive.read([uid])):
            history = found[uid].entries
        if not history:
            learn_retention(log, retention.retention_s)
            raise absent(uid, log, archive)
    told = told_of(uid, history)
    sys.stdout.write(as_json(told) if prints.as_json else "\n".join(lines_of(told)) + "\n")
    return 0


def told_of(uid: str, history: Sequence[Entry]) -> dict[str, Any]:
    """Return the story of a history.

    Raises:
        UndecodableEvent: It is damaged; the message is one line.
    """
    try:
        return story(uid, history)
    except UndecodableEvent as error:
        raise UndecodableEvent(f"the history of {uid} is damaged: {' '.join(str(error).split())}") from error


def absent(uid: str, log: HistoryLog, archive: Archive | None) -> NotThere:
    """Return the error that says why neither *log*, which has the retention of the server, nor *archive* has it."""
    if removed_of(log, [uid, *sibling_uids(uid, 2)]):
        return NotThere(f"{uid}: it was removed with minisgl replay forget")
    return NotThere(why_absent(uid, time.time(), log.limits.retention_s, archive))


def removed_of(log: HistoryLog, uids: Sequence[str]) -> set[str]:
    """Return those of *uids* that were removed with `minisgl replay forget`. An archiver may not have done its part."""
    return {uid for uid, first in log.begins(uids).items() if first.id == SEAL}


def why_absent(uid: str, now_s: float, retention_s: float, archive: Archive | None = None) -> str:
    """Say why log and *archive* may hold nothing of *uid*, which itself tells when it was drawn."""
    if not uid_of(uid):
        return f"{one_line(uid)}: not a uid; expected 32 hex digits, as the header x-minisgl-uid of the answer has them"
    age_s = now_s - drawn_ms(uid) / 1000
    if age_s < 0:
        return f"{uid}: not a request of this server; the uid names a moment that is yet to come"
    made = f"it was made {age_s:,.0f} s ago"
    if age_s > retention_s:
        kept = f"after its end a request is kept for {retention_s:g} s (--retention)"
        return f"{uid}: expired; {made}, and {kept}; {_why_not_archived(uid, archive)}"
    refused = f"; one that was refused is kept for {BRIEF_MS // 1000} s only" if age_s * 1000 > BRIEF_MS else ""
    return f"{uid}: unknown here; {made}, so look at another server or --namespace{refused}"


def _why_not_archived(uid: str, archive: Archive | None) -> str:
    if archive is None:
        return "an archive keeps it longer (minisgl serve --archive DIR), and --archive DIR finds it there"
    since_ms = archive.since_ms()
    if since_ms is None or drawn_ms(uid) >= since_ms:
        return "the archive does not have it either"
    return f"the archive begins at {when(since_ms)} (--retain and --max-bytes of its stage)"


def as_json(value: object) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode()


def when(ms: int) -> str:
    """Return a moment of Redis' clock for people."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


def lines_of(told: Mapping[str, Any]) -> list[str]:
    """Return a story in lines: what was asked, a table of what happened, how it ended."""
    rows = [("time", "what", "who", "n", "details")]
    rows += [
        (_after(moment["at_ms"]), moment["what"], one_line(moment["who"]), _numbers(moment), _details(moment))
        for moment in told["moments"]
    ]
    return [*_header(told), "", *columns(rows, right=(0, 3)), "", *_ending(told)]


def _header(told: Mapping[str, Any]) -> list[str]:
    sampling = _changed(told["sampling"], SamplingParams())
    asked = {"endpoint": told["endpoint"], "model": told["model"]} | sampling | told["labels"]
    deadline_ms = told["deadline_ms"]
    deadline = f", deadline {_after(deadline_ms - told['submitted_ms'])}" if deadline_ms else ""
    return [
        f"request {one_line(told['uid'])}: {told['state']}",
        f"submitted {when(told['submitted_ms'])}{deadline}",
        pairs_of({name: value for name, value in asked.items() if value != ""}),
    ]


def _changed(fields: Mapping[str, Any], defaults: Value) -> dict[str, Any]:
    """Return the *fields* whose values are not the default."""
    known = defaults.model_dump(mode="json")
    return {name: value for name, value in fields.items() if value != known.get(name)}


def _ending(told: Mapping[str, Any]) -> list[str]:
    last = told["moments"][-1]
    after = f"after {_seconds(last['at_ms'])}"
    match told["state"]:
        case "finished" if "timings" not in told:
            said = f"answered {after} by {one_line(last['who'])}"
        case "finished":
            first = _seconds(told["timings"]["first_token_ms"])
            said = f"finished ({told['finish_reason']}) {after}, first token after {first}"
        case "failed":
            error = told["error"]
            said = f"failed {after} with {error['status']} {one_line(error['code'])}: {one_line(error['message'])}"
        case "cancelled":
            said = f"cancelled {after} by {one_line(last['who'])}"
        case state:
            said = f"{state}, last event {after}"
    text = told["text"]
    more = f" .. ({len(text):,} characters; --json has all)" if len(text) > TEXT_SHOWN else ""
    return [said, _counts(told), *([f"text: {one_line(text[:TEXT_SHOWN])}{more}"] if text else [])]


def _counts(told: Mapping[str, Any]) -> str:
    prompt = "not counted yet" if told["prompt_tokens"] is None else f"{told['prompt_tokens']:,}"
    cached = f", {told['usage']['cached_tokens']:,} of them cached" if "usage" in told else ""
    return f"tokens: prompt {prompt}{cached}; output {told['completion_tokens']:,}"


def _seconds(ms: int) -> str:
    return f"{ms / 1000:,.3f} s"


def _after(ms: int) -> str:
    return f"{ms / 1000:+,.3f} s"


def _numbers(moment: Mapping[str, Any]) -> str:
    first_n, n = moment.get("first_n", moment["n"]), moment["n"]
    return f"{n}" if first_n == n else f"{first_n}..{n}"


def _details(moment: Mapping[str, Any]) -> str:
    shown = {name: value for name, value in moment.items() if name not in ("at_ms", "id", "what", "who", "n")}
    if moment["what"] == "missing":
        return "not in this history"
    for name, defaults in GROUPS.items():
        shown |= _changed(shown.pop(name, {}), defaults)
    if moment["what"] != "tokens":  # what an error says is in the last lines
        return pairs_of({name: value for name, value in shown.items() if name != "message"})
    told = ("first_n", "count", "last_id", "last_at_ms", "longest_pause_ms", "longest_client_pause_ms")
    parts = [pairs_of({name: value for name, value in shown.items() if name not in told and value})]
    if moment["last_id"] != moment["id"]:
        longest, client = (_seconds(moment[f"longest_{whose}pause_ms"]) for whose in ("", "client_"))
        seen = "" if longest == client else f" (for the client {client})"
        run = f"until {_after(moment['last_at_ms'])}, longest pause {longest}{seen}"
        parts.insert(0, run)
    return "  ".join(filter(None, parts))


def pairs_of(values: Mapping[str, Any]) -> str:
    """Return names and values for people, in one line."""
    texts = {name: value if isinstance(value, str) else orjson.dumps(value).decode() for name, value in values.items()}
    return " ".join(f"{one_line(name)}={one_line(text)}" for name, text in texts.items())
