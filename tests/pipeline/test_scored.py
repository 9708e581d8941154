"""How many scores the answers to one body tell of its prompts."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.events import Presentation, SamplingParams, Submitted
from pipeline.scored import MOST_SCORES, pairs_told, too_many


@pytest.mark.parametrize(
    ("sampling", "shown", "pairs"),
    [
        ({}, {}, 0),
        ({"logprobs": 20}, {"choices": 8}, 0),
        ({"prompt_logprobs": 0}, {}, 100),
        ({"prompt_logprobs": 20}, {}, 2100),
        ({"prompt_logprobs": 20}, {"choices": 8}, 16_800),
        ({"prompt_logprobs": 1, "max_tokens": 50}, {"whole_text": True}, 200),
        ({"prompt_logprobs": 1, "max_tokens": 50}, {"whole_text": True, "stream": True}, 10_000),
        ({"prompt_logprobs": 1, "max_tokens": 50}, {"echo": True, "stream": True}, 200),
    ],
)
def test_each_token_and_each_alternative_counts_wherever_it_is_told(
    sampling: dict[str, Any], shown: dict[str, Any], pairs: int
) -> None:
    event = Submitted(
        endpoint="e", frontend="f", sampling=SamplingParams(**sampling), presentation=Presentation(**shown)
    )
    assert pairs_told(event, 100) == pairs


def test_an_error_says_what_was_seen_the_limit_and_what_to_do() -> None:
    event = Submitted(
        endpoint="e", frontend="f", sampling=SamplingParams(), presentation=Presentation(prompt_scores=True)
    )
    assert too_many(MOST_SCORES, event) is None
    error = too_many(MOST_SCORES + 1, event)
    assert error is not None and (error.status, error.code, error.param) == (400, "too_many_scores", "prompt_logprobs")
    assert all(word in error.message for word in ("1000001", "1000000", "fewer alternatives"))
