"""What an event looks like in the log, and that it comes back as it was."""

from __future__ import annotations

import time
import uuid

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline import events
from pipeline.errors import UndecodableEvent
from pipeline.events import (
    Admitted,
    Answered,
    AnyEvent,
    Cancelled,
    EventRow,
    Failed,
    Finished,
    Logprob,
    Logprobs,
    Preempted,
    Presentation,
    PromptInfo,
    SamplingParams,
    Score,
    Scores,
    StepCompleted,
    StepStats,
    Submitted,
    TakenOver,
    Templating,
    Timings,
    Tokenized,
    TokenRow,
    TokensProduced,
    TokenText,
    TopLogprob,
    Usage,
    as_plain,
    decode,
    encode,
    new_uid,
)

ADMITTED = Admitted(engine="generate-0", epoch=3, step=9, fingerprint="w", cached_tokens=16)
FAILED = Failed(n=4, status=400, code="invalid_value", message='No "such" thing:\n{}', param="prompt")
TOLD = Logprob(token=5, text="1", logprob=-0.5, top=(TopLogprob(token=6, text="2", logprob=-0.25),))
FIRST = TokenText(token=8, text="a")
FULL: list[AnyEvent] = [
    Submitted(
        endpoint="/v1/chat/completions",
        frontend="web-0",
        owner="team-a",
        model="default",
        messages=({"role": "user", "content": "Grüß dich"}, {"role": "assistant", "content": None, "n": [1, 2.5]}),
        prompt="[1, 2]",
        prompt_ids=(0, 151_643),
        sampling=SamplingParams(
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            min_p=0.1,
            seed=-(2**63),
            max_tokens=7,
            min_tokens=2,
            stop=("\n", ""),
            stop_token_ids=(1, 2),
            ignore_eos=True,
            bad_words=("a", " b"),
            logprobs=2,
            prompt_logprobs=0,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
        ),
        task="tokenize",
        return_pieces=True,
        templating=Templating(add_generation_prompt=False, tools=({"type": "function"},), variables={"a": [1]}),
        add_special_tokens=False,
        truncate_prompt_tokens=-1,
        priority=-3,
        siblings=2,
        presentation=Presentation(stream=True, include_usage=True, token_ids=True),
        deadline_ms=1_700_000_000_000,
        labels={"user": "u", "metadata": {"a": None}},
    ),
    Tokenized(token_ids=(0, 151_643), fingerprint="t", by="tokenize-0", bad_words=((5,), (6, 7))),
    ADMITTED,
    Preempted(engine="generate-0", epoch=3, step=9),
    TakenOver(engine="generate-0", epoch=3),
    TokensProduced(count=2, tokens=(5, 6), text="123", step="3-9", chunks=2),
    TokensProduced(
        tokens=(5,),
        text="1",
        step="3-9",
        scores=(TOLD,),
        prompt=PromptInfo(
            num_tokens=2,
            cached_tokens=1,
            token_ids=(8, 5),
            text="a1",
            scores=Logprobs((TOLD,)),
            first=TokenText(token=8, text="a"),
        ),
    ),
    Finished(
        n=2,
        reason="stop",
        stop_string="7",
        usage=Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
        timings=Timings(admitted_ms=1, first_token_ms=2, total_ms=3),
    ),
    FAILED,
    Cancelled(n=3, by="client"),
    Answered(n=0, token_ids=(3, 4), pieces=("a", "bytes:\\xe4"), text="a", by="tokenize-0"),
    StepCompleted(
        rows=(
            TokenRow(uid="a", n=1, token=5, end="stop", chunks=1),
            TokenRow(uid="b", n=2, token=6),
            TokenRow(
                uid="b",
                n=1,
                token=6,
                score=Score(logprob=-1.5, top=((7, -0.5),)),
                prompt_scores=Scores((Score(logprob=0),)),
            ),
            EventRow(uid="c", n=0, event=ADMITTED),
            EventRow(uid="d", n=4, event=FAILED),
        ),
        released=("e",),
        figures=StepStats(
            decode_rows=1, prefill_rows=2, prefill_tokens=3, mixed_prefill_length=7, running=4, waiting=5, free_pages=6
        ),
    ),
]
LEAST: list[AnyEvent] = [
    Submitted(endpoint="e", frontend="f", sampling=SamplingParams()),
    Tokenized(token_ids=(), fingerprint="", by=""),
    Admitted(engine="g", epoch=1, step=1, fingerprint="w"),
    TokensProduced(tokens=(), text="", step=""),
    Failed(status=500, code="", message=""),
    Cancelled(by=""),
    StepCompleted(rows=()),
]

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
json_objects = st.dictionaries(st.text(), json_values, max_size=3)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.integers(-(2**63), 2**63 - 1),
    max_tokens=st.none() | st.integers(1, 2**31),
    stop=st.lists(st.text(), max_size=3).map(tuple),
)


def test_every_kind_of_event_is_among_the_examples() -> None:
    kinds = {event.kind for event in FULL}
    assert kinds == set(events._BY_KIND)


@pytest.mark.parametrize("event", FULL + LEAST, ids=lambda event: event.kind)
def test_an_event_comes_back_as_it_was(event: AnyEvent) -> None:
    assert decode(encode(event)) == event


@settings(deadline=None, database=None)
@given(
    prompt=st.text(), messages=st.lists(json_objects, max_size=3).map(tuple), labels=json_objects, sampling=samplings
)
def test_whatever_a_client_sends_comes_back_as_it_was(
    prompt: str, messages: tuple[dict[str, object], ...], labels: dict[str, object], sampling: SamplingParams
) -> None:
    event = Submitted(endpoint="e", frontend="f", prompt=prompt, messages=messages, labels=labels, sampling=sampling)
    assert decode(encode(event)) == event


@settings(deadline=None, database=None)
@given(text=st.text(), tokens=st.lists(st.integers(0, 2**31), max_size=4).map(tuple))
def test_whatever_a_model_says_comes_back_as_it_was(text: str, tokens: tuple[int, ...]) -> None:
    event = TokensProduced(count=len(tokens), tokens=tokens, text=text, step="1-1")
    assert decode(encode(event)) == event


def test_a_version_is_read_where_it_is_written_and_is_the_first_where_it_is_not() -> None:
    event = Cancelled(by="client")
    assert decode(encode(event)) == decode(encode(event) | {"v": "1"}) == event
    with pytest.raises(UndecodableEvent):
        decode(encode(event) | {"v": "3"})


def test_fields_of_a_newer_version_are_left_out_at_any_depth_where_it_did_not_raise_the_version() -> None:
    event = Submitted(endpoint="e", frontend="f", sampling=SamplingParams(seed=7), labels={"a": {"colour": 1}})
    fields = encode(event)
    sampling = fields["sampling"][:-1] + ',"colour":[1]}'
    assert decode(fields | {"colour": "no JSON", "sampling": sampling}) == event
    with pytest.raises(ValidationError):
        SamplingParams.model_validate({"colour": 1})


def test_the_moment_is_left_to_the_commit_and_read_back() -> None:
    event = Cancelled(by="client", ms=17)
    assert "ms" not in encode(event)
    assert decode({"ms": "18", **encode(event)}).ms == 18


def test_fields_are_text_as_it_is_and_only_other_values_are_json() -> None:
    assert encode(TokensProduced(count=2, tokens=(5, 6), text='a "b"\n', step="3-9")) == {
        "kind": "tokens",
        "count": "2",
        "tokens": "5,6",
        "text": 'a "b"\n',
        "step": "3-9",
    }
    finished = encode(next(event for event in FULL if event.kind == "finished"))
    assert finished["reason"] == "stop"
    assert orjson.loads(finished["usage"]) == {"prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1}


@pytest.mark.parametrize("event", LEAST, ids=lambda event: event.kind)
def test_fields_that_have_their_default_are_left_out(event: AnyEvent) -> None:
    required = {name for name, field in type(event).model_fields.items() if field.is_required()}
    assert set(encode(event)) == required | {"kind"}


def test_an_older_log_without_prompt_ids_is_read() -> None:
    event = Submitted(endpoint="e", frontend="f", prompt_ids=(5, 0), sampling=SamplingParams())
    fields = encode(event)
    assert fields.pop("prompt_ids") == "5,0"
    assert decode(fields) == event.model_copy(update={"prompt_ids": ()})


def test_a_step_says_of_a_row_only_what_is_there() -> None:
    assert as_plain(StepCompleted(rows=(TokenRow(uid="a", n=1, token=5),)))["rows"] == [
        {"kind": "token", "uid": "a", "n": 1, "token": 5, "chunks": 0}
    ]


@pytest.mark.parametrize("event", [*FULL, *LEAST], ids=lambda event: event.kind)
def test_an_event_is_as_plain_as_pydantic_makes_it(event: AnyEvent) -> None:
    plain = as_plain(event)
    assert plain == event.model_dump(mode="json", include=set(plain), exclude_none=True)
    if isinstance(event, StepCompleted):
        usual = event.model_copy(update={"released": (), "inputs": (), "chunks": ()})
        plain, made = as_plain(usual), usual.model_dump(mode="json", include=set(as_plain(usual)), exclude_none=True)
        assert orjson.dumps(plain) == orjson.dumps(made), "in the same order, too"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "unknown kind None"),
        ({"kind": "nonsense"}, "unknown kind 'nonsense'"),
        ({"kind": "token", "uid": "a", "n": "1", "token": "1"}, "unknown kind 'token'"),
        ({"kind": "cancelled"}, "by"),
        ({"kind": "cancelled", "by": "client", "n": "one"}, "does not decode"),
        ({"kind": "cancelled", "by": "client", "n": '"one"'}, "n"),
        ({"kind": "tokens", "count": "1", "tokens": "[1,", "text": "", "step": ""}, "does not decode"),
        ({"kind": "submitted", "endpoint": "e", "frontend": "f", "sampling": '{"top_p":7}'}, "top_p"),
    ],
)
def test_what_is_no_event_does_not_decode_and_the_error_says_why(fields: dict[str, str], reason: str) -> None:
    with pytest.raises(UndecodableEvent, match=reason):
        decode(fields)


def test_events_are_frozen() -> None:
    event = Cancelled(by="client")
    with pytest.raises(ValueError, match="frozen"):
        event.by = "somebody"


def test_a_uid_is_a_uuid_of_version_7() -> None:
    before_ms = time.time_ns() // 1_000_000
    text = new_uid()
    value = uuid.UUID(text)
    assert text == value.hex
    assert (value.version, value.variant) == (7, uuid.RFC_4122)
    assert before_ms <= value.int >> 80 <= time.time_ns() // 1_000_000


def test_uids_sort_by_time_and_those_of_one_millisecond_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 1_700_000_000_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: now_ns)
    assert len({new_uid() for _ in range(1000)}) == 1000
    uids = []
    for _ in range(50):
        uids.append(new_uid())
        now_ns += 1_000_000
    assert uids == sorted(uids)


def test_lists_of_numbers_have_no_brackets_and_those_of_an_older_log_are_read() -> None:
    event = TokensProduced(tokens=(5,), text="a", step="1-1")
    fields = encode(event)
    assert fields["tokens"] == "5"
    assert decode(fields) == decode(fields | {"tokens": "[5]", "count": "1"}) == event
    empty = encode(Tokenized(token_ids=(), fingerprint="t", by="tokenize-0"))
    assert empty["token_ids"] == "" and decode(empty) == Tokenized(token_ids=(), fingerprint="t", by="tokenize-0")
