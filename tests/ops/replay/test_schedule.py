"""`minisgl replay schedule`: an engine's journalled steps are planned again, or it says why they cannot be; and what
would have happened with other limits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.journalled import ENGINE, EPOCH, Life, live
from support.log_contract import put
from support.memory_log.log import MemoryLog
from support.selection import rest_at_night

from minisgl import main
from ops.replay.schedule import CannotPlan, far_off, fitted, lived_again, measured, parts_of
from pipeline.archive.folder import make_archive
from pipeline.archive.writer import Writer
from pipeline.events import Submitted, Tokenized, TokensProduced, encode
from pipeline.log.journal import JournalStep, steps
from pipeline.log.protocol import Entry
from pipeline.names import SUBMITTED_ID, TOKENIZED_ID, Names, tokens_id
from pipeline.recording import Recording
from stages.generate.schedule.plan import BatchPlan, PlanRow
from stages.generate.schedule.request import NewRequest

NUM_STEPS, EVERY = 300, 100
Tool = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module", params=rest_at_night([True, False]), ids=["overlap", "no overlap"])
def life(request: pytest.FixtureRequest) -> Life:
    return live("radix", NUM_STEPS, EVERY, overlap=request.param)


@pytest.fixture
def log(life: Life) -> MemoryLog:
    """The journal of that life, and the histories of its requests."""
    log = MemoryLog(Names())
    for uid, new in life.came.items():
        submitted = Submitted(endpoint="e", frontend="web-0", sampling=new.sampling, priority=new.priority)
        of_owner = {"owner": new.owner, "weight": new.weight, "overtakes": new.overtakes}
        submitted = submitted.model_copy(update=of_owner)
        tokenized = Tokenized(token_ids=new.prompt_ids, fingerprint="t", by="tokenize-0")
        produced = [TokensProduced(tokens=(token,), text="", step="1-1") for token in life.made[uid]]
        ids = [SUBMITTED_ID, TOKENIZED_ID, *(tokens_id(n) for n in range(1, len(produced) + 1))]
        for entry_id, event in zip(ids, (submitted, tokenized, *produced), strict=True):
            put(log, log.names.request(uid), encode(event), entry_id)
    for entry in life.journal():
        put(log, log.names.journal(ENGINE), entry.fields, entry.id)
    return log


@pytest.fixture
def tool(log: MemoryLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    @contextlib.contextmanager
    def here(_: object) -> Iterator[MemoryLog]:
        yield log

    monkeypatch.setattr("ops.replay.schedule.running_log", here)

    def run(*flags: str) -> tuple[int, str, str]:
        code = main(["replay", "schedule", *flags])
        return code, *capsys.readouterr()

    return run


def entries(log: MemoryLog) -> list[Entry]:
    return log.journal(ENGINE)


def drop(log: MemoryLog, *ids: str) -> None:
    stream = log._streams.by_key[log.names.journal(ENGINE)]
    for entry_id in ids:
        epoch, number = map(int, entry_id.split("-"))
        del stream.entries[epoch, number]


def test_all_steps_of_a_journal_are_planned_again(tool: Tool, life: Life) -> None:
    code, out, _ = tool(ENGINE)
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == f"{ENGINE}: steps {EPOCH}-1 to {EPOCH}-{life.steps[-1][0]}, from the snapshot of {EPOCH}-1 on"
    assert lines[1].startswith(f"{len(life.steps)} steps, ") and " arrivals, " in lines[1]
    assert lines[2] == "planned again: identical"
    assert tool("--from", "1", ENGINE)[1] == out


def test_steps_in_the_middle_begin_with_the_snapshot_before_them(tool: Tool, log: MemoryLog) -> None:
    snapshots = [entry.id for entry in entries(log) if "schedule" in entry.fields]
    code, out, _ = tool(ENGINE, "--from", "250", "--to", f"{EPOCH}-260", "--json")
    told = orjson.loads(out)
    assert code == 0 and told["identical"]
    assert (told["from"], told["to"], told["snapshot"]) == (f"{EPOCH}-250", f"{EPOCH}-260", snapshots[2])
    assert told["steps"] == 11


def test_the_first_different_step_is_told(tool: Tool, log: MemoryLog) -> None:
    entry = next(entry for entry in entries(log)[60:] if "chunks" in entry.fields)
    fields: Any = entry.fields
    stream = log._streams.by_key[log.names.journal(ENGINE)]
    epoch, number = map(int, entry.id.split("-"))
    stream.entries[epoch, number] = {name: text for name, text in fields.items() if name != "chunks"}
    code, out, _ = tool(ENGINE)
    assert code == 1
    assert out.splitlines()[2:] == [f"planned again: different at step {entry.id}", out.splitlines()[-1]]
    assert out.splitlines()[-1].startswith("the chunks of prompts: (")
    assert orjson.loads(tool(ENGINE, "--json")[1])["difference"]["step"] == entry.id


def test_a_prompt_that_is_gone_is_named(tool: Tool, log: MemoryLog) -> None:
    log.forget(["r3"])
    code, out, error = tool(ENGINE)
    assert (code, out) == (2, "")
    assert "r3" in error and "--retention" in error


def test_a_prompt_that_redis_has_no_longer_comes_from_the_archive(tool: Tool, log: MemoryLog, tmp_path: Path) -> None:
    make_archive(tmp_path, "minisgl")
    Writer(tmp_path, "archive-0", 1).write([Recording("r3", tuple(log.histories(["r3"])[0]))])
    log._streams.by_key[log.names.request("r3")].entries.clear()
    assert tool(ENGINE)[0] == 2
    code, out, _ = tool(ENGINE, "--archive", str(tmp_path))
    assert code == 0 and "planned again: identical" in out
    assert tool(ENGINE, "--archive", str(tmp_path / "none"))[0] == 2


def test_tokens_after_the_end_of_a_history_come_from_the_journal(tool: Tool, log: MemoryLog, life: Life) -> None:
    for uid in life.came:
        stream = log._streams.by_key[log.names.request(uid)]
        for entry_id in [each for each in stream.entries if each[0] > len(life.came[uid].output_ids)]:
            del stream.entries[entry_id]
    assert tool(ENGINE)[0] == 0
    assert tool(ENGINE, "--from", "150")[0] == 0


def test_a_step_that_is_missing_is_named(tool: Tool, log: MemoryLog) -> None:
    kept = entries(log)
    drop(log, kept[40].id)
    code, _, error = tool(ENGINE)
    assert code == 2
    assert kept[40].id in error


def test_an_old_part_without_a_snapshot_is_refused(tool: Tool, log: MemoryLog) -> None:
    kept = entries(log)
    drop(log, *(entry.id for entry in kept[:20]))
    code, _, error = tool(ENGINE, "--from", "30")
    first = next(entry.id for entry in kept[20:] if "schedule" in entry.fields)
    assert code == 2
    assert f"--from {first}" in error
    assert tool(ENGINE)[0] == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "expected the slot of an engine"),
        ((ENGINE, "--from", "soon"), "--from soon: must be a step, such as 1200, or 3-1200 for one of epoch 3"),
        ((ENGINE, "--to", "x-3"), "--to x-3: must be a step"),
        (("generate-7",), "there is no journal of generate-7"),
        ((ENGINE, "--from", "200", "--to", "100"), "--from 200 comes after --to 100"),
        ((ENGINE, "--from", "99999"), f"the last step in the journal of {ENGINE} is "),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_said(tool: Tool, flags: tuple[str, ...], said: str) -> None:
    code, out, error = tool(*flags)
    assert (code, out) == (2, "")
    assert said in error


def test_other_limits_are_estimated_beside_what_was_measured(tool: Tool) -> None:
    code, out, _ = tool(ENGINE, "--max-prefill-length", "4", "--mixed-prefill-length", "2")
    lines = out.splitlines()
    assert code == 0 and lines[2] == "planned again: identical"
    assert lines[4].split("  ")[-3:] == ["measured", "as it was, estimated", "with other limits, estimated"]
    assert [line.split("  ")[0] for line in lines[5:8]] == ["steps", "tokens", "preemptions"]
    assert any(line.startswith("All of the last two columns is estimated") for line in lines)
    told = orjson.loads(tool(ENGINE, "--max-prefill-length", "4", "--json")[1])
    assert told["limits"] == {"max_prefill_length": 4}
    assert set(told["outcomes"]) == {"measured", "estimated_as_it_was", "estimated"}
    assert told["outcomes"]["estimated"]["steps"] > told["outcomes"]["estimated_as_it_was"]["steps"]


def test_fewer_running_requests_and_fewer_pages_are_estimated(tool: Tool, life: Life) -> None:
    def estimated(*flags: str) -> dict[str, float]:
        told = orjson.loads(tool(ENGINE, *flags, "--json")[1])
        outcomes: dict[str, dict[str, float]] = told["outcomes"]
        assert outcomes["estimated"]["tokens"] > 0.9 * outcomes["estimated_as_it_was"]["tokens"]
        return outcomes["estimated"]

    five, one = estimated("--max-running-requests", "5"), estimated("--max-running-requests", "1")
    assert one["steps"] > 1.2 * five["steps"]
    longest = max(len(life.came[uid].prompt_ids) + len(made) for uid, made in life.made.items() if made)
    least = str(-(-longest // 4))
    few, as_it_was, many = (estimated("--num-pages", number) for number in (least, "30", "90"))
    assert few["preemptions"] > many["preemptions"] == 0
    assert few["preemptions"] > as_it_was["preemptions"] >= many["preemptions"]
    assert estimated("--from", "250", "--num-pages", least, "--max-running-requests", "2")["steps"] > 0
    code, _, error = tool(ENGINE, "--num-pages", "3")
    assert code == 2 and "--num-pages 3: r" in error and f"pass at least {least}" in error


def test_an_estimate_of_pauses_that_is_far_from_what_was_measured_is_said() -> None:
    measured = {"pause_p50_ms": 5.0, "pause_p99_ms": 14.0, "longest_pause_ms": 263.0}
    assert far_off(measured, {"pause_p50_ms": 4.8, "pause_p99_ms": 8.5, "longest_pause_ms": 232.3}) == []
    assert far_off(measured, {"pause_p50_ms": 3.1, "pause_p99_ms": 29.0, "longest_pause_ms": 70.0}) == [
        "pause_p99_ms",
        "longest_pause_ms",
    ]
    assert far_off(measured, measured | {"pause_p50_ms": 0.0}) == ["pause_p50_ms"]
    assert far_off(measured | {"pause_p50_ms": 1.0}, measured | {"pause_p50_ms": 3.0}) == []


def test_an_unreliable_estimate_is_named_in_its_last_line(tool: Tool, log: MemoryLog) -> None:
    stream = log._streams.by_key[log.names.journal(ENGINE)]
    for epoch, number in stream.entries:  # one step in a hundred was held up for a second
        fields: Any = stream.entries[epoch, number]
        stream.entries[epoch, number] = {**fields, "ms": str(number * 10 + number // 100 * 1000)}
    _, out, _ = tool(ENGINE, "--max-prefill-length", "4")
    assert out.splitlines()[-1].startswith("The estimate of pauses is unreliable: with the engine's own limits, ")
    assert "longest pause ms 1," in out.splitlines()[-1], "a second, and the steps around it"
    told = orjson.loads(tool(ENGINE, "--max-prefill-length", "4", "--json")[1])
    assert "longest_pause_ms" in told["unreliable"]


def test_too_few_steps_are_no_ground_for_an_estimate(tool: Tool) -> None:
    code, out, error = tool(ENGINE, "--to", "10", "--max-prefill-length", "4")
    assert (code, out) == (2, "")
    assert "estimate" in error


PER_PART = (2.0, 0.25, 0.001, 0.05, 0.0)


@pytest.fixture
def journal(life: Life) -> list[JournalStep]:
    return list(steps(life.journal()))


def lived(journal: Sequence[JournalStep], life: Life, **limits: int) -> tuple[int, int, float]:
    time_of = fitted([(1, 0, 0, 0, 0), (1, 1, 0, 0, 0), (1, 0, 0, 1, 0)], [2, 3, 4], [1])
    outcome = lived_again(journal, life.request_of, life.made, time_of, **limits)
    return outcome.tokens, outcome.steps, max(outcome.step_ms)


def test_the_time_of_steps_is_found_again() -> None:
    chance = random.Random(0)
    parts = [(1, chance.randrange(64), chance.randrange(9000), chance.randrange(99), 0) for _ in range(200)]
    times = [sum(a * b for a, b in zip(PER_PART, each, strict=True)) for each in parts]
    time_of = fitted(parts, times, [0.5, 0.7, 99.0])
    assert time_of.per_part == pytest.approx(PER_PART, abs=1e-6)
    assert time_of.error < 1e-6
    assert 0.5 <= time_of.between_ms < 0.7 or time_of.between_ms == pytest.approx(33.4)


def test_no_part_of_a_step_makes_it_shorter() -> None:
    time_of = fitted([(1, 1, 0, 0, 0), (1, 2, 0, 0, 0), (1, 3, 0, 9, 0)], [5, 4, 2], [])
    assert min(time_of.per_part) == 0 and time_of.between_ms == 0


def test_parts_of_a_step_are_counted_from_its_plan() -> None:
    rows = (PlanRow(0, 7, (1,), (), 0, None), PlanRow(1, 4, (1, 2), (), 0, None))
    assert parts_of(BatchPlan(1, rows, 1)) == (1, 1, 7, 2, 10)


def test_requests_that_live_again_get_the_same_tokens(life: Life, journal: list[JournalStep]) -> None:
    tokens, _, _ = lived(journal, life)
    new = sum(len(life.made[uid]) - len(life.came[uid].output_ids) for uid in life.came)
    assert tokens >= new == measured(journal).tokens


def test_a_smaller_limit_makes_more_and_shorter_steps(life: Life, journal: list[JournalStep]) -> None:
    small, large = (lived(journal, life, max_prefill_length=limit, mixed_prefill_length=2) for limit in (4, 64))
    assert small[0] == large[0]
    assert small[1] > large[1]
    assert small[2] < large[2]


def test_times_of_a_journal_are_measured(life: Life, journal: list[JournalStep]) -> None:
    outcome = measured(journal)
    assert len(outcome.first_token_ms) + len(outcome.pause_ms) <= outcome.tokens
    assert outcome.total_ms > 0
    assert {"first_token_p50_ms", "pause_p99_ms"} < outcome.told().keys()


def test_a_request_without_a_known_token_gets_one_and_leaves(life: Life, journal: list[JournalStep]) -> None:
    time_of = fitted([(1, 0, 0, 0, 0)], [2], [1])
    outcome = lived_again(journal[:1], life.request_of, {"r0": []}, time_of)
    assert (outcome.tokens, outcome.steps) == (1, 1)


def test_a_request_that_the_limits_do_not_take_is_named(life: Life, journal: list[JournalStep]) -> None:
    """Longer chunks reserve more local parts, so the context of the estimate may be shorter than the engine's."""

    def too_long(uid: str, n: int) -> NewRequest:
        return dataclasses.replace(life.request_of(uid, n), prompt_ids=(5,) * 64)

    with pytest.raises(CannotPlan, match=r"r\d+ does not fit these limits: .* maximum context length is 64 tokens"):
        lived_again(journal, too_long, life.made, fitted([(1, 0, 0, 0, 0)], [2], [1]))
