"""`minisgl replay diff FILE_A FILE_B`: two recordings of the same requests, compared token by token."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from ops.config import PrintConfig
from ops.connection import asks_for_help, counted
from ops.replay.explain import changes
from ops.replay.files import read_dump
from ops.replay.report import lines_of, report
from ops.replay.run import COULD_NOT, exit_code
from ops.trace import as_json
from pipeline.errors import ConfigError, MiniSGLError
from pipeline.flags import parse_flags, split_names
from pipeline.views.recorded import History

ABOUT: Final = """\
Compares the answers in two files of `minisgl replay dump`. Requests belong together if they have the same uid, if one
computes the other again, or if they have the same prompt and sampling parameters. If the engines had other weights,
another dtype or the like, a line says so, also if all answers are identical. The exit code is 0 if all answers are
identical, 1 if one differs, 2 if a file cannot be read or no request is in both.
"""
FLAGS: Final = (PrintConfig,)
WHICH: Final = "two files"

Asked: TypeAlias = tuple[tuple[int, ...], str]


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Compare two files and print what differs; return the exit code.

    Raises:
        ConfigError: The command line does not name two files, one is not there, or it has no answers.
    """
    names, flags = split_names(arguments, FLAGS)
    if len(names) != 2 and not asks_for_help(arguments):
        seen = " ".join(names) or "nothing"
        raise ConfigError(f"replay diff: {seen} given, expected two files (see minisgl replay diff --help)")
    paths = [Path(each) for each in names]
    (prints,) = parse_flags("replay diff FILE_A FILE_B", FLAGS, flags, environment, about=ABOUT)
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
