"""Why a token took long, told from the steps of its engine."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.events import Admitted, Chunk, EventRow, Preempted, StepStats, TakenOver
from pipeline.log.journal import JournalStep
from pipeline.views.company import spoken, why_waited

PREEMPTED = Preempted(engine="generate-0", epoch=1, step=1)
ADMITTED = Admitted(engine="generate-0", epoch=2, step=1, fingerprint="w")
AGAIN = "it was preempted because the pages ran out, and computed again"


def step(ms: int, *, forward_ms: float = 10, chunks: tuple[tuple[str, int], ...] = (), **fields: Any) -> JournalStep:
    computed = tuple(Chunk(uid=uid, start=0, count=count) for uid, count in chunks)
    empty: dict[str, Any] = {"rows": (), "events": (), "released": (), "inputs": (), "schedule": ""}
    return JournalStep(1, ms, ms, figures=StepStats(forward_ms=forward_ms), chunks=computed, **(empty | fields))


def preempted(*uids: str) -> dict[str, Any]:
    return {"events": tuple(EventRow(uid=uid, n=3, event=PREEMPTED) for uid in uids)}


def test_a_long_prompt_and_preemptions_are_named() -> None:
    steps = [
        step(1600, forward_ms=600, chunks=(("p", 2048),), **preempted("x", "y")),
        step(2200, forward_ms=600, chunks=(("p", 2048),)),
        step(2900, forward_ms=690, chunks=(("p", 1904),)),
    ]
    wait = why_waited(steps, "a", 212, since_ms=1000)
    assert str(wait) == (
        "token 212 of a waited 1.9 s: a prompt of 6,000 tokens was prefilled in 3 chunks, and 2 other requests were "
        "preempted"
    )
    assert (wait.num_steps, wait.computed_ms, wait.longest_ms) == (3, 1890, 690)


@pytest.mark.parametrize(
    ("ms", "said"), [(0.64, "0.64 ms"), (9.96, "10 ms"), (12.4, "12 ms"), (999, "999 ms"), (6193.5, "6.2 s")]
)
def test_times_below_a_second_are_said_in_milliseconds(ms: float, said: str) -> None:
    assert spoken(ms) == said
    assert f"only {said} of" in str(why_waited([step(90_000, forward_ms=ms)], "a", 5, since_ms=0))


@pytest.mark.parametrize(
    ("steps", "n", "said"),
    [
        ([step(1010)], 5, "nothing else happened in 1 step, the longest of which took 10 ms"),
        ([step(3000)], 5, "the engine computed for only 10 ms of that time"),
        ([step(1300, forward_ms=290, chunks=(("a", 90),))], 1, "90 tokens of its prompt were prefilled in 1 chunk"),
        (
            [step(1300, forward_ms=290, chunks=(("b", 90), ("c", 10))), step(1400, chunks=(("c", 1000),))],
            5,
            "2 prompts of 1,100 tokens were prefilled in 3 chunks",
        ),
        (
            [step(1300, forward_ms=290, **preempted("a")), step(1400, forward_ms=90, chunks=(("a", 64),))],
            5,
            f"{AGAIN}, and 64 tokens of its prompt and output were prefilled in 1 chunk",
        ),
        (
            [
                step(1300, forward_ms=290, events=(EventRow(uid="a", n=4, event=TakenOver(engine="e", epoch=2)),)),
                step(1400, events=(EventRow(uid="b", n=0, event=ADMITTED),)),
            ],
            5,
            "its engine was gone, and another one took it over",
        ),
        ([step(1300, forward_ms=290, **preempted("b", "b"))], 5, "1 other request was preempted"),
    ],
)
def test_what_happened_between_two_tokens_is_said(steps: list[JournalStep], n: int, said: str) -> None:
    assert str(why_waited(steps, "a", n, since_ms=1000)).partition(": ")[2] == said
