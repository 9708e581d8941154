"""ops/monitoring/dashboard.json: each query returns data, and the same data however many web processes are scraped."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.monitored import MadeServer, firing, names_in, run_rules, series_of

from pipeline.metrics import families

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD: Mapping[str, Any] = json.loads((ROOT / "ops/monitoring/dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = {f"{panel['title']} {target['refId']}": target for panel in PANELS for target in panel["targets"]}
MINUTES = 20


def query_of(target: Mapping[str, str], job: str) -> str:
    """Return the query as Grafana sends it."""
    filled = {"namespace": ".*", "job": job, "model": ".*", "__rate_interval": "5m"}
    return re.sub(r"\$(\w+)", lambda found: filled.get(found[1], found[0]), target["expr"])


def busy(server: MadeServer, minutes: int) -> None:
    """Let ordinary minutes pass, in which also the tokenizer refuses prompts and another endpoint answers."""
    server.pass_healthy(minutes)
    server.add(families.REFUSALS, minutes, "template_error")
    server.add(families.HTTP_RESPONSES, minutes, "/health", "GET", "200")


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows_in_which_unit(panel: Mapping[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_reads_metrics_and_labels_that_exist(name: str) -> None:
    query, legend = query_of(QUERIES[name], "one"), QUERIES[name]["legendFormat"]
    names_in(query)
    assert "$__" not in query
    kept = {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(", ")}
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= kept


def test_the_variables_are_those_of_the_queries_and_are_read_from_metrics_that_exist() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert set(variables) == {"datasource", "namespace", "job", "model"}
    for name in ("namespace", "job", "model"):
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", variables[name]["query"]["query"])
        assert found
        names_in(f"max by ({found[2]}) ({found[1]})")


def test_a_query_returns_data_and_the_same_from_one_web_process_as_from_two(tmp_path: Path) -> None:
    rules, names = [], set[str]()
    for name, target in QUERIES.items():
        names |= names_in(target["expr"])
        one, two = (f'label_replace({query_of(target, job)}, "job", "", "", "")' for job in ("one", "two"))
        added_up = re.sub(
            r"max by \([^)]*\)", "", one
        )  # of one process no series comes twice; floats depend on the order
        rules += [
            {"alert": f"{name}: nothing", "expr": f"absent({one})"},
            {"alert": f"{name}: other from two", "expr": f"abs(({one}) - ({two})) > 1e-6"},
            {"alert": f"{name}: more from two", "expr": f"({two}) unless ({one})"},
            {"alert": f"{name}: the max swallows series", "expr": f"abs(({one}) - ({added_up})) > 1e-6"},
        ]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    series = [
        one
        for number, job in enumerate(("one", "two"), 1)
        for one in series_of([(MINUTES, busy)], names, job=job, num_webs=number)
    ]
    when = firing(MINUTES, {})
    run_rules(tmp_path, [file], [{"interval": "1m", "input_series": series, "promql_expr_test": [when]}])
