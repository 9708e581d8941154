"""`minisgl replay show UID [--at N]`: a recorded request when it had N tokens.

The journal of its engine tells in whose company a token was made, and why it took long, as long as it has the steps.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import orjson

from ops.config import ArchivedConfig, ConnectConfig, PrintConfig, RetentionConfig
from ops.connection import NotThere, counted, one_line, split_named
from ops.replay.report import short
from ops.replay.source import open_source
from ops.trace import as_json, pairs_of, when
from pipeline.errors import ConfigError
from pipeline.events import SamplingParams, as_plain
from pipeline.flags import at_least, flag, parse_flags
from pipeline.log.journal import outline, steps
from pipeline.log.protocol import HistoryLog
from pipeline.names import parse_id
from pipeline.views.company import Company, Wait, why_waited
from pipeline.views.recorded import History, State, Token, said_of_end

ABOUT: Final = """\
Shows a request when it had N tokens: the text so far, the token ids, what token N was sampled from, who made it and
when. Without --at, N is the last token. The most probable tokens are there if the client asked for log-probabilities.
The batch and the pages are there while the journal of the engine has the step.
"""
MOST_NAMED: Final = 8
"""Requests of a batch that are named; --json has all."""


@dataclass(frozen=True, slots=True)
class ShowConfig:
    """Which moment is shown."""

    at: int | None = flag("--at", default=None, parse=at_least(0), help="number of tokens; 0: before the first [all]")


FLAGS: Final = (ConnectConfig, RetentionConfig, ArchivedConfig, ShowConfig, PrintConfig)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Print a request at one moment; return the exit code.

    Raises:
        ConfigError: The flags cannot work, or the request never had so many tokens.
        NotThere: There is no such request.
        LogUnavailable: There is no such server, and no archive is named.
        UndecodableEvent: The history is damaged.
    """
    name, flags = split_named("replay show", arguments, "the uid of a request", FLAGS)
    connect, retention, archived, shown, prints = parse_flags("replay show UID", FLAGS, flags, environment, about=ABOUT)
    with open_source(connect, archived.archive, retention.retention_s) as source:
        recordings = source.recordings([name])
        if len(recordings) > 1:
            uids = ", ".join(recording.uid for recording in recordings)
            raise NotThere(f"{one_line(name)}: means {len(recordings)} requests; name one of them: {uids}")
        history = History(recordings[0])
        try:
            state = history.at(len(history.tokens) if shown.at is None else shown.at)
        except IndexError as error:
            raise ConfigError(f"--at {shown.at}: {error}") from error
        told = told_of(history, state) | company(source.log, history, state) | waited(source.log, history, state)
    sys.stdout.write(as_json(told) if prints.as_json else "".join(f"{line}\n" for line in lines_of(told)))
    return 0


def told_of(history: History, state: State) -> dict[str, Any]:
    """Return *state* of a request as plain data."""
    submitted, tokenized, last = history.submitted, history.tokenized, state.last
    sampling = submitted.sampling if submitted is not None else SamplingParams()
    prompt_ids = tokenized.token_ids if tokenized is not None else ()
    told: dict[str, Any] = {
        "uid": history.uid,
        "state": said_of_end(history.end),
        "n": state.n,
        "tokens": len(history.tokens),
        "submitted_ms": submitted.ms if submitted is not None else 0,
        "at_ms": state.at_ms,
        "pause_ms": state.pause_ms,
        "client_at_ms": state.client_at_ms,
        "client_pause_ms": state.client_pause_ms,
        "prompt_tokens": len(prompt_ids),
        "position": len(prompt_ids) + state.n - 1,
        "sampling": sampling.model_dump(mode="json", exclude_defaults=True) | {"seed": sampling.seed},
        "marks": [as_plain(mark) for mark in state.marks],
        "text": state.text,
        "token_ids": state.token_ids,
    }
    pauses = [(after.made.ms - before.made.ms, -after.n) for before, after in pairwise(history.tokens)]
    if pauses:
        pause_ms, place = max(pauses)
        told["slowest"] = {"n": -place, "pause_ms": pause_ms}
    if last is not None:
        by = last.by
        told |= {"committed": [*history.commit_of(last)], "estimated": last.made.is_estimate}
        told |= {"token": last.id, "engine": by.engine, "epoch": by.epoch, "step": last.step, "chunks": last.chunks}
        told |= {"weights": by.weights, "numerics": by.numerics, "version": by.version}
        told |= {"scores": last.score.model_dump(mode="json")} if last.score is not None else {}
    return told


def company(log: HistoryLog, history: History, state: State) -> dict[str, Any]:
    """Return the batch of the last token and the pages, as plain data; `batch` is None if the journal lacks them."""
    if state.last is None:
        return {}
    return {"batch": None} | company_at(log, history, state.last)


def waited(log: HistoryLog, history: History, state: State) -> dict[str, Any]:
    """Return what the engine did meanwhile, as plain data; nothing if its journal lacks the step of the token."""
    last, submitted = state.last, history.submitted
    if last is None or submitted is None:
        return {}
    since_ms = submitted.ms + state.at_ms - state.pause_ms
    until_ms = last.made.ms if last.made.is_estimate and state.n > 1 else None
    wait = why(log, last.by.engine, last.step, history.uid, state.n, since_ms, until_ms)
    return {} if wait is None else {"meanwhile": wait.reasons, "meanwhile_steps": wait.num_steps}


def lines_of(told: Mapping[str, Any]) -> list[str]:
    """Return it in lines, each with its name in front."""
    rows = [
        ("request", f"{one_line(told['uid'])}: {told['state']}, {counted(told['tokens'], 'token')}"),
        ("token", f"{told['n']:,}" + (f", id {told['token']}" if "token" in told else ": none yet")),
        ("time", _time(told)),
        *_client(told),
        *_slowest(told),
        *_made(told),
        *_company(told),
        *(("meanwhile" if not index else "", reason) for index, reason in enumerate(told.get("meanwhile", ()))),
        *(("mark", pairs_of(mark)) for mark in told["marks"]),
        ("sampling", pairs_of(told["sampling"])),
        *_scores(told),
        ("text", one_line(told["text"])),
        ("ids", " ".join(map(str, told["token_ids"]))),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}".rstrip() for name, text in rows]


def _time(told: Mapping[str, Any]) -> str:
    before = "the token before" if told["n"] > 1 else "it was submitted"
    now = when(told["submitted_ms"] + told["at_ms"])
    return f"{now}, {told['at_ms'] / 1000:,.3f} s after submit, {told['pause_ms'] / 1000:,.3f} s after {before}"


def _client(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Say when the token was committed for the client, and what with it."""
    if "committed" not in told:
        return []
    (first, last), late_ms = told["committed"], told["client_at_ms"] - told["at_ms"]
    said = f"{late_ms / 1000:,.3f} s later, {told['client_pause_ms'] / 1000:,.3f} s after the token before"
    if last > first:
        said += f"; tokens {first:,} to {last:,} were committed together (--commit-interval)"
        said += ", and when each was made is an estimate" if told["estimated"] else ""
    return [("client", said)]


def _slowest(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "slowest" not in told or told["slowest"]["n"] == told["n"]:
        return []
    n, pause_ms = told["slowest"]["n"], told["slowest"]["pause_ms"]
    return [("slowest", f"token {n:,}, {pause_ms / 1000:,.3f} s after the token before (--at {n})")]


def _made(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "token" not in told:
        return []
    prompt = f", with the last of {told['chunks']} chunks of its prompt" if told["chunks"] else ""
    how = {name: told[name] for name in ("weights", "numerics", "version") if told[name]}
    step = f"epoch {told['epoch']}, step {told['step'].partition('-')[2]}{prompt}"
    return [("engine", f"{one_line(told['engine'])} {step}"), ("with", pairs_of(how))]


def _company(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "batch" not in told:
        return []
    if told["batch"] is None:
        return [("batch", "unknown: the journal does not have this step (--journal-bytes, --retention)")]
    batch, pages = told["batch"], told["pages"]
    others = batch["others"]
    named = ", ".join(map(one_line, others[:MOST_NAMED])) or "no other request"
    named += f" and {len(others) - MOST_NAMED:,} more" if len(others) > MOST_NAMED else ""
    used = f", {pages['all'] - pages['free']:,} used" if "all" in pages else ""
    return [
        ("batch", f"{counted(batch['rows'], 'row')}, {counted(batch['prompt_tokens'], 'prompt token')}"),
        ("beside", named),
        ("pages", f"{pages['free']:,} free{used}, after the step"),
    ]


def _scores(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "scores" not in told:
        return []
    score = told["scores"]
    texts = [f"{each['text']!r} {short(each['logprob'])}" for each in (score, *score["top"])]
    names = ("logprob", "probable", *("" for _ in score["top"]))
    return list(zip(names, texts, strict=False))


READ_AT_ONCE: Final = 500
MOST_READ: Final = 20_000
"""Steps. A wait of more is told from its end alone."""
MOST_BEFORE: Final = 2_000
"""Steps that are read back to the last snapshot of the schedule. An engine writes one every 1,000 steps."""


def company_at(log: HistoryLog, history: History, token: Token) -> dict[str, Any]:
    """Return the batch that made *token* and the pages after it, as plain data; nothing if the journal lacks its step.

    Raises:
        UndecodableEvent: The journal is damaged.
    """
    entries = log.journal(token.by.engine, first=token.step, last=token.step)
    while entries and len(entries) < MOST_BEFORE and not any("schedule" in entry.fields for entry in entries):
        before = log.journal(token.by.engine, last=f"({entries[0].id}", max_entries=READ_AT_ONCE, newest=True)
        if not before:
            break
        entries = [*before, *entries]
    step = next((step for step in steps(entries) if step.id == token.step), None)
    if step is None or all((row.uid, row.n) != (history.uid, token.n) for row in step.rows):
        return {}  # it may be a step of another server, from which the request was imported
    company = Company(history)
    company.take(token.by.engine, step)
    (told,) = company.plain(str)["steps"]
    snapshots = [entry for entry in entries if "schedule" in entry.fields]
    pages = {"free": told["pages_free"]}
    if snapshots and parse_id(snapshots[-1].id)[0] == step.epoch:
        pages["all"] = orjson.loads(snapshots[-1].fields["schedule"])["num_pages"]
    batch = {"rows": told["rows"], "prompt_tokens": step.figures.prefill_tokens, "others": told["companions"]}
    return {"batch": batch, "pages": pages}


def why(
    log: HistoryLog, engine: str, step_id: str, uid: str, n: int, since_ms: int, until_ms: int | None = None
) -> Wait | None:
    """Return why token *n* of *uid* waited from *since_ms* on, until step *step_id* of *engine* made it.

    *until_ms* is as for `why_waited`.

    None: the journal does not have that step, or no longer.

    Raises:
        UndecodableEvent: The journal is damaged.
    """
    steps = [outline(entry) for entry in log.journal(engine, first=step_id, last=step_id)]
    while steps and len(steps) < MOST_READ and steps[0].made_ms > since_ms:
        entries = log.journal(engine, last=f"({steps[0].id}", max_entries=READ_AT_ONCE, newest=True)
        if not entries:
            break
        steps[:0] = map(outline, entries)
    between = [step for step in steps if step.made_ms > since_ms or step.id == step_id]
    return why_waited(between, uid, n, since_ms, until_ms) if between else None
