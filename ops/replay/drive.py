"""`minisgl replay drive`: sends recorded requests again, at the times at which they came. Checks; and reports what
came of them beside what was recorded: figures, a table, JSON and a plot.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ops.bench import report
from ops.bench.load import Client, ServerRefused, Unreachable, connected
from ops.bench.report import Spread, spread_of
from ops.bench.serve import bar, check_url
from ops.config import ArchivedConfig, ConnectConfig, PrintConfig
from ops.connection import counted, running_log
from ops.replay.files import read_dump
from ops.replay.redact import stand_in
from ops.replay.sender import Sent, not_sent, send_all
from ops.replay.source import ChoiceConfig, Past, matches, open_source
from ops.replay.traffic import (
    CANCELLED,
    FAILED,
    Difference,
    Outcome,
    Target,
    Traffic,
    first_difference,
    is_comparable,
    traffic_of,
)
from ops.shell.params import NotSet, Settings, read_settings
from ops.trace import as_json
from pipeline.errors import ConfigError, LogUnavailable
from pipeline.flags import above_zero, first_word, flag, parse_flags, seconds, split_names, yes_or_no
from pipeline.names import WEB
from pipeline.recording import Recording
from pipeline.stage.slots import Status, read_statuses
from web.http.listener import ANY_ADDRESS, url_here, url_to

ABOUT: Final = """\
Sends recorded requests again, each at its recorded distance from the first, whatever becomes of the others: those of
the FILE of a dump, or with --since those that a server or its archive has. It leaves where the recorded client left. A
MiniSGL gets the same bodies with the same seeds, any other OpenAI server those fields that OpenAI's API has. Exits with
1 if a request failed that had not failed before, or if --compare found a difference.
"""
OWN: Final[Mapping[str, str]] = {
    "model": "use --model",
    **dict.fromkeys(("messages", "prompt", "text", "input_ids"), "it is recorded"),
    **dict.fromkeys(("stream", "stream_options", "n"), "the recorded one is compared"),
}
"""Fields that --set may not change, and the reason."""


@dataclass(frozen=True, slots=True)
class DriveConfig:
    """Where the requests go, and how."""

    url: str = flag(
        "--url",
        default="",
        help=(
            "URL of the server that gets the requests, with or without /v1 [http://127.0.0.1:<port>; with --data-dir "
            "or --redis-url, where that server listens on this machine]"
        ),
    )
    speed: float = flag("--speed", default=1.0, parse=above_zero, help="factor for the pace; 2 is twice as fast")
    compare: bool = flag("--compare", default=False, parse=yes_or_no, help="compare the answers with the recorded ones")
    model: str = flag(
        "--model", default="", help="name of the model [the recorded one, or the first that the server lists]"
    )
    params: tuple[str, ...] = flag(
        "--set",
        default=(),
        repeated=True,
        help="fields of every request, NAME=VALUE, or NAME= to leave one out [as recorded]",
    )
    key: str = flag(
        "--api-key",
        default="",
        parse=first_word,
        secret=True,
        help="key to send; prefer MINISGL_API_KEY, because other users of this machine can read a command line [none]",
    )
    timeout_s: float = flag(
        "--timeout", default=600.0, parse=seconds, help="seconds without data after which a request counts as failed"
    )
    client_clock: bool = flag(
        "--client-clock",
        default=False,
        parse=yes_or_no,
        help="treat a MiniSGL as any OpenAI server, and measure it by this client's clock: compare the two so",
    )
    plot: str = flag("--plot", default="", help="file for a plot (.png, .svg, .pdf); needs minisgl[bench]")


FLAGS: Final = (DriveConfig, ChoiceConfig, ConnectConfig, ArchivedConfig, PrintConfig)


class Recorded:
    """The requests of a file, or those of a log and an archive."""

    def __init__(self, file: str, choice: ChoiceConfig, connect: ConnectConfig, archive: str) -> None:
        """An empty *file* means log and archive."""
        self.file = file
        self.name = file or ("log and archive" if archive else "log")
        self.left_out: dict[str, int] = {}
        """Why requests were not read -> how many."""
        self.num_made_up = 0
        """Requests that were redacted, or come from a trace: they get made-up prompts, and have no answers."""
        self._choice = choice
        self._connect = connect
        self._archive = archive

    def read(self) -> Iterator[Recording]:
        """Yield those that fulfil the conditions, as they can be sent. Raises as `_read` does."""
        for recording in self._read():
            self.num_made_up += "redacted" in recording.about
            yield stand_in(recording)

    def _read(self) -> Iterator[Recording]:
        """Yield those that fulfil the conditions.

        Raises:
            ConfigError: There is no such file or archive.
            DamagedFile, ArchiveDamaged: They cannot be read to their end.
            LogUnavailable: There is no such server, and no archive is named.
        """
        if self.file:
            yield from (each for each in read_dump(Path(self.file)) if matches(each.entries, self._choice.where))
            return
        with open_source(self._connect, self._archive) as source:
            past = Past(source, self._choice)
            yield from past.chosen()
        counts = {"without an end": past.num_running, "that expired meanwhile": past.num_gone}
        self.left_out = {reason: count for reason, count in counts.items() if count}


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Send requests again; return the exit code.

    Raises:
        ConfigError: The flags cannot work, or there is nothing to send.
        MiniSGLError: Not all requests can be read; nothing was sent.
    """
    files, flags = split_names(arguments, FLAGS)
    config, choice, connect, archived, prints = parse_flags(
        "replay drive FILE|--since T", FLAGS, flags, environment, about=ABOUT
    )
    if len(files) + choice.names_moments != 1:
        seen = " and ".join([*files, *(["--since or --until"] if choice.names_moments else [])]) or "nothing"
        raise ConfigError(f"replay drive: {seen} given, expected the FILE of a dump, or --since and --until")
    recorded = Recorded("".join(files), choice, connect, archived.archive)
    config = replace(config, url=config.url or url_without_flag(connect))
    check_url(config.url)
    report.check_can_plot(config.plot)
    settings = _settings(config)
    target, traffic, sent = asyncio.run(_driven(recorded, config, settings, goes_on=prints.as_json))
    pairs = pairs_of(sent)
    headline = (
        f"{recorded.name}: {counted(len(pairs), 'request')}, recorded within {traffic.recorded_s:,.1f} s, sent to "
        f"{config.url} at {config.speed:g}x"
    )
    if prints.as_json:
        about = _about(recorded, config, target, traffic)
        sys.stdout.write(as_json(about | document(pairs, sent, with_answers=config.compare)))
    else:
        sys.stdout.write("\n".join(_lines(headline, recorded, config, target, traffic, sent, pairs)) + "\n")
    if config.plot:
        plot(Path(config.plot), pairs, headline)
    return _exit_code(pairs, compare=config.compare)


def _settings(config: DriveConfig) -> Settings:
    try:
        return read_settings(" ".join(config.params), OWN)
    except NotSet as error:
        raise ConfigError(f"--set: {error}") from None


def url_without_flag(connect: ConnectConfig) -> str:
    """Return the default of --url: the server whose log is read.

    Raises:
        ConfigError: --data-dir or --redis-url names a server, and it does not say where it listens.
    """
    if not connect.data_dir and not connect.redis_url:
        return url_to("127.0.0.1", connect.port)
    named = "--redis-url names a Redis" if connect.redis_url else f"--data-dir {connect.data_dir} is a folder"
    try:
        with running_log(connect) as log:
            urls = [url for status in read_statuses(log, WEB) if (url := _url_here(status))]
    except LogUnavailable:
        urls = []
    if not urls:
        raise ConfigError(
            f"{named} in which no web process of this machine says where it listens; pass --url with the server that "
            "gets the requests"
        )
    return urls[0]


def _url_here(status: Status) -> str:
    """Return the URL at which this machine finds a web process; "" if it does not find it."""
    address = urlsplit(status.address)
    host, is_here = address.hostname, status.host == socket.gethostname()
    if not host or not address.port:
        return ""
    if host in ANY_ADDRESS or ipaddress.ip_address(host).is_loopback:
        return url_here(host, address.port) if is_here else ""
    return url_to(host, address.port)


async def _driven(
    recorded: Recorded, config: DriveConfig, settings: Settings, *, goes_on: bool
) -> tuple[Target, Traffic, list[Sent]]:
    """Send what was *recorded*. If the server cannot be reached, nothing is sent: then all requests have failed if it
    *goes_on*.

    Raises:
        ServerRefused: The server cannot be reached, and it does not go on.
    """
    async with connected(config.url, api_key=config.key, timeout_s=config.timeout_s) as client:
        unreachable: Unreachable | None = None
        try:
            target = await _target(client, config, settings)
        except Unreachable as error:
            target, unreachable = _unknown(config, settings), error
        traffic = traffic_of(recorded.read(), target, speed=config.speed)
        traffic = replace(traffic, left_out=recorded.left_out | dict(traffic.left_out))
        if not traffic.planned:
            raise ConfigError("; ".join([f"{recorded.name}: no request of it can be sent", *_left_out(traffic)]))
        if config.compare and recorded.num_made_up:
            raise ConfigError(f"--compare: {recorded.name} is redacted, or came from a trace, so it has no answers")
        if unreachable is not None:
            if not goes_on:
                num = sum(len(one.uids) for one in traffic.planned)
                raise ServerRefused(f"{unreachable}; none of {counted(num, 'request')} was sent")
            return target, traffic, [not_sent(one, unreachable.reason) for one in traffic.planned]
        with bar("requests", len(traffic.planned)) as advance:
            return target, traffic, await send_all(client, traffic.planned, is_ours=target.is_ours, after_each=advance)


def _unknown(config: DriveConfig, settings: Settings) -> Target:
    return Target(is_ours=False, draws_alike=False, model=config.model, settings=settings)


async def _target(client: Client, config: DriveConfig, settings: Settings) -> Target:
    """Return what the server says of itself. One that says nothing may still take requests.

    Raises:
        Unreachable: It cannot be reached.
    """
    plain = _unknown(config, settings)
    try:
        listed = (await client.document("GET", "/v1/models"))["data"]
        names = tuple(str(one["id"]) for one in listed)
        is_minisgl = any(one.get("owned_by") == "minisgl" for one in listed)
    except Unreachable:
        raise
    except (ServerRefused, AttributeError, KeyError, TypeError):
        return plain
    return replace(plain, is_ours=is_minisgl and not config.client_clock, draws_alike=is_minisgl, models=names)


def _about(recorded: Recorded, config: DriveConfig, target: Target, traffic: Traffic) -> dict[str, Any]:
    return {
        "file": recorded.file,
        "url": config.url,
        "speed": config.speed,
        "clock_after": "redis" if target.is_ours else "client",
        "recorded_s": traffic.recorded_s,
        "left_out": traffic.left_out,
        "made_up_prompts": recorded.num_made_up,
        "fields_not_sent": traffic.dropped,
    }


def _lines(
    headline: str,
    recorded: Recorded,
    config: DriveConfig,
    target: Target,
    traffic: Traffic,
    sent: Sequence[Sent],
    pairs: Sequence[Pair],
) -> list[str]:
    lines = [headline, "", table(pairs, same_clock=target.is_ours), lateness(sent)]
    lines += _left_out(traffic)
    if traffic.dropped:
        fields = (f"{name} ({counted(count, 'request')})" for name, count in traffic.dropped.items())
        lines.append(f"fields not sent, because OpenAI's API lacks them: {', '.join(fields)}")
    if recorded.num_made_up:
        num = counted(recorded.num_made_up, "request")
        lines.append(f"made-up prompts, because they were redacted or come from a trace: {num}")
    if other := other_prompts(pairs):
        num = counted(other, "request")
        lines.append(f"prompts of another length: {num}; another tokenizer or chat template is there")
    if config.compare:
        lines += ["", comparison(compared(pairs), draws_alike=target.draws_alike)]
    return lines


def _left_out(traffic: Traffic) -> list[str]:
    """Return a line that says what is not sent, if something is not."""
    reasons = ", ".join(f"{counted(count, 'request')} {reason}" for reason, count in traffic.left_out.items())
    return [f"left out: {reasons}"] if reasons else []


def _exit_code(pairs: Sequence[Pair], *, compare: bool) -> int:
    """Say on stderr what failed; return the exit code."""
    errors = [pair.after.error for pair in pairs if pair.after is not None and pair.has_failed]
    unread = [pair.sent.unread for pair in pairs if pair.after is None]
    for reasons, what in ((errors, "requests failed"), (unread, "histories could not be read")):
        if reasons:
            sys.stderr.write(f"minisgl: {len(reasons)} of {len(pairs)} {what}: {report.most_common(reasons)}\n")
    differs = compare and bool(compared(pairs).differing)
    return 1 if errors or unread or differs else 0


DIFFERENCES_SHOWN: Final = 20
"""The JSON has all."""
TIMES: Final = (
    ("time to first token, ms", "ttft_ms"),
    ("time per token after it, ms", "tpot_ms"),
    ("whole request, ms", "e2e_ms"),
)


@dataclass(frozen=True, slots=True)
class StepStats:
    """One side. Times of the whole are of answers that the model ended, the other times of all that have them."""

    num_requests: int
    num_whole: int
    num_cancelled: int
    num_errors: int
    prompt_tokens: int
    """Of the requests that say it, as is the next one."""
    cached_tokens: int
    ttft_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread

    @property
    def cached_share(self) -> str:
        return f"{self.cached_tokens / self.prompt_tokens:.0%}" if self.prompt_tokens else "-"


@dataclass(frozen=True, slots=True)
class Pair:
    """One recorded request, and what came of it now."""

    uid: str
    new_uid: str
    """Empty if the server does not tell it."""
    sent: Sent
    before: Outcome
    after: Outcome | None
    """None: its history could not be read."""

    @property
    def is_comparable(self) -> bool:
        """Whether both have an answer."""
        return self.after is not None and is_comparable(self.before, self.after)

    @property
    def difference(self) -> Difference | None:
        """Where the answers differ, if they can be compared and do."""
        if self.after is None or not is_comparable(self.before, self.after):
            return None
        return first_difference(self.before, self.after)

    @property
    def changed_end(self) -> str:
        """How its end changed, `stop -> length`; empty if it did not, or if the recorded client had left."""
        if self.after is None or self.before.by_client or self.before.end in ("", self.after.end):
            return ""
        return f"{self.before.end} -> {self.after.end or 'no end'}"

    @property
    def has_failed(self) -> bool:
        """Whether it fails now and did not before."""
        return self.after is not None and bool(self.after.error) and not self.before.error


@dataclass(frozen=True, slots=True)
class Compared:
    """How the answers of a run compare with the recorded ones."""

    num_compared: int
    num_greedy: int
    """Of them, those that were not sampled."""
    differing: tuple[tuple[str, Difference], ...]
    """The uid of the recorded request, and where its answer differs."""
    differing_greedy: int
    changed_ends: Mapping[str, int]

    @property
    def num_same(self) -> int:
        return self.num_compared - len(self.differing)


def pairs_of(sent: Sequence[Sent]) -> list[Pair]:
    """Return every recorded request that was sent again."""
    return list(_pairs(sent))


def _pairs(sent: Sequence[Sent]) -> Iterator[Pair]:
    for one in sent:
        new_uids = one.uids or ("",) * len(one.planned.uids)
        for uid, new_uid, before, after in zip(one.planned.uids, new_uids, one.planned.before, one.after, strict=True):
            yield Pair(uid, new_uid, one, before, after)


def figures_of(outcomes: Sequence[Outcome | None]) -> StepStats:
    """Return the figures of one side."""
    known = [outcome for outcome in outcomes if outcome is not None]
    whole = [outcome for outcome in known if outcome.is_whole]

    def spread(name: str, some: Sequence[Outcome]) -> Spread:
        return spread_of([value for outcome in some if (value := getattr(outcome, name)) is not None])

    return StepStats(
        num_requests=len(known),
        num_whole=len(whole),
        num_cancelled=sum(outcome.end == CANCELLED for outcome in known),
        num_errors=sum(outcome.end == FAILED or bool(outcome.error) for outcome in known),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in known),
        cached_tokens=sum(outcome.cached_tokens for outcome in known),
        ttft_ms=spread("ttft_ms", known),
        tpot_ms=spread("tpot_ms", known),
        e2e_ms=spread("e2e_ms", whole),
    )


def compared(pairs: Sequence[Pair]) -> Compared:
    """Compare all answers with the recorded ones."""
    comparable = [pair for pair in pairs if pair.is_comparable]
    greedy = [pair for pair in comparable if not pair.sent.planned.is_sampled]
    differing = [(pair.uid, difference) for pair in comparable if (difference := pair.difference) is not None]
    ends = Counter(pair.changed_end for pair in pairs if pair.changed_end)
    return Compared(
        num_compared=len(comparable),
        num_greedy=len(greedy),
        differing=tuple(differing),
        differing_greedy=sum(pair.difference is not None for pair in greedy),
        changed_ends=dict(ends.most_common()),
    )


def late_ms(sent: Sequence[Sent]) -> Spread:
    """Return how late requests were sent."""
    return spread_of([one.late_s * 1000 for one in sent])


def table(pairs: Sequence[Pair], *, same_clock: bool) -> str:
    """Return the figures of both sides as a table."""
    before = figures_of([pair.before for pair in pairs])
    after = figures_of([pair.after for pair in pairs])
    clock = "Redis' clock" if same_clock else "this client's clock, and not Redis' as before"
    rows: list[tuple[str, ...]] = [("", "before", "p50", "p90", "p99", "after", "p50", "p90", "p99")]
    for name, field in TIMES:
        cells = [name]
        for side in (before, after):
            spread: Spread = getattr(side, field)
            figures = (spread.p50, spread.p90, spread.p99)
            cells += ["", *(f"{value:,.1f}" if spread.count else "-" for value in figures)]
        rows.append(tuple(cells))
    for name, field in (("whole answers", "num_whole"), ("cancelled", "num_cancelled"), ("errors", "num_errors")):
        rows.append((name, f"{getattr(before, field):,}", "", "", "", f"{getattr(after, field):,}"))
    rows.append(("prompts from the cache", before.cached_share, "", "", "", after.cached_share))
    return f"{report.aligned(rows)}\nTimes after: by {clock}."


def lateness(sent: Sequence[Sent]) -> str:
    """Return how exactly the recorded times were kept."""
    late = late_ms(sent)
    lines = [f"sent late by: p50 {late.p50:.1f} ms, p99 {late.p99:.1f} ms"]
    if not report.kept_schedule(late):
        lines.append("The times were not kept: the sender had no time. Lower --speed, or send from another machine.")
    return "\n".join(lines)


def other_prompts(pairs: Sequence[Pair]) -> int:
    """Return how many prompts have another number of tokens than before, as far as both sides say it."""
    lengths = ((pair.before.prompt_tokens, pair.after.prompt_tokens) for pair in pairs if pair.after is not None)
    return sum(before != after for before, after in lengths if before and after)


def comparison(found: Compared, *, draws_alike: bool = True) -> str:
    """Return the comparison in lines. *draws_alike*: the same seed gives the same tokens as before."""
    if not found.num_compared:
        return "no answers to compare"
    share = found.num_same / found.num_compared
    lines = [f"identical answers: {found.num_same:,} of {found.num_compared:,} ({share:.1%})"]
    if not draws_alike and found.num_greedy < found.num_compared:
        same = found.num_greedy - found.differing_greedy
        lines.append(f"of those at temperature 0: {same:,} of {found.num_greedy:,}; another engine draws other tokens")
    lines += [f"  {uid} differs at {difference}" for uid, difference in found.differing[:DIFFERENCES_SHOWN]]
    more = len(found.differing) - DIFFERENCES_SHOWN
    lines += [f"  and {more:,} more; --json has all"] if more > 0 else []
    if found.changed_ends:
        ends = ", ".join(f"{count:,}x {change}" for change, count in found.changed_ends.items())
        lines.append(f"changed finish reasons: {ends}")
    return "\n".join(lines)


def document(pairs: Sequence[Pair], sent: Sequence[Sent], *, with_answers: bool) -> dict[str, Any]:
    """Return all figures and every request for JSON; *with_answers*: with what the comparison found."""
    plain = {
        "before": figures_of([pair.before for pair in pairs]),
        "after": figures_of([pair.after for pair in pairs]),
        "late_ms": late_ms(sent),
    }
    if with_answers:
        found = compared(pairs)
        counts = {"compared": found.num_compared, "identical": found.num_same, "changed_ends": found.changed_ends}
        plain |= {"answers": counts}
    return plain | {"requests": [_row(pair, with_answers=with_answers) for pair in pairs]}


def _row(pair: Pair, *, with_answers: bool) -> dict[str, Any]:
    planned = pair.sent.planned
    row: dict[str, Any] = {
        "uid": pair.uid,
        "new_uid": pair.new_uid or None,
        "path": planned.path,
        "sampled": planned.is_sampled,
        "due_ms": round(planned.due_s * 1000, 3),
        "late_ms": round(pair.sent.late_s * 1000, 3),
        "before": pair.before.plain(),
        "after": None if pair.after is None else pair.after.plain(),
    }
    row |= {"unread": pair.sent.unread} if pair.sent.unread else {}
    if with_answers:
        row |= {"identical": pair.difference is None if pair.is_comparable else None, "difference": pair.difference}
    return row


def plot(path: Path, pairs: Sequence[Pair], title: str) -> None:
    """Draw the share of requests below each time, before and after."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    figure.suptitle(title, fontsize=9)
    for axes, (name, field) in zip(figure.subplots(1, len(TIMES)), TIMES, strict=True):
        sides = (("before", [pair.before for pair in pairs]), ("after", [pair.after for pair in pairs if pair.after]))
        for label, outcomes in sides:
            some = [one for one in outcomes if one.is_whole or field != "e2e_ms"]
            values = [value for one in some if (value := getattr(one, field)) is not None]
            if values:
                axes.step(np.sort(values), np.arange(1, len(values) + 1) / len(values), where="post", label=label)
        axes.set(xscale="log", xlabel=name, ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        axes.legend(loc="best")
    figure.savefig(path, dpi=120)
