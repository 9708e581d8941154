"""ops/monitoring/alerts.yaml: each alert comes when its condition is there, and none on a healthy server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.monitored import MadeServer, Passing, firing, names_in, promtool, run_rules, series_of

from pipeline.metrics import families
from pipeline.metrics.families import Family

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "ops/monitoring/alerts.yaml"
RULES: Mapping[str, Mapping[str, Any]] = {
    rule["alert"]: rule for group in yaml.safe_load(FILE.read_text())["groups"] for rule in group["rules"]
}
BEFORE, DURING = 12, 20
"""Minutes of ordinary requests, and of a condition after them."""
AT_ONCE = 4
"""Servers in one test of promtool, each with a condition. Its queries read 10,000 samples at most."""


def sets(**said: Any) -> Passing:
    """Return a period in which nothing happens, and the server is as said."""

    def passing(server: MadeServer, minutes: int) -> None:
        for name, value in said.items():
            setattr(server, name, value)

    return passing


def without(stage: str, *, num_live: int) -> Passing:
    """Return a period without a worker of *stage*, in which nothing happens."""

    def passing(server: MadeServer, minutes: int) -> None:
        server.lose(stage)
        server.num_live = server.num_queued = num_live

    return passing


def grows(family: Family, amount: float, *labels: str, slot: str = "") -> Passing:
    """Return a period in which all is well but for one count, which grows by *amount* a minute."""

    def passing(server: MadeServer, minutes: int) -> None:
        server.pass_healthy(minutes)
        server.add(family, amount * minutes, *labels, slot=slot)

    return passing


def observes(family: Family, seconds: float, *labels: str, slot: str = "") -> Passing:
    """Return a period in which a tenth of what a histogram is given are so many *seconds*."""

    def passing(server: MadeServer, minutes: int) -> None:
        server.pass_healthy(minutes)
        server.observe(family, seconds, 10 * minutes, *labels, slot=slot)

    return passing


def holds(family: Family, value: float, slot: str) -> Passing:
    """Return a period in which all is well but for one figure."""

    def passing(server: MadeServer, minutes: int) -> None:
        server.pass_healthy(minutes)
        server.set(family, value, slot=slot)

    return passing


def a_few_fail(server: MadeServer, minutes: int) -> None:
    server.add(families.REQUEST_SUCCESS, 0.3 * minutes, "error", slot="generate-0")


def full_cache(server: MadeServer, minutes: int) -> None:
    grows(families.NUM_PREEMPTIONS, 1, slot="generate-1")(server, minutes)
    server.set(families.KV_CACHE_USAGE, 0.98, slot="generate-1")


def nearly_full(server: MadeServer, minutes: int) -> None:
    server.pass_healthy(minutes)
    server.used_bytes = 9 * 2**30 // 10


def letter(server: MadeServer, minutes: int) -> None:
    server.pass_healthy(minutes)
    server.num_dead = 1


def no_archiver(server: MadeServer, minutes: int) -> None:
    server.pass_healthy(minutes)
    server.lose("archive")


def refuses(reason: str) -> Passing:
    return grows(families.REJECTIONS, 1, reason, slot="web-1")


CONDITIONS: Mapping[str, tuple[Passing, set[str]]] = {
    "all is well": (MadeServer.pass_healthy, set()),
    "no requests": (sets(num_live=0), set()),
    "no requests and no engine": (without("generate", num_live=0), set()),
    "no requests and no stage": (without("tokenize", num_live=0), set()),
    "a key reaches its limit": (refuses("tokens_per_day"), set()),
    "the server drains": (refuses("shutting_down"), set()),
    "no web process": (sets(is_up=False), {"MiniSGLDown"}),
    "no Redis": (sets(has_log=False), {"MiniSGLLogUnreachable"}),
    "Redis is full": (refuses("log_full"), {"MiniSGLLogTakesNoRequests"}),
    "--max-log-bytes is full": (refuses("log_bytes"), {"MiniSGLLogTakesNoRequests"}),
    "nearly full": (nearly_full, {"MiniSGLLogNearlyFull"}),
    "no replica": (refuses("unacknowledged"), {"MiniSGLLogTakesNoRequests"}),
    "no engine": (without("generate", num_live=3), {"MiniSGLNoEngine"}),
    "no tokenizer": (without("tokenize", num_live=1), {"MiniSGLStageMissing"}),
    "no detokenizer": (without("detokenize", num_live=1), {"MiniSGLStageMissing"}),
    "engines compute nothing": (sets(num_live=3), {"MiniSGLStuck"}),
    "half fail": (grows(families.REQUEST_SUCCESS, 100, "error", slot="generate-0"), {"MiniSGLRequestsFail"}),
    "all fail of a few": (a_few_fail, {"MiniSGLStuck"}),
    "the queue is full": (refuses("queue_full"), {"MiniSGLRefusesRequests"}),
    "more wait than run": (holds(families.NUM_WAITING, 5, "generate-0"), {"MiniSGLRequestsWait"}),
    "late first tokens": (observes(families.FIRST_TOKEN_SECONDS, 15), {"MiniSGLSlowFirstToken"}),
    "the cache is full": (full_cache, {"MiniSGLCacheFull"}),
    "slow commits": (observes(families.COMMIT_SECONDS, 0.3, "step", slot="generate-0"), {"MiniSGLSlowCommits"}),
    "an engine restarts": (grows(families.START_SECONDS, 60, slot="generate-1"), {"MiniSGLWorkerRestarts"}),
    "an engine takes over": (grows(families.TAKEOVERS, 1, slot="generate-1"), {"MiniSGLTakeovers"}),
    "a dead letter": (letter, {"MiniSGLDeadLetters"}),
    "garbage": (grows(families.UNREADABLE_ENTRIES, 1, "steps", slot="detokenize-0"), {"MiniSGLUnreadableEntries"}),
    "many open files": (holds(families.OPEN_FDS, 1000, "web-1"), {"MiniSGLOpenFiles"}),
    "a full disk": (holds(families.ARCHIVE_STOPPED, 1, "archive-0"), {"MiniSGLArchiveStopped"}),
    "no archiver": (no_archiver, {"MiniSGLArchiveStopped"}),
    "requests expire": (grows(families.ARCHIVE_UNARCHIVED, 1, slot="archive-0"), {"MiniSGLNotArchived"}),
}
"""What happens -> the alerts that come, and no others."""


def test_prometheus_reads_the_file() -> None:
    promtool("check", "rules", FILE)


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_reads_metrics_that_exist(alert: str) -> None:
    names_in(RULES[alert]["expr"])


def test_each_condition_brings_its_alerts_and_a_healthy_server_none(tmp_path: Path) -> None:
    names = set[str]().union(*(names_in(rule["expr"]) for rule in RULES.values()))
    tests = []
    for start in range(0, len(CONDITIONS), AT_ONCE):
        some = dict([*CONDITIONS.items()][start : start + AT_ONCE])
        periods = {
            name: [(BEFORE, MadeServer.pass_healthy), (DURING, condition)] for name, (condition, _) in some.items()
        }
        series = [one for name in some for one in series_of(periods[name], names, job=name)]
        expected = {name: alerts for name, (_, alerts) in some.items()}
        when = [firing(BEFORE - 2, {}), firing(BEFORE + DURING, expected)]
        tests.append({"interval": "1m", "input_series": series, "promql_expr_test": when})
    assert set[str]().union(*(alerts for _, alerts in CONDITIONS.values())) == set(RULES)
    run_rules(tmp_path, [FILE], tests)


@pytest.mark.parametrize("alert", RULES)
def test_an_alert_says_what_a_pager_needs(alert: str) -> None:
    rule = RULES[alert]
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{alert.lower()}"


def test_each_alert_has_its_section_in_the_runbook() -> None:
    assert re.findall(r"^## (MiniSGL\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE) == list(RULES)
