"""Rank 0 and another rank serve requests as a single engine does, and stay together when one of them fails."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from support.checkpoints import make_checkpoint, make_engine
from support.gloo_rank import connected, fail
from support.kernel_variants import VARIANTS
from support.schedules import make_schedule, planned, steps, steps_ahead

from pipeline.errors import RankLost
from pipeline.events import SamplingParams
from pipeline.metrics.counters import Measures
from stages.generate.collectives import GlooCollectives
from stages.generate.forward import engine as engine_module
from stages.generate.forward.engine import Engine
from stages.generate.loop.flights import Flight, Flights
from stages.generate.loop.meter import EngineMeter
from stages.generate.ranks.channel import Follower, Leader
from stages.generate.ranks.steps import FollowingEngine, LaunchingEngine, LeadingEngine
from stages.generate.sampling import sampler
from stages.generate.schedule.plan import BatchPlan
from stages.generate.schedule.request import NewRequest

KERNELS = VARIANTS[-1] if VARIANTS else "torch"
SIZES: dict[str, Any] = {"num_pages": 60, "page_size": 4, "max_running_requests": 12, "max_seq_len": 100}
CLEAR = 1e-3
"""The two best logits are at least so far apart where tokens must be equal."""
Leading = TypeVar("Leading", bound=LeadingEngine)

pytestmark = pytest.mark.usefixtures("torch_threads")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama3"), "llama3")


@contextlib.contextmanager
def two_ranks(folder: Path, kind: type[Leading]) -> Iterator[Leading]:
    """Give rank 0. The other rank is a thread, which ends with the block as rank 0 says."""
    frames, sums = connected(2), [GlooCollectives(group) for group in connected(2)]
    first, second = (make_engine(folder, "float32", kernels=KERNELS, collectives=each, **SIZES) for each in sums)
    ended = threading.Event()

    def follow() -> None:
        following = FollowingEngine(second, Follower(frames[1]))
        with contextlib.suppress(RankLost):
            while following.follow():
                pass
            ended.set()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    leader = Leader(frames[0], fail)
    yield kind(first, leader, sums[0], 512)
    leader.leave()
    thread.join(60)
    assert ended.is_set()


def requests() -> list[NewRequest]:
    """Return twelve requests: long prompts in chunks, some begin alike, some want the scores of their prompts."""
    draw, found = random.Random(1), []
    shared = draw.choices(range(4, 480), k=24)
    for index in range(12):
        prompt = tuple((shared if index % 3 == 0 else []) + draw.choices(range(4, 480), k=draw.randrange(3, 40)))
        params: dict[str, Any] = {"temperature": 0, "logprobs": 2, "max_tokens": 20, "ignore_eos": True}
        if index % 4 == 1:
            params["prompt_logprobs"] = 1
        found.append(NewRequest(f"r{index}", prompt, (), SamplingParams.model_validate(params), 0, ()))
    return found


def served(engine: Engine | LeadingEngine) -> tuple[dict[str, list[int]], dict[str, list[float]]]:
    """Return the tokens of the requests, and how far apart the two best logits were for each of them.

    There are too few pages for all, one request is cancelled, and one that is like another comes later.
    """
    schedule = make_schedule("radix", num_pages=60, prefill=32, mixed=16, running=12, vocab_size=512)
    waiting = requests()
    for request in waiting:
        assert schedule.add(request) is None
    tokens: dict[str, list[int]] = {}
    gaps: dict[str, list[float]] = {}
    ahead = steps_ahead(schedule, engine) if isinstance(engine, LaunchingEngine) else None
    for number, (_, _, rows) in enumerate(ahead or steps(schedule, engine.forward)):
        for row in rows:
            tokens.setdefault(row.uid, []).append(row.token)
            assert row.score is not None
            best, second = sorted((logprob for _, logprob in row.score.top), reverse=True)
            gaps.setdefault(row.uid, []).append(best - second)
        if number == 5:
            schedule.drop("r2")
        if number == 12:
            again = waiting[0]
            schedule.add(NewRequest("again", again.prompt_ids, (), again.sampling, 0, ()))
    return tokens, gaps


@pytest.mark.parametrize("kind", [LeadingEngine, LaunchingEngine])
def test_two_ranks_serve_requests_as_one_does(folder: Path, kind: type[LeadingEngine]) -> None:
    """With chunks of prompts, shared prefixes, preemption, a cancelled request, and scores of prompts."""
    expected, gaps = served(make_engine(folder, "float32", kernels=KERNELS, **SIZES))
    with two_ranks(folder, kind) as leading:
        tokens, _ = served(leading)
    assert tokens.keys() == expected.keys() and len(tokens) == 13
    compared = 0
    for uid, all_of_it in expected.items():
        until = next((n for n, gap in enumerate(gaps[uid]) if gap < CLEAR), len(all_of_it))
        assert tokens[uid][:until] == all_of_it[:until], uid
        compared += until
    assert compared > 150


def drawn_request() -> NewRequest:
    """Return a request whose tokens are drawn, and which wants the scores of its prompt."""
    request = requests()[1]
    return replace(request, sampling=request.sampling.model_copy(update={"temperature": 0.7}))


def draw_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, fails = sampler.draw, iter([True])

    def draw_or_fail(*arguments: Any, **options: Any) -> None:
        if next(fails, False):
            raise ValueError("cannot be drawn")
        draw(*arguments, **options)

    monkeypatch.setattr(engine_module, "draw", draw_or_fail)


def test_ranks_stay_together_when_tokens_cannot_be_drawn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the scores of a prompt were to follow: the other rank computes its part of them."""
    schedule = make_schedule(vocab_size=512, running=12)
    schedule.add(drawn_request())
    ((plan, _, _),) = steps(schedule, most=1)
    assert plan.rows[0].scoring is not None
    expected = make_engine(folder, "float32", kernels=KERNELS, **SIZES).forward(plan)
    with two_ranks(folder, LeadingEngine) as leading:
        draw_fails_once(monkeypatch)
        with pytest.raises(ValueError, match="drawn"):
            leading.forward(plan)
        assert leading.forward(plan).token_ids == expected.token_ids


def test_ranks_drop_a_step_when_the_tokens_before_it_cannot_be_drawn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = make_schedule(vocab_size=512, running=12)
    schedule.add(drawn_request())
    (first, _, _), (second, _, _) = steps(schedule, make_engine(folder, "float32", kernels=KERNELS, **SIZES).forward, 2)
    ahead = replace(second, rows=tuple(replace(row, token_ids=(-1,)) for row in second.rows))
    with two_ranks(folder, LaunchingEngine) as leading:
        expected = leading.forward(first)
        draw_fails_once(monkeypatch)
        before = leading.launch(first, None)
        with pytest.raises(ValueError, match="drawn"):
            leading.launch(ahead, before)
        assert leading.wait(before) == expected
        assert leading.wait(leading.launch(second, None)).token_ids


def test_a_token_that_the_model_does_not_know_fails_before_any_rank_is_told(folder: Path) -> None:
    schedule = make_schedule(vocab_size=512, running=12)
    schedule.add(requests()[0])
    ((plan, _, _),) = steps(schedule, most=1)
    row = plan.rows[0]
    wrong = replace(plan, rows=(replace(row, token_ids=(*row.token_ids[:-1], 512)),))
    with two_ranks(folder, LeadingEngine) as leading:
        with pytest.raises(ValueError, match="512"):
            leading.forward(wrong)
        assert len(leading.forward(plan).token_ids) == sum(row.sample is not None for row in plan.rows)


class Broken:
    """An engine whose forward pass fails, its collectives, and a group that takes every frame."""

    num_gathered = 0

    def broadcast(self, *_: object) -> Broken:
        return self

    def wait(self) -> None:
        pass

    def launch(self, plan: BatchPlan, before: object) -> None:
        raise MemoryError("no room")


def test_a_forward_pass_that_fails_ends_the_ranks_and_is_no_failure_of_a_request() -> None:
    schedule, broken = make_schedule(), cast(Any, Broken())
    for request in requests()[:2]:
        schedule.add(request)
    plan, marks = planned(schedule)
    leader = Leader(broken, fail)
    flights = Flights(LeadingEngine(broken, leader, broken, 512), schedule, EngineMeter(Measures(), schedule), None)
    flights.launch(Flight(plan, marks, plan.step, None))
    with pytest.raises(RankLost, match=r"rank 0 .*no room"):
        flights.land()
    leader.leave()
