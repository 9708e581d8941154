"""Plans become frames, and a rank that knows only page tables runs the same steps from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.schedules import make_schedule, marked, request, steps
from support.selection import by_night

from pipeline.errors import ConfigError
from pipeline.events import SamplingParams
from stages.generate.forward.engine import Engine, TorchComputer
from stages.generate.model.checkpoint import DEMO_FOLDER, check_folder
from stages.generate.model.spec import Loading
from stages.generate.ranks.frame import (
    HEADER,
    LONG_LIST,
    NOTHING,
    ROW,
    SAMPLED,
    SIZE,
    VERSION,
    Kind,
    Reader,
    frames_of,
    num_beyond,
    signal,
)
from stages.generate.schedule.plan import BatchPlan, Computed, PlanRow, Sample, Scoring

NUMBERS = st.integers(0, 2**31 - 1)


def counted(first: int, step: int, length: int) -> tuple[int, ...]:
    """Return numbers that differ, which Hypothesis need not draw one by one."""
    return tuple((first + index * step) % 2**31 for index in range(length))


def lists(most: int) -> st.SearchStrategy[tuple[int, ...]]:
    lengths = st.one_of(st.integers(0, 3), st.integers(0, most))
    return st.builds(counted, NUMBERS, st.integers(1, 1000), lengths)


@st.composite
def rows(draw: st.DrawFn, table: int) -> PlanRow:
    token_ids = draw(st.one_of(st.builds(lambda token: (token,), st.integers(-256, 2**31 - 1)), lists(9000)))
    start, first_page = draw(NUMBERS), draw(NUMBERS)
    sample = draw(st.sampled_from([None, Sample(SamplingParams(seed=3, top_p=0.5), 7, (5,))]))
    scored = draw(st.integers(0, len(token_ids)))
    scoring = draw(st.none() | st.builds(Scoring, st.just(token_ids[:scored]), st.integers(0, 20)))
    local = draw(lists(3000)), draw(NUMBERS)
    return PlanRow(table, start, token_ids, draw(lists(20_000)), first_page, sample, scoring, *local)


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    tables = draw(st.lists(st.integers(0, 2**31 - 1), max_size=4, unique=True))
    made = tuple(draw(rows(table)) for table in tables)
    return BatchPlan(draw(st.integers(0, 2**62 - 1)), made, draw(st.integers(0, len(made))))


def decode_rows(count: int) -> BatchPlan:
    """Return decode rows of which every one needs a new page."""
    sample = Sample(SamplingParams(), 0, ())
    return BatchPlan(7, tuple(PlanRow(row, 63, (row,), (row,), 1, sample) for row in range(count)), count)


def followed(row: PlanRow) -> PlanRow:
    """Return what another rank than 0 must know of *row*."""
    targets = row.scoring.targets if row.scoring is not None else ()
    scoring = Scoring((0,) * len(targets), 0) if targets else None
    return replace(row, sample=SAMPLED if row.sample is not None else None, scoring=scoring)


@settings(max_examples=by_night(25, 1000))
@given(st.lists(plans(), min_size=1, max_size=3), st.sampled_from([Kind.STEP, Kind.BEGIN, Kind.NEXT]))
def test_plans_survive_the_frame(given: list[BatchPlan], wanted: Kind) -> None:
    reader = Reader()
    for plan in given:
        frames = list(frames_of(plan, wanted))
        assert all(len(ints) == SIZE + num_beyond(ints) and ints.dtype == np.int32 for ints in frames)
        assert not any(num_beyond(ints) for ints in frames[:-1])
        *ahead, (kind, read) = map(reader.read, frames)
        assert all(each is Kind.PAGES and not rows.rows for each, rows in ahead)
        assert kind is wanted
        assert read == replace(plan, rows=tuple(map(followed, plan.rows)))


def test_256_decode_rows_fit_one_frame() -> None:
    (ints,) = frames_of(decode_rows(256))
    assert len(ints) == SIZE
    assert np.flatnonzero(ints).max() < 2600, "there is room for rows with more tokens"


def test_a_body_that_is_too_long_goes_on_in_a_second_part() -> None:
    room = SIZE - HEADER - ROW
    for length, beyond in ((room, 0), (room + 1, 1), (3 * SIZE, 2 * SIZE + HEADER + ROW)):
        (ints,) = frames_of(BatchPlan(1, (PlanRow(0, 0, tuple(range(length)), (), 0, None),), 0))
        assert num_beyond(ints[:SIZE]) == beyond == len(ints) - SIZE


def test_only_long_page_lists_go_ahead() -> None:
    for length, kinds in (
        (LONG_LIST, [Kind.STEP]),
        (LONG_LIST + 1, [Kind.PAGES, Kind.STEP]),
        (SIZE, [Kind.PAGES, Kind.PAGES, Kind.STEP]),
    ):
        frames = list(frames_of(BatchPlan(1, (PlanRow(0, 0, (5,), tuple(range(length)), 0, None),), 0)))
        assert [Reader().read(ints)[0] for ints in frames] == kinds


def test_pages_that_went_ahead_belong_to_one_step_alone() -> None:
    reader, long = Reader(), PlanRow(3, 0, (5,), tuple(range(2 * SIZE)), 0, None)
    short = replace(long, start=1, new_pages=(), first_page=2 * SIZE)
    for row in (long, short, long):
        read = [reader.read(ints)[1] for ints in frames_of(BatchPlan(1, (row,), 0))]
        assert read[-1].rows == (row,)


@pytest.mark.parametrize("kind", [Kind.IDLE, Kind.STOP, Kind.LAND, Kind.SCORE, Kind.SCORE_BEFORE])
def test_a_signal_is_a_frame_without_rows(kind: Kind) -> None:
    assert Reader().read(signal(kind)) == (kind, NOTHING)
    assert len(signal(kind)) == SIZE


def test_a_frame_of_another_version_is_refused_in_one_line() -> None:
    ints = signal(Kind.IDLE).copy()
    ints[0] = VERSION + 1
    for read in (Reader().read, num_beyond):
        with pytest.raises(ConfigError) as refused:
            read(ints)
        assert str(refused.value) == (
            f"rank 0 sends frames of version {VERSION + 1}, but this rank reads version {VERSION}: "
            "start all ranks with the same version of MiniSGL"
        )


def test_a_frame_whose_counts_do_not_add_up_is_our_bug() -> None:
    (ints,) = frames_of(decode_rows(2))
    for place, wrong in ((4, 3), (6, 9000), (8, 5), (HEADER + 3, 2)):
        spoilt = ints.copy()
        spoilt[place] = wrong
        with pytest.raises(AssertionError, match="frame"):
            Reader().read(spoilt)


def test_a_rank_with_only_page_tables_computes_what_rank_0_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes the same keys and values, and asks for the logits of the same tokens."""
    spec = replace(check_folder(DEMO_FOLDER, Loading(dummy=True)), num_layers=1)
    sizes = {"num_pages": 12, "page_size": 4, "max_running_requests": 16, "max_seq_len": 48}
    how: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, **sizes}
    leader, follower = (Engine(spec, DEMO_FOLDER, loading=Loading(dummy=True), **how) for _ in range(2))
    for engine in (leader, follower):
        engine.kv_L2PKSD.zero_()
    asked: list[torch.Tensor] = []
    head, logits = TorchComputer.head, TorchComputer.logits

    def noted_head(self: TorchComputer, x_TE: torch.Tensor, rows_R: Any, wanted_R: Any, masks_R: Any = ()) -> Any:
        asked.append(x_TE[rows_R].clone())
        return head(self, x_TE, rows_R, wanted_R, masks_R)

    def noted_logits(self: TorchComputer, x_NE: torch.Tensor) -> torch.Tensor:
        asked.append(x_NE.clone())
        return logits(self, x_NE)

    monkeypatch.setattr(TorchComputer, "head", noted_head)
    monkeypatch.setattr(TorchComputer, "logits", noted_logits)
    reader = Reader()

    def forward(plan: BatchPlan) -> Computed:
        asked.clear()
        computed = leader.forward(plan)
        by_leader = asked.copy()
        asked.clear()
        for ints in frames_of(plan):
            kind, read = reader.read(ints)
        assert kind is Kind.STEP
        follower.forward(read)
        assert torch.equal(follower.kv_L2PKSD, leader.kv_L2PKSD)
        assert all(torch.equal(mine, its) for mine, its in zip(asked, by_leader, strict=True))
        return computed

    schedule = make_schedule("radix", num_pages=12, context=48, prefill=16, vocab_size=spec.vocab_size)
    wishes: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 3}, {"temperature": 0, "logprobs": 2}]
    wishes += [{"temperature": 0, "prompt_logprobs": 1}, {"temperature": 0, "min_tokens": 4, "stop_token_ids": (5,)}]
    for index, wish in enumerate(wishes):
        schedule.add(request(f"r{index}", 9 + 2 * index, max_tokens=15, **wish))
    preempted = [uid for _, marks, _ in steps(schedule, forward) for uid in marked(marks, "preempted")]
    assert preempted
