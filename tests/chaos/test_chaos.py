"""Whatever is killed or stopped, no request notices; and the driver that says so would see it if one did."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from chaos.chain_model import text_of
from chaos.clients import Answer, Ask
from chaos.driver import (
    ACTIONS,
    ENGINE_BURST,
    Settings,
    Tally,
    one_chain,
    planned_hits,
    run_chain,
    run_real,
    same_as,
    wrong_with,
)
from chaos.quiet import Story, read_story
from chaos.scene import ROLES, roles_of
from support.histories import answered, entries_of

from pipeline.events import (
    Event,
    Failed,
)
from pipeline.log.protocol import Entry
from pipeline.names import GENERATE, SEAL, tokens_id

SMALL = Settings(requests=110, turns=2)
"""Each role is stopped once and killed once. By day `test_fail_points.py` kills each, and
`end_to_end/test_takeover.py` stops and kills one of two."""


def history(tokens: Sequence[int], *, end: Event | None = None) -> list[Entry]:
    """Return the history of a request with the prompt 7, one event for each token."""
    return entries_of(answered(*tokens, text=lambda token: f" {token:04x}", ids=(7,), end=end))


def answer_to(tokens: Sequence[int]) -> Answer:
    ids = [*(tokens_id(n) for n in range(1, len(tokens) + 1)), SEAL]
    return Answer(Ask("key", {}), "uid", f" {text_of(tokens)}", ids, ["length"], done=True)


TOKENS = (11, 12, 13)
UNDISTURBED = read_story(history(TOKENS))
WHOLE = answer_to(TOKENS)


def problems(answer: Answer, entries: Sequence[Entry], expected: Story = UNDISTURBED) -> str:
    return "; ".join(wrong_with(answer, entries, same_as(expected)))


def test_a_request_that_nothing_happened_to_is_in_order() -> None:
    assert problems(WHOLE, history(TOKENS)) == ""


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"refusal": "503"}, "was told 503"),
        ({"done": False}, "no end"),
        ({"ends": []}, "0 ends"),
        ({"ends": ["length", "length"]}, "2 ends"),
        ({"ids": ["1-0", "1-0", "2-0", "3-0", SEAL]}, "do not increase"),
        ({"ids": ["1-0", "2-0", "3-0"]}, "expected the seal"),
        ({"text": WHOLE.text + " 000d"}, "the client has the text"),
    ],
)
def test_it_is_seen_when_a_client_saw_something_else(changed: dict[str, object], problem: str) -> None:
    assert problem in problems(dataclasses.replace(WHOLE, **changed), history(TOKENS))  # type: ignore[arg-type]


def test_it_is_seen_when_the_log_holds_something_else() -> None:
    whole = history(TOKENS)
    failed = Failed(n=3, status=500, code="x", message="x")
    assert "expected Finished" in problems(WHOLE, history(TOKENS, end=failed))
    assert "expected Finished" in problems(WHOLE, whole[:-1])
    assert "after 0 tokens comes 2-0" in problems(WHOLE, [*whole[:2], *whole[3:]])
    assert "expected Finished" in problems(WHOLE, [])


def test_it_is_seen_when_tokens_are_not_those_of_the_undisturbed_run() -> None:
    other = (11, 99, 13)
    assert "from token 2 on" in problems(answer_to(other), history(other))
    assert "from token 3 on" in problems(answer_to(TOKENS[:2]), history(TOKENS[:2]))


def test_it_is_seen_when_tokens_are_no_chain() -> None:
    assert "the chain is broken at token" in one_chain([7], 3)(UNDISTURBED)


def test_each_role_is_killed_and_stopped_as_often_as_another() -> None:
    hits = planned_hits(Settings())
    assert Counter((hit.role, hit.action) for hit in hits) == {(role, how): 3 for role in ROLES for how in ACTIONS}
    assert sum(hit.burst for hit in hits) <= Settings().requests
    assert {hit.burst for hit in hits if hit.role == GENERATE} == {ENGINE_BURST}


def test_too_few_requests_for_the_hits_are_refused() -> None:
    with pytest.raises(SystemExit, match="too few"):
        planned_hits(Settings(requests=20))


def in_order(tally: Tally, roles: Sequence[str] = ROLES) -> None:
    assert tally.problems == []
    assert len(tally.answers) >= SMALL.requests
    assert min(tally.hits[role, action] for role in roles for action in SMALL.actions) > 0
    assert min(tally.restarts[role] for role in roles) > 0


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_every_answer_is_that_of_an_undisturbed_run_whatever_is_killed_or_stopped(tmp_path: Path, overlap: str) -> None:
    in_order(run_real(dataclasses.replace(SMALL, overlap=overlap), tmp_path))


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_every_answer_of_two_ranks_is_that_of_one_that_nobody_disturbs(tmp_path: Path, overlap: str) -> None:
    settings = dataclasses.replace(SMALL, requests=200, overlap=overlap, roles=roles_of(2), num_ranks=2)
    in_order(run_real(settings, tmp_path), settings.roles)


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_every_answer_is_one_chain_whatever_is_killed_or_stopped_of_two_of_each(tmp_path: Path, overlap: str) -> None:
    in_order(run_chain(dataclasses.replace(SMALL, overlap=overlap), tmp_path))
