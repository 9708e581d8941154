"""Figures from measurements that are written out by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ops.bench import report
from ops.bench.load import Answer, Measured
from ops.bench.report import Objective, Spread
from pipeline.errors import ConfigError


def measured(*answers: Answer, lag_s: float = 0.0) -> list[Measured]:
    return [Measured(index, 0, 10, 5, lag_s, answer) for index, answer in enumerate(answers)]


FAST = Answer(100.0, 100.5, (100.1, 100.2, 100.5), "text", prompt_tokens=10, output_tokens=5, cached_tokens=4)
"""First text after 100 ms, then 4 tokens in 400 ms, in two chunks."""
SLOW = Answer(100.5, 102.0, (101.5,), "text", prompt_tokens=10, output_tokens=1)
"""One token, after a second."""
FAILED = Answer(101.0, 104.0, error="HTTP 503: full")


def test_the_times_of_one_answer() -> None:
    assert (FAST.ttft_ms, FAST.tpot_ms, FAST.e2e_ms) == pytest.approx((100, 100, 500))
    assert FAST.itl_ms == pytest.approx([100, 300])
    assert SLOW.tpot_ms is None and SLOW.itl_ms == []


def test_percentiles_are_interpolated() -> None:
    spread = report.spread_of([float(value) for value in range(101)])
    assert spread == Spread(101, 50.0, 50.0, 90.0, 99.0)
    of_two = report.spread_of([4.0, 2.0])
    assert (of_two.count, of_two.p50) == (2, 3.0)
    assert (of_two.p90, of_two.p99) == pytest.approx((3.8, 3.98))
    assert report.spread_of([]) == Spread(0, 0.0, 0.0, 0.0, 0.0)


def test_throughput_counts_whole_answers_over_the_time_of_all_requests() -> None:
    summary = report.summarize(measured(FAST, SLOW, FAILED))
    expected: dict[str, float] = {
        "num_requests": 3,
        "num_failed": 1,
        "output_tokens": 6,
        "prompt_tokens": 20,
        "cached_tokens": 4,
    }
    expected |= {"duration_s": 4, "output_tokens_per_s": 6 / 4, "total_tokens_per_s": 26 / 4, "requests_per_s": 2 / 4}
    expected |= {"tokens_per_chunk": 6 / 4}
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    assert [summary[name].count for name in ("ttft_ms", "tpot_ms", "itl_ms")] == [2, 1, 2]
    assert summary["ttft_ms"].mean == pytest.approx(550)


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        ((), 2),
        ((Objective("ttft", 500),), 1),
        ((Objective("ttft", 2000), Objective("tpot", 101)), 2),  # one token has no time per token to miss
        ((Objective("tpot", 99),), 1),
        ((Objective("e2e", 501), Objective("tpot", 99)), 0),
    ],
)
def test_goodput_is_what_keeps_every_objective_of_all_that_was_asked(
    objectives: tuple[Objective, ...], good: int
) -> None:
    summary = report.summarize(measured(FAST, SLOW, FAILED), objectives)
    assert (summary["good_share"], summary["good_per_s"]) == pytest.approx((good / 3, good / 4))


def test_the_prompt_of_a_later_turn_holds_all_before_it() -> None:
    turns = [Measured(0, turn, 10, 5, 0.0, FAST) for turn in range(3)] + [Measured(1, 0, 7, 5, 0.0, SLOW)]
    assert report.planned_prompt_tokens(turns) == 10 + 25 + 40 + 7


def test_failures_are_counted_by_what_they_said() -> None:
    others = [Answer(0.0, 1.0, error=f"error {kind}") for kind in "abc"]
    assert report.failures(measured(FAST, FAILED, FAILED)) == "2 of 3 requests failed: 2x HTTP 503: full"
    assert report.failures(measured(FAILED, FAILED, *others)) == (
        "5 of 5 requests failed: 2x HTTP 503: full; 1x error a; 1x error b; and 1 other errors"
    )
    assert report.failures(measured(FAST)) == ""


@pytest.mark.parametrize(("lag_s", "kept"), [(0.001, True), (0.5, False)])
def test_a_schedule_that_was_not_kept_is_told(lag_s: float, kept: bool) -> None:
    summary = report.summarize(measured(FAST, SLOW, lag_s=lag_s))
    text = report.table(summary, (), scheduled=True)
    assert report.kept_schedule(summary["lag_ms"]) is kept
    assert ("schedule was not kept" in text) is not kept
    assert f"p50 {lag_s * 1000:.1f} ms" in text
    assert "sent late" not in report.table(summary, (), scheduled=False)


def test_the_table_has_every_figure_even_of_a_run_in_which_all_failed() -> None:
    objectives = (Objective("ttft", 500),)
    text = report.table(report.summarize(measured(FAST, SLOW), objectives), objectives, scheduled=False)
    assert "time to first token, ms        550.0    550.0" in text
    assert "2 of 2" in text and "6 (10 planned)" in text
    assert "good (ttft:500): 50.0% of the requests" in text
    assert "0 of 1" in report.table(report.summarize(measured(FAILED)), (), scheduled=False)


def test_every_request_is_in_the_json_and_a_failed_one_with_its_error() -> None:
    fast, failed = report.requests_of(measured(FAST, FAILED))
    assert fast["itl_ms"] == [100.0, 300.0] and fast["ttft_ms"] == 100.0 and fast["output_tokens"] == 5
    assert failed["error"] == "HTTP 503: full" and failed["sent_ms"] == 1000.0 and "ttft_ms" not in failed


def test_no_key_is_in_the_set_up() -> None:
    command = ["bench", "--api-key", "secret", "--seed", "1", "--api-key=secret"]
    assert report.setup(command, ("aiohttp", "no-such-package"))["versions"]["no-such-package"] == "not installed"
    assert report.without_secrets(command) == ["bench", "--api-key", "***", "--seed", "1", "--api-key=***"]


def test_tokens_over_time_add_up_to_all_tokens() -> None:
    starts_s, per_s = report.tokens_over_time([FAST, SLOW], num_bins=4)
    assert starts_s == pytest.approx([0.0, 0.5, 1.0, 1.5])
    assert [rate * 0.5 for rate in per_s] == pytest.approx([10 / 3, 5 / 3, 0, 1])


@pytest.mark.night  # matplotlib alone takes seconds
def test_a_picture_is_drawn(tmp_path: Path) -> None:
    report.plot(tmp_path / "plot.png", measured(FAST, SLOW, FAILED), "title")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report.check_can_plot("")
    with pytest.raises(ConfigError, match="matplotlib"):
        report.check_can_plot(str(tmp_path / "plot.png"))
