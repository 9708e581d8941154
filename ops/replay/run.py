"""`minisgl replay run UID..`: compute recorded requests again, and compare them token by token."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from ops.config import ArchivedConfig, ConnectConfig, PrintConfig, RetentionConfig
from ops.connection import asks_for_help, one_line
from ops.replay.compute import OF_ENGINES, Computer, Computes, Serves, refuse_without_engine
from ops.replay.report import computed_report, lines_of, report
from ops.replay.source import Source, open_source
from ops.trace import as_json
from pipeline.errors import ConfigError, MiniSGLError
from pipeline.events import Failed, Submitted
from pipeline.flags import at_least, first_word, flag, flags_of, parse_flags, split_names, yes_or_no
from pipeline.log.protocol import RequestLimits, StreamLog
from pipeline.replaying import NotComputed, again
from pipeline.views.recorded import History
from web.config import RequestConfig

ABOUT: Final = """\
Computes requests again with their recorded tokens and seed, and compares the answers token by token. The running server
computes them, with the lowest priority. With --model, or any other flag of an engine, this process does it, and the
server is only read; a request that killed its engine gets a process of its own, and what that one died of is shown. The
exit code is 0 if all answers are identical, 1 if one differs, 2 if one could not be computed.
"""
COULD_NOT: Final = 2
KILLED: Final = (
    "it killed its engine, so the server does not compute it; pass --model (and the flags of its engine) to compute it "
    "in a process of its own"
)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How requests are computed again."""

    times: int = flag("--times", default=1, parse=at_least(1), help="how often to compute each request")
    at_once: int = flag(
        "--at-once", default=16, parse=at_least(1), help="most requests that are computed at a time; 1: each alone"
    )
    cached: bool = flag(
        "--cached", default=False, parse=yes_or_no, help="let them read the prefix cache; without, all is computed"
    )
    url: str = flag(
        "--url",
        default="",
        help=(
            "URL of another MiniSGL server that computes them, over HTTP. It may read its prefix cache, and it encodes "
            "bad words itself [the server that has them]"
        ),
    )
    key: str = flag(
        "--api-key",
        default="",
        parse=first_word,
        secret=True,
        help=(
            "key for --url; prefer MINISGL_API_KEY, because other users of this machine can read a command line [none]"
        ),
    )


FLAGS: Final = (ConnectConfig, RequestConfig, RetentionConfig, ArchivedConfig, RunConfig, PrintConfig, *OF_ENGINES)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Compute requests again and print what came of it; return the exit code.

    Raises:
        ConfigError: The flags cannot work.
    """
    names, flags = split_names(arguments, FLAGS)
    if not names and not asks_for_help(arguments):
        raise ConfigError("replay run: no UID given, expected one or more (see minisgl replay run --help)")
    connect, requests, retention, archived, run, prints, *engine = parse_flags(
        "replay run UID..", FLAGS, flags, environment, about=ABOUT
    )
    here = computes_here(flags)
    if here and run.url:
        raise ConfigError("--url and flags of an engine both say who computes; pass one of them")
    limits = RequestLimits(timeout_s=requests.request_timeout_s, max_queued=requests.max_queued_requests)
    try:
        with open_source(connect, archived.archive, retention.retention_s, limits) as source:
            histories = [History(recording) for recording in source.recordings(names)]
            deadly = [history.uid for history in histories if _is_deadly(history, source)]
            if not here:
                if not run.url and len(deadly) < len(histories):
                    refuse_without_engine(source.log)
                computer = _computer(source.log, run, requests.request_timeout_s)
                reports = reports_of(histories, computer, run, computer.models(), dict.fromkeys(deadly, KILLED))
        if here:
            reports = _computed_here(histories, deadly, run, engine, requests.request_timeout_s)
    except ConfigError:
        raise
    except MiniSGLError as error:
        sys.stderr.write(f"minisgl: {' '.join(str(error).split())}\n")
        return COULD_NOT
    text = as_json(reports) if prints.as_json else "".join(f"{line}\n" for told in reports for line in lines_of(told))
    sys.stdout.write(text)
    return max(exit_code(told) for told in reports)


def computes_here(flags: Sequence[str]) -> bool:
    """Return whether *flags* have one of an engine, so that this process computes."""
    names = {name for item in flags_of(OF_ENGINES) for name in item.metadata["flags"]}
    return any(each.partition("=")[0] in names for each in flags)


def reports_of(
    histories: Sequence[History],
    computer: Computes,
    run: RunConfig,
    served: Sequence[str] = (),
    refused: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Compute each of *histories* again, as often as *run* says; return what came of it. *served* is as in `report`.

    *refused*: uid -> why it is not computed.
    """
    events, reasons = dict[str, Submitted](), dict(refused)
    for history in histories:
        try:
            if history.uid not in reasons:
                events[history.uid] = again(history, cached=run.cached)
        except NotComputed as error:
            reasons[history.uid] = str(error).removeprefix(f"{history.uid}: ")
    computed = iter(computer.compute([event for event in events.values() for _ in range(run.times)]))
    replays = {uid: [next(computed) for _ in range(run.times)] for uid in events}
    return [
        computed_report(history, replays[history.uid], computer, served)
        if history.uid in events
        else report(history, []) | {"times": run.times, "failed": reasons[history.uid]}
        for history in histories
    ]


def exit_code(told: Mapping[str, Any]) -> int:
    """Return 0 for a report of identical answers, 1 where one differs, 2 where one could not be computed."""
    if "failed" in told:
        return COULD_NOT
    return int(told["identical"] < told["times"])


def _computer(log: StreamLog, run: RunConfig, timeout_s: float) -> Serves:
    """Return the server that --url names, or the one of *log*."""
    if run.url:
        from ops.replay.remote import RemoteComputer

        return RemoteComputer(run.url, run.key, at_once=run.at_once, timeout_s=timeout_s)
    return Computer(log, at_once=run.at_once)


def _is_deadly(history: History, source: Source) -> bool:
    is_poisonous = isinstance(history.end, Failed) and history.end.code == "poisonous"
    return is_poisonous or source.dead_letter(history.uid) is not None


def _model_of(history: History) -> str:
    name = one_line(history.submitted.model) if history.submitted is not None else ""
    return f"model {name or 'without a name'} with weights {history.maker.weights or 'that are not known'}"


def _computed_here(
    histories: Sequence[History], deadly: Sequence[str], run: RunConfig, engine: Sequence[Any], timeout_s: float
) -> list[dict[str, Any]]:
    """As `reports_of`, with an engine of this process; one that killed its engine gets a process of its own."""
    from stages.generate.model.folder import model_folder

    model, settings = engine
    try:
        model_folder(model.model, dummy=settings.dummy_weight)
    except ConfigError as error:
        made = dict.fromkeys(_model_of(history) for history in histories)
        raise ConfigError(f"{error}; recorded: {', '.join(made)}") from error

    from ops.replay.isolated import compute_isolated  # torch takes seconds, and is needed only here
    from ops.replay.local import local_engine

    harmless = [history for history in histories if history.uid not in deadly]
    told = {history.uid: compute_isolated(history, engine, timeout_s) for history in histories if history.uid in deadly}
    if harmless:
        with local_engine(*engine, at_once=run.at_once) as computer:
            told |= {each["uid"]: each for each in reports_of(harmless, computer, run)}
    return [told[history.uid] for history in histories]
