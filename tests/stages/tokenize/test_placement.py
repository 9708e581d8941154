"""Which engine a request prefers: the one that has its prefix, unless it has much more to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from pipeline.prefixes import packed, prompt_digests
from pipeline.stage.slots import Phase, Status
from stages.tokenize import placement
from stages.tokenize.placement import Placement

PAGE = 16
SYSTEM = list(range(160))
A, B = "generate-0", "generate-1"


class Engines:
    """Two engines, whose clock, caches and numbers of requests the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.in_hand: dict[str, int] = {}
        self.placement = Placement("ns", lambda: self.in_hand, lambda: self.now_s)

    def learn(self, *statuses: Status) -> None:
        self.placement.learn(statuses)

    def prefer(self, token_ids: Sequence[int]) -> str:
        return self.placement.prefer(token_ids)


def status(
    slot: str, cached: Sequence[int] = (), *, tokens: int = 0, page: int = PAGE, phase: Phase = "ready"
) -> Status:
    digests = packed(prompt_digests([*cached, 0], page, "ns")) if page else ""
    return Status(slot=slot, owner="1:a", pid=1, host="h", phase=phase, page_size=page, cached=digests, backlog=tokens)


def test_a_prompt_prefers_the_engine_that_has_its_prefix() -> None:
    engines = Engines()
    engines.learn(status(A), status(B, SYSTEM))
    assert engines.prefer([*SYSTEM, 5, 6]) == B
    assert engines.prefer([5, *SYSTEM]) == A


def test_one_engine_or_engines_without_prefixes_are_not_preferred() -> None:
    engines = Engines()
    assert engines.prefer(SYSTEM) == ""
    engines.learn(status(B, SYSTEM))
    assert engines.prefer(SYSTEM) == ""
    engines.learn(status(A, page=0), status(B, SYSTEM))
    assert engines.prefer(SYSTEM) == ""
    engines.learn(status(A, phase="loading"), status(B, SYSTEM))
    assert engines.prefer(SYSTEM) == ""


def test_the_longer_prefix_counts_more_than_some_requests_and_less_than_many() -> None:
    engines = Engines()
    engines.learn(status(A, SYSTEM), status(B, SYSTEM[:32]))
    engines.in_hand = {A: 1}
    assert engines.prefer([*SYSTEM, 1]) == A
    engines.in_hand = {A: 3}
    assert engines.prefer([*SYSTEM, 2]) == B


def test_a_long_prompt_that_an_engine_computes_sends_others_elsewhere() -> None:
    engines = Engines()
    engines.learn(status(A, SYSTEM, tokens=10_000), status(B))
    assert engines.prefer([*SYSTEM, 1]) == B


def test_what_was_placed_is_remembered_until_the_engines_publish_it() -> None:
    engines = Engines()
    engines.learn(status(A), status(B))
    first = [*range(1000, 1400)]
    assert engines.prefer(first) == A
    engines.now_s += 1
    engines.learn(status(A), status(B))
    assert engines.prefer([*first, *SYSTEM]) == A
    engines.now_s += 3
    engines.in_hand = {A: 1}
    assert engines.prefer([*first, *SYSTEM, 8]) == B, "no engine has it any more"


def test_requests_of_a_burst_are_spread() -> None:
    engines = Engines()
    engines.learn(status(A), status(B))
    placed = Counter[str]()
    for number in range(20):
        placed[engines.prefer([number] * 300)] += 1
        engines.in_hand["waiting"] = number + 1
    assert placed == {A: 10, B: 10}
    engines.in_hand = {A: 2, "waiting": 3}
    assert engines.prefer([77] * 300) == B, "two of the three that wait are its own, one is the other's"


def test_siblings_and_many_requests_of_a_moment_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines()
    engines.learn(status(A), status(B))
    calls: list[int] = []

    def counted(*_: object) -> list[bytes]:
        calls.append(1)
        return [b"1234"]

    monkeypatch.setattr(placement, "prompt_digests", counted)
    for _ in range(50):
        engines.prefer(tuple(SYSTEM))
    assert len(calls) == 1
    engines.now_s += 3
    engines.learn(status(A), status(B))
    engines.prefer(SYSTEM[:9])
    assert len(engines.placement._placed) == len(engines.placement._digests_s) == 1


def test_a_long_prompt_is_looked_at_up_to_a_bound() -> None:
    assert len(prompt_digests([0] * 100_000, 4, "ns")) == 4096


def test_idle_engines_take_turns() -> None:
    engines = Engines()
    engines.learn(status(A), status(B))
    assert [engines.prefer([number] * 300) for number in range(4)] == [A, B, A, B]


def test_engines_with_other_page_sizes_are_compared_by_tokens() -> None:
    engines = Engines()
    engines.learn(status(A, SYSTEM[:64], page=64), status(B, SYSTEM))
    assert engines.prefer([*SYSTEM, 3]) == B
