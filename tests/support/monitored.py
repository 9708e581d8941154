"""Time as Prometheus sees it, for the tests of ops/monitoring: the real text of /metrics of a made server, as series
of promtool. Knows no alert and no panel.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import orjson
import pytest
from support.measured import Scrape

from pipeline.log.protocol import Depth, Occupancy
from pipeline.metrics import families
from pipeline.metrics.counters import Measures
from pipeline.names import GENERATE, slot_stage
from pipeline.stage.slots import Status
from web.live.metrics import LogFacts, render

MODEL = "m"
WORKERS = ("web-0", "web-1", "tokenize-0", "generate-0", "generate-1", "detokenize-0", "detokenize-1", "archive-0")
COMMITS = {"web": "submit", "tokenize": "tokenized", "generate": "step", "detokenize": "produced"}
TROUBLE = {families.NUM_PREEMPTIONS, families.TAKEOVERS, families.BURIED, families.EXPIRED_EARLY}
"""What a healthy server does not count."""
GAUGES = {
    families.NUM_RUNNING: 2,
    families.KV_CACHE_USAGE: 0.5,
    families.STREAMS_OPEN: 2,
    families.OPEN_FDS: 20,
    families.MAX_FDS: 1024,
    families.RESIDENT_BYTES: 2**28,
    families.START_SECONDS: 1.79e9,
    families.ARCHIVE_BACKLOG: 1,
}


class MadeServer:
    """A server with two web processes, as its metrics tell it. Healthy, until a test changes something."""

    def __init__(self) -> None:
        self.measures = {slot: Measures() for slot in WORKERS}
        self.ready = set(WORKERS)
        """Workers that say that they are ready; all others say nothing."""
        self.is_up, self.has_log = True, True
        self.num_live, self.num_queued, self.num_dead = 4, 0, 0
        self.used_bytes = 2**28

    def pass_healthy(self, minutes: int) -> None:
        """Let so many *minutes* of ordinary requests pass: the server refuses none, and none fails."""
        for family in set(families.FAMILIES) - TROUBLE:
            if family.kind == "counter" and not family.labels:
                self.add(family, 100 * minutes)
            elif family.kind == "histogram" and not family.labels:
                self.observe(family, 0.02, 100 * minutes)
        for stage, commit in COMMITS.items():
            self.observe(families.COMMIT_SECONDS, 0.001, 100 * minutes, commit, slot=f"{stage}-0")
        self.add(families.REQUEST_SUCCESS, 100 * minutes, "stop")
        self.add(families.HTTP_RESPONSES, 100 * minutes, "/v1/chat/completions", "POST", "200")
        self.add(families.REJECTIONS, minutes, "requests_per_minute")  # a client's matter
        for gauge, value in GAUGES.items():
            self.set(gauge, value)

    def add(self, family: families.Family, amount: float, *labels: str, slot: str = "") -> None:
        for measures in self._who(family, slot):
            measures.add(family, *labels, amount=amount)

    def observe(self, family: families.Family, value: float, times: int, *labels: str, slot: str = "") -> None:
        for measures in self._who(family, slot):
            measures.observe(family, value, *labels, times=times)

    def set(self, family: families.Family, value: float, slot: str = "") -> None:
        for measures in self._who(family, slot):
            measures.set(family, value)

    def lose(self, stage: str) -> None:
        """End all workers of *stage*."""
        self.ready -= {slot for slot in WORKERS if slot_stage(slot) == stage}

    def scrapes(self, names: Collection[str]) -> Sequence[Scrape]:
        """Return what each web process answers, the families of *names* alone."""
        if not self.is_up:
            return [Scrape("")] * 2
        if self.has_log:  # the counts of a web process and its status are the same here, so their texts are
            return [self._scrape("web-0", names)] * 2
        return [self._scrape("web-0", names), self._scrape("web-1", names)]

    def _who(self, family: families.Family, slot: str = "") -> Iterable[Measures]:
        return [self.measures[each] for each in WORKERS if slot in ("", each) and slot_stage(each) in family.stages]

    def _scrape(self, web: str, names: Collection[str]) -> Scrape:
        snapshots = {slot: self.measures[slot].snapshot() for slot in sorted(self.ready)}
        statuses = [
            Status(
                slot=slot,
                owner="1:a",
                pid=1,
                host="here",
                phase="ready",
                metrics=snapshot,
                models=(MODEL,) if slot_stage(slot) == GENERATE else (),
            )
            for slot, snapshot in snapshots.items()
        ]
        idle = Depth(0, 0)
        occupancy = Occupancy(Depth(self.num_queued, 0), idle, {"generate-0": idle}, self.num_dead, self.num_live)
        server = ("Valkey", "9.1.2")
        facts = LogFacts(server, self.used_bytes, 2**30, occupancy, statuses, {}) if self.has_log else None
        texts = [text.decode() for text in render(facts, {web: snapshots[web]}, MODEL) if text]
        return Scrape("".join(text for text in texts if any(name.startswith(text.split()[2]) for name in names)))


Passing: TypeAlias = Callable[[MadeServer, int], None]
"""Lets so many minutes pass. What it sets is so from the first minute on, what it counts comes evenly."""


def series_of(
    periods: Sequence[tuple[int, Passing]], names: Collection[str], *, job: str, num_webs: int = 2
) -> list[dict[str, str]]:
    """Return the series *names* as promtool wants them, a sample a minute, of so many web processes."""
    server, values, num_before = MadeServer(), dict[str, list[str]](), 0
    for minutes, passing in periods:
        passing(server, 1)
        first = server.scrapes(names)[:num_webs]
        passing(server, minutes - 1)
        for number, (start, end) in enumerate(zip(first, server.scrapes(names), strict=False)):
            target = {"job": job, "instance": f"web-{number}:1919"}
            now = {
                _text(name, {**dict(labels), **target}): _ramp(value, end.samples.get((name, labels), value), minutes)
                for (name, labels), value in start.samples.items()
                if name in names
            }
            for series in {text for text in values if f'"{target["instance"]}"' in text} - set(now):
                now[series] = f"stale _x{minutes - 2}"
            for series, text in now.items():
                values.setdefault(series, [f"_x{num_before - 1}"] if num_before else []).append(text)
        num_before += minutes
    return [{"series": series, "values": " ".join(texts)} for series, texts in values.items()]


def promtool(*words: str | Path) -> None:
    """Run promtool, which must be content. Without it the test is skipped; in CI it fails."""
    binary = shutil.which("promtool")
    if binary is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("needs promtool: apt-get install prometheus")
    done = subprocess.run([binary, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def run_rules(folder: Path, rules: Sequence[Path], tests: Sequence[Mapping[str, Any]]) -> None:
    """Have promtool test *rules*."""
    file = folder / "tests.yaml"
    file.write_bytes(orjson.dumps({"rule_files": [*map(str, rules)], "evaluation_interval": "2m", "tests": tests}))
    promtool("test", "rules", file)


def firing(at_minute: int, alerts: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """Return the test that exactly these *alerts* (job -> names) fire then."""
    labels = [f'{{alertname="{name}", job="{job}"}}' for job, names in alerts.items() for name in names]
    return {
        "expr": 'group by (alertname, job) (ALERTS{alertstate="firing"})',
        "eval_time": f"{at_minute}m",
        "exp_samples": [{"labels": each, "value": 1} for each in labels],
    }


def _text(name: str, labels: Mapping[str, str]) -> str:
    return f"{name}{{{','.join(f'{label}={orjson.dumps(value).decode()}' for label, value in sorted(labels.items()))}}}"


def _ramp(start: float, end: float, minutes: int) -> str:
    return f"{start!r}{(end - start) / (minutes - 1):+}x{minutes - 1}"


# The names in a query.

LABELS_OF: Mapping[str, frozenset[str]] = {
    family.shown_as + suffix: frozenset(
        {*family.labels, *(("slot",) if family.stages else ()), *(("model_name",) if family.of_model else ())}
        | ({"le"} if suffix == "_bucket" else set())
    )
    for family in families.FAMILIES
    for suffix in (("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",))
}
"""Name of a series -> its labels."""
_TARGET = frozenset({"namespace", "job", "instance"})
_WORDS = frozenset({"by", "on", "and", "or", "unless", "ignoring", "group_left"})
_TEXT = re.compile(r'"[^"]*"')
_LISTS = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([a-z_:][\w:]*)\{([^}]*)\}")
_MADE = re.compile(r'label_replace\(.*?\), "(\w+)",')
_NAME = re.compile(r"(?<![\w$.])[a-z_][\w:]*(?!\s*\(|[\w:])")


def names_in(query: str) -> set[str]:
    """Return the series that a query reads. Fail if one of them does not exist, or does not have a label.

    Whatever is no function, label, duration or word of PromQL counts as a series.
    """
    made = set(_MADE.findall(query))
    query = _TEXT.sub('""', query)
    grouped = {label.strip() for found in _LISTS.findall(query) for label in found.split(",") if label.strip()}
    bare = _LISTS.sub(" ", query)
    selected = [(name, re.findall(r"(\w+)\s*[=!]", inside)) for name, inside in _SELECTOR.findall(bare)]
    names = set(_NAME.findall(re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", bare))) - _WORDS
    assert names
    assert names <= set(LABELS_OF), f"no such metric: {sorted(names - set(LABELS_OF))}"
    for name, labels in selected:
        assert set(labels) <= LABELS_OF[name] | _TARGET, f"{name} has no label of {labels}"
    assert grouped <= _TARGET.union(made, *(LABELS_OF[name] for name in names)), f"no such label: {sorted(grouped)}"
    return names
