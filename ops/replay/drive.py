"""`minisgl replay drive`: sends recorded requests again, at the times at which they came. Checks and reports."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ops.bench import report
from ops.bench.load import Client, ServerRefused, Unreachable, connected
from ops.bench.serve import above_zero, bar, check_url
from ops.config import ArchivedConfig, ConnectConfig, PrintConfig
from ops.connection import counted, running_log
from ops.replay import driven
from ops.replay.choice import ChoiceConfig, Past, matches
from ops.replay.driven import Pair
from ops.replay.files import read_dump
from ops.replay.redact import stand_in
from ops.replay.sender import Sent, not_sent, send_all
from ops.replay.source import open_source
from ops.replay.traffic import Target, Traffic, traffic_of
from ops.shell.params import NotSet, Settings, read_settings
from ops.trace import as_json
from pipeline.errors import ConfigError, LogUnavailable
from pipeline.flags import first_word, flag, parse_flags, seconds, split_names, yes_or_no
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
    pairs = driven.pairs_of(sent)
    headline = (
        f"{recorded.name}: {counted(len(pairs), 'request')}, recorded within {traffic.recorded_s:,.1f} s, sent to "
        f"{config.url} at {config.speed:g}x"
    )
    if prints.as_json:
        about = _about(recorded, config, target, traffic)
        sys.stdout.write(as_json(about | driven.document(pairs, sent, with_answers=config.compare)))
    else:
        sys.stdout.write("\n".join(_lines(headline, recorded, config, target, traffic, sent, pairs)) + "\n")
    if config.plot:
        driven.plot(Path(config.plot), pairs, headline)
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
    lines = [headline, "", driven.table(pairs, same_clock=target.is_ours), driven.lateness(sent)]
    lines += _left_out(traffic)
    if traffic.dropped:
        fields = (f"{name} ({counted(count, 'request')})" for name, count in traffic.dropped.items())
        lines.append(f"fields not sent, because OpenAI's API lacks them: {', '.join(fields)}")
    if recorded.num_made_up:
        num = counted(recorded.num_made_up, "request")
        lines.append(f"made-up prompts, because they were redacted or come from a trace: {num}")
    if other := driven.other_prompts(pairs):
        num = counted(other, "request")
        lines.append(f"prompts of another length: {num}; another tokenizer or chat template is there")
    if config.compare:
        lines += ["", driven.comparison(driven.compared(pairs), draws_alike=target.draws_alike)]
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
    differs = compare and bool(driven.compared(pairs).differing)
    return 1 if errors or unread or differs else 0
