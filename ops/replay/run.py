"""`minisgl replay run UID..`: compute recorded requests again, and compare them token by token.

`minisgl replay diff FILE_A FILE_B` compares two recordings of the same requests in the same way.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias, cast

from ops.config import ArchivedConfig, ConnectConfig, PrintConfig, RetentionConfig
from ops.connection import asks_for_help, counted, one_line
from ops.replay.compute import OF_ENGINES, Computer, Computes, Serves, refuse_without_engine
from ops.replay.files import read_dump
from ops.replay.report import changes, computed_report, lines_of, report
from ops.replay.source import Source, open_source
from ops.trace import as_json
from pipeline.errors import ConfigError, MiniSGLError
from pipeline.events import Failed, Submitted
from pipeline.flags import at_least, first_word, flag, flags_of, parse_flags, split_names, yes_or_no
from pipeline.log.protocol import HistoryLog, RequestLimits, RequestLog
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


def _computer(log: HistoryLog, run: RunConfig, timeout_s: float) -> Serves:
    """Return the server that --url names, or the one of *log*."""
    if run.url:
        from ops.replay.sender import RemoteComputer

        return RemoteComputer(run.url, run.key, at_once=run.at_once, timeout_s=timeout_s)
    return Computer(cast(RequestLog, log), at_once=run.at_once)  # an EmptyLog is asked for its models alone


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
        model_folder(model.model, tokenizer=model.tokenizer, loading=settings.loading)
    except ConfigError as error:
        made = dict.fromkeys(_model_of(history) for history in histories)
        raise ConfigError(f"{error}; recorded: {', '.join(made)}") from error

    from ops.replay.isolated import (
        compute_isolated,  # torch takes seconds, and is needed only here
        local_engine,
    )

    harmless = [history for history in histories if history.uid not in deadly]
    told = {history.uid: compute_isolated(history, engine, timeout_s) for history in histories if history.uid in deadly}
    if harmless:
        with local_engine(*engine, at_once=run.at_once) as computer:
            told |= {each["uid"]: each for each in reports_of(harmless, computer, run)}
    return [told[history.uid] for history in histories]


DIFF_ABOUT: Final = """\
Compares the answers in two files of `minisgl replay dump`. Requests belong together if they have the same uid, if one
computes the other again, or if they have the same prompt and sampling parameters. If the engines had other weights,
another dtype or the like, a line says so, also if all answers are identical. The exit code is 0 if all answers are
identical, 1 if one differs, 2 if a file cannot be read or no request is in both.
"""
DIFF_FLAGS: Final = (PrintConfig,)
WHICH: Final = "two files"

Asked: TypeAlias = tuple[tuple[int, ...], str]


def diff(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Compare two files and print what differs; return the exit code.

    Raises:
        ConfigError: The command line does not name two files, one is not there, or it has no answers.
    """
    names, flags = split_names(arguments, DIFF_FLAGS)
    if len(names) != 2 and not asks_for_help(arguments):
        seen = " ".join(names) or "nothing"
        raise ConfigError(f"replay diff: {seen} given, expected two files (see minisgl replay diff --help)")
    paths = [Path(each) for each in names]
    (prints,) = parse_flags("replay diff FILE_A FILE_B", DIFF_FLAGS, flags, environment, about=DIFF_ABOUT)
    try:
        before, after = (read(path) for path in paths)
    except ConfigError:
        raise
    except MiniSGLError as error:
        sys.stderr.write(f"minisgl: {' '.join(str(error).split())}\n")
        return COULD_NOT
    pairs = list(pairs_of(before, after))
    if not pairs:
        sys.stderr.write(f"minisgl: no request is in both {paths[0]} and {paths[1]}\n")
        return COULD_NOT
    told = [report(history, [now]) for history, now in pairs]
    engines = Counter(tuple(changes(history.maker, now.maker)) for history, now in pairs)
    others = [(count, changed) for changed, count in engines.most_common() if changed]
    differing = [each for each in told if each["differences"]]
    identical, lone = len(told) - len(differing), [len(each) - len(pairs) for each in (before, after)]
    if prints.as_json:
        counts = {"compared": len(told), "identical": identical, "only_in_a": lone[0], "only_in_b": lone[1]}
        named = [{"requests": count, "changes": changed} for count, changed in others]
        sys.stdout.write(as_json(counts | {"other_engines": named, "requests": told}))
    else:
        alike = ({name: value for name, value in each.items() if name != "other_weights"} for each in differing)
        lines = [line for each in alike for line in lines_of(each)]
        lines.append(f"{counted(len(told), 'request')} in both: {identical} identical, {len(differing)} different")
        lines += [f"{count} of them by another engine: {'; '.join(changed)}" for count, changed in others]
        lines += [f"only in {path}: {count}" for path, count in zip(paths, lone, strict=True) if count]
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    return max(exit_code(each) for each in told)


def read(path: Path) -> list[History]:
    """Return the requests of a file.

    Raises:
        ConfigError: It is not there, or its answers were left out.
        DamagedFile, ArchiveDamaged: It cannot be read to its end.
    """
    recordings = list(read_dump(path))
    if any("redacted" in each.about for each in recordings):
        raise ConfigError(f"{path}: it is redacted, or came from a trace, so it has no answers; name a whole dump")
    return [History(recording) for recording in recordings]


def pairs_of(before: Iterable[History], after: Iterable[History]) -> Iterator[tuple[History, History]]:
    """Yield which of *before* and *after* are the same request; each is in one pair at most."""
    by_uid, by_asked = dict[str, History](), dict[Asked, list[History]]()
    for history in before:
        by_uid[history.uid] = history
    rest = []
    for now in after:
        replay = now.submitted.replay if now.submitted is not None else None
        found = by_uid.pop(now.uid, None) or (by_uid.pop(replay.of, None) if replay is not None else None)
        if found is None:
            rest.append(now)
        else:
            yield found, now
    for history in by_uid.values():
        by_asked.setdefault(_asked(history), []).append(history)
    for now in rest:
        if alike := by_asked.get(_asked(now)):
            yield alike.pop(0), now


def _asked(history: History) -> Asked:
    """Return what decides about the tokens of a request."""
    prompt = history.tokenized.token_ids if history.tokenized is not None else ()
    return prompt, history.submitted.sampling.model_dump_json() if history.submitted is not None else ""
