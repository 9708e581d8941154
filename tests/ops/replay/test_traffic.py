"""What is sent again of recorded requests, when, to whom, and where the client leaves; what came of it, and where two
answers part.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from support.histories import HELLO, UID, asked, entries_of, recording, uid

from ops.bench.load import Answer
from ops.replay.redact import redacted, stand_in
from ops.replay.traffic import (
    Difference,
    Leave,
    Outcome,
    Planned,
    Target,
    Traffic,
    first_difference,
    is_comparable,
    outcome_of,
    outcome_seen,
    traffic_of,
    translated,
)
from ops.shell.params import Settings
from pipeline.events import Presentation, Replay, SamplingParams, Templating, Tokenized
from pipeline.log.protocol import Entry
from pipeline.names import TOKENIZED_ID, sibling_uids
from pipeline.recording import Recording
from pipeline.walk import walk
from web.wire.copies import HEADER

OURS = Target(is_ours=True, models=("m",))
STREAM = Presentation(stream=True)
WHOLE = Presentation(stream=True, whole_text=True, continuous_usage=True)
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 7}


def plan(*recordings: Recording, target: Target = OURS, speed: float = 1.0) -> Traffic:
    return traffic_of(recordings, target, speed=speed)


def body(planned: Planned) -> dict[str, Any]:
    fields: dict[str, Any] = orjson.loads(planned.body)
    return fields


def siblings(count: int, name: str = uid(0), **fields: Any) -> list[Recording]:
    shown = fields.pop("presentation", Presentation(stream=True, choices=count))
    return [
        recording(["a"], name=each, siblings=count, presentation=shown, sampling=SamplingParams(seed=seed), **fields)
        for seed, each in enumerate(sibling_uids(name, count), 7)
    ]


def test_each_request_is_due_at_its_distance_from_the_first_whatever_the_order_of_the_file() -> None:
    recordings = [recording(name=uid(number), ms=ms) for number, ms in ((0, 3000), (1, 1000), (2, 1500))]
    assert [one.due_s for one in plan(*recordings).planned] == [0, 0.5, 2]
    assert [one.uids for one in plan(*recordings, speed=4).planned] == [(uid(1),), (uid(2),), (uid(0),)]
    assert [one.due_s for one in plan(*recordings, speed=4).planned] == [0, 0.125, 0.5]
    assert plan(*recordings, speed=4).recorded_s == 2


def test_our_server_gets_the_recorded_body_with_its_seed() -> None:
    [one] = plan(recording(["a"])).planned
    assert one.path == "/v1/chat/completions"
    assert body(one) == {"model": "m", "messages": list(HELLO), "stream": True, **SAMPLED}


def test_a_minisgl_is_told_of_which_request_this_is_a_copy_and_no_other_server() -> None:
    recordings = [recording(["a"], name=uid(9)), *siblings(2), *siblings(3, uid(5))[1:]]
    names = {uid(0), f"{uid(5)}.1", f"{uid(5)}.2", uid(9)}
    for target in (OURS, Target(is_ours=False)):  # also by the client's clock
        assert {one.headers[HEADER] for one in plan(*recordings, target=target).planned} == names
    assert all(not one.headers for one in plan(*recordings, target=Target(False, draws_alike=False)).planned)


def test_siblings_are_one_body_again() -> None:
    recordings = siblings(12)
    [one] = plan(*reversed(recordings)).planned
    assert one.uids == tuple(each.uid for each in recordings)
    assert body(one)["n"] == 12 and body(one)["seed"] == 7 and len(one.before) == 12


def test_siblings_of_which_some_are_not_in_the_file_are_sent_alone() -> None:
    planned = plan(*siblings(3)[1:]).planned
    assert [one.uids for one in planned] == [(f"{uid(0)}.1",), (f"{uid(0)}.2",)]
    assert [(body(one)["seed"], "n" in body(one)) for one in planned] == [(8, False), (9, False)]


@pytest.mark.parametrize(
    ("target", "model"),
    [
        (Target(True, ("x", "m")), "m"),
        (Target(True, ("x", "y")), "x"),
        (Target(True), "m"),
        (Target(True, ("x", "m"), model="y"), "y"),
    ],
)
def test_the_recorded_model_is_asked_unless_it_is_not_served(target: Target, model: str) -> None:
    [one] = plan(recording(["a"]), target=target).planned
    assert body(one)["model"] == model


@pytest.mark.parametrize(
    ("shown", "end", "leave"),
    [
        (STREAM, "stop", None),
        (STREAM, "failed", None),
        (STREAM, "cancelled", Leave(4, 0.035)),
        (Presentation(), "cancelled", Leave(0, 0.035)),
        (Presentation(stream=True, echo=True), "cancelled", Leave(0, 0.035)),
    ],
)
def test_the_client_leaves_where_it_left(shown: Presentation, end: str, leave: Leave | None) -> None:
    """A line break of two characters may arrive as one."""
    [one] = plan(recording(["ab", "c\r\n"], end, presentation=shown)).planned
    assert one.leave == leave


def test_the_client_leaves_no_siblings_of_which_one_failed() -> None:
    shown = Presentation(stream=True, choices=2)
    left, failed = (
        recording(["a"], end, name=name, siblings=2, presentation=shown)
        for end, name in zip(("cancelled", "failed"), sibling_uids(uid(0), 2), strict=True)
    )
    assert [one.leave for one in plan(left, failed).planned] == [None]


@pytest.mark.parametrize("is_minisgl", [True, False])
def test_the_user_is_told_to_minisgl_alone_because_it_can_forget_users(is_minisgl: bool) -> None:
    target = Target(is_ours=False, draws_alike=is_minisgl)
    [one] = plan(recording(["a"], labels={"user": "ann"}), target=target).planned
    assert body(one).get("user") == ("ann" if is_minisgl else None)


def test_what_cannot_be_sent_is_counted() -> None:
    broken = Recording(uid(5), (Entry("0-1", {"kind": "what"}),))
    traffic = plan(
        recording(["a"]),
        recording(name=uid(1), endpoint="/tokenize", task="tokenize"),
        recording(name=uid(2), messages=()),
        Recording(uid(3), ()),
        recording(name=uid(4), endpoint=""),
        recording(name=uid(6), replay=Replay(of=uid(0))),
        broken,
    )
    assert len(traffic.planned) == 1
    assert traffic.left_out == {
        "of /tokenize": 1,
        "without a prompt": 1,
        "without a beginning": 1,
        "of no endpoint": 1,
        "that computed another one again": 1,
        "that cannot be read": 1,
    }


def test_a_redacted_request_is_sent_with_made_up_tokens() -> None:
    entries = recording(["a"]).entries
    tokenized = Tokenized(token_ids=(9, 8, 7), fingerprint="f", by="tokenize-0")
    whole = Recording(UID, (entries[0], *entries_of([(TOKENIZED_ID, tokenized)]), *entries[1:]))
    [one] = plan(stand_in(redacted(whole, b"salt"))).planned
    assert one.path == "/v1/completions"
    assert len(body(one)["prompt"]) == 3 and body(one)["seed"] == 7


def test_the_form_of_a_stream_is_that_of_its_endpoint() -> None:
    forms = [
        plan(recording(**fields)).planned[0].form
        for fields in (
            {},
            {"endpoint": "/v1/completions", "prompt": "a"},
            {"endpoint": "/generate", "prompt": "a", "presentation": WHOLE},
            {"endpoint": "/generate", "prompt": "a"},
        )
    ]
    assert forms == ["chunks", "chunks", "whole", "text"]


def other(*fields: dict[str, Any], num_tokens: int = 5) -> tuple[str, dict[str, Any], Counter[str]]:
    dropped: Counter[str] = Counter()
    path, translation = translated([asked(**each) for each in fields], num_tokens, dropped)
    return path, translation, dropped


def test_another_server_gets_the_fields_of_openai_and_always_streams() -> None:
    sampling = SamplingParams(seed=7, temperature=0.5, top_k=4, stop=("x",), max_tokens=9, logprobs=2)
    fields = {"sampling": sampling, "limit": "n_predict", "presentation": Presentation(), "labels": {"user": "ann"}}
    path, translation, dropped = other(fields | {"templating": Templating(variables={"a": 1})})
    assert path == "/v1/chat/completions"
    assert translation == {
        "model": "m",
        "messages": list(HELLO),
        "temperature": 0.5,
        "top_p": 1.0,
        "seed": 7,
        "stop": ["x"],
        "max_tokens": 9,
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert dropped == {"top_k": 1, "chat_template_kwargs": 1}


@pytest.mark.parametrize(
    ("fields", "path", "said"),
    [
        ({"limit": "max_completion_tokens", "sampling": SamplingParams(max_tokens=9)}, "/v1/chat/completions",
         {"max_completion_tokens": 9}),
        ({}, "/v1/chat/completions", {}),
        ({"prompt": "a"}, "/v1/completions", {"prompt": "a", "max_tokens": 5}),
        ({"endpoint": "/v1/completions", "prompt_ids": (1, 2), "sampling": SamplingParams(max_tokens=16)},
         "/v1/completions", {"prompt": [1, 2], "max_tokens": 16}),
        ({"endpoint": "/generate", "prompt": "a", "presentation": WHOLE, "sampling": SamplingParams(max_tokens=3)},
         "/v1/completions", {"prompt": "a", "max_tokens": 3}),
    ],
)  # fmt: skip
def test_prompts_without_a_template_go_to_completions_with_a_length(
    fields: dict[str, Any], path: str, said: dict[str, Any]
) -> None:
    where, translation, _ = other(fields)
    assert where == path
    lengths = {name: value for name, value in translation.items() if name in ("prompt", *LENGTHS)}
    assert lengths == said


LENGTHS = ("max_tokens", "max_completion_tokens", "n_predict")


def test_siblings_of_a_list_of_prompts_are_one_body_elsewhere_too() -> None:
    shown = Presentation(choices=2)
    prompts: Sequence[str] = ("a", "a", "b", "b")
    fields = [{"endpoint": "/v1/completions", "prompt": each, "siblings": 4, "presentation": shown} for each in prompts]
    _, translation, _ = other(*fields)
    assert (translation["prompt"], translation["n"]) == (["a", "b"], 2)


def test_the_users_own_fields_replace_recorded_ones() -> None:
    settings = Settings({"temperature": 0, "mirostat": 2}, ("top_k",))
    target = Target(True, ("m",), settings=settings)
    [chat] = plan(recording(["a"]), target=target).planned
    assert body(chat)["temperature"] == 0 and body(chat)["mirostat"] == 2 and "top_k" not in body(chat)
    [sglang] = plan(recording(endpoint="/generate", prompt="a", presentation=WHOLE), target=target).planned
    params = body(sglang)["sampling_params"]
    assert params["temperature"] == 0 and "top_k" not in params and body(sglang)["mirostat"] == 2


def outcome(words: str, end: str = "stop") -> Outcome:
    """Return what came of a request whose tokens are the *words*."""
    history = recording([f"{word} " for word in words.split()], end).entries
    return outcome_of(moment.event for moment in walk(history))


def test_times_are_those_between_the_commits() -> None:
    whole = outcome("a b c d")
    assert (whole.ttft_ms, whole.tpot_ms, whole.e2e_ms) == (20, 10, 55)
    assert (whole.end, whole.text, whole.output_tokens) == ("stop", "a b c d ", 4)
    assert (whole.prompt_tokens, whole.cached_tokens, whole.error) == (9, 4, "")
    assert whole.is_whole


def test_a_single_token_has_no_time_per_token_and_none_has_no_time_at_all() -> None:
    assert outcome("a").tpot_ms is None and outcome("a").ttft_ms == 20
    assert outcome("").ttft_ms is None


def test_an_end_before_the_end_is_not_whole() -> None:
    left, failed = outcome("a b", "cancelled"), outcome("a b", "failed")
    assert (left.end, left.by_client, left.e2e_ms, left.error) == ("cancelled", True, 35, "")
    assert (failed.end, failed.by_client, failed.e2e_ms) == ("failed", False, None)
    assert failed.error == "503 poisonous: it broke"
    assert not left.is_whole and not failed.is_whole


def test_a_stream_is_measured_by_the_clock_of_the_client() -> None:
    answer = Answer(10.0, 13.0, (11.0, 12.0), "a b", prompt_tokens=9, output_tokens=5, reason="length")
    seen = outcome_seen(answer, left=False)
    assert (seen.end, seen.ttft_ms, seen.tpot_ms, seen.e2e_ms) == ("length", 1000, 250, 3000)
    assert seen.tokens is None
    assert outcome_seen(answer, left=True).end == "cancelled"
    broken = outcome_seen(dataclasses.replace(answer, error="it broke"), left=False)
    assert (broken.end, broken.error) == ("failed", "it broke")


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        (outcome("a b c"), outcome("a b c"), None),
        (outcome("a b c"), outcome("a x c"), Difference(2, 2, "b c ", "x c ")),
        (outcome("a b"), outcome("a b c"), Difference(3, 4, "", "c ")),
        (outcome("a b c"), outcome("a b"), Difference(3, 4, "c ", "")),
        (outcome("a b", "cancelled"), outcome("a b c"), None),
        (outcome("a b c"), outcome("a b", "cancelled"), None),
        (outcome("a b", "cancelled"), outcome("a x", "cancelled"), Difference(2, 2, "b ", "x ")),
        (outcome("a b"), Outcome("stop", "a b "), None),
        (outcome("a b"), Outcome("stop", "a c "), Difference(None, 2, "b ", "c ")),
        (outcome("a b"), Outcome("stop", "a "), Difference(None, 2, "b ", "")),
        (outcome("a b"), Outcome("cancelled", "a "), None),
        (Outcome("stop", "a", (1, 2)), Outcome("stop", "a", (1, 3)), Difference(2, 1, "token id 2", "token id 3")),
        (Outcome("stop", "a", (1, 2)), Outcome("stop", "a", (1,)), Difference(2, 1, "token id 2", "the end")),
    ],
)
def test_answers_are_compared_token_by_token_or_by_their_text(
    before: Outcome, after: Outcome, difference: Difference | None
) -> None:
    assert is_comparable(before, after)
    assert first_difference(before, after) == difference


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (outcome("a b"), outcome("a", "failed")),
        (outcome("a b", "failed"), outcome("a b")),
        (outcome("a b", "cancelled"), outcome("", "cancelled")),
        (outcome("", "cancelled"), outcome("a b")),
        (outcome("a b"), Outcome("")),
    ],
)
def test_where_nothing_can_be_compared_nothing_is(before: Outcome, after: Outcome) -> None:
    assert not is_comparable(before, after)


def test_a_difference_says_where_and_how() -> None:
    assert str(Difference(2, 2, "b c", "x c")) == "token 2: 'b c', now 'x c'"
    assert str(Difference(None, 2, "b", "")) == "character 3: 'b', now ''"
