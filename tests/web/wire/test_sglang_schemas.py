"""/generate without HTTP: what its two forms take, what they submit, and the folds that answer them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.chunks import UID, answered, ended, frames_of
from support.wire import generations, refusal

from ops.sse_reader import frames_in
from pipeline.events import (
    Admitted,
    Failed,
    Finished,
    FinishReason,
    Logprob,
    Logprobs,
    Presentation,
    PromptInfo,
    SamplingParams,
    Submitted,
    Timings,
    TokensProduced,
    TokenText,
    TopLogprob,
    Usage,
)
from pipeline.names import SEAL, sibling_uids
from web.wire.frames import ClientEvent
from web.wire.sglang.schemas import SGLangRequest, TextRequest, parse_generate
from web.wire.sse import KEEP_ALIVE

SECRET = "a-word-that-must-not-come-back"


def sampling(**params: Any) -> dict[str, Any]:
    return {"text": "a", "sampling_params": params}


# what it takes; the sampling fields that all protocols share are in test_schemas.py


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"prompt": None, "text": None}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"text": 3}, "text"),
        ({"text": ["a", ""]}, "text.1"),
        ({"text": [3]}, "text.0"),
        ({"text": {"a": SECRET}}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": SECRET}, "input_ids"),
        ({"input_ids": [SECRET]}, "input_ids.0"),
        ({"input_ids": [1, True]}, "input_ids.1"),
        ({"input_ids": [[1], []]}, "input_ids.1"),
        ({"input_ids": [[1], 2]}, "input_ids.1"),
        ({"input_ids": [[1], [2, -1]]}, "input_ids.1.1"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"text": "a", "prompt": SECRET}, "prompt"),
        ({"input_ids": [1], "prompt": SECRET}, "prompt"),
        ({"text": ["a"] * 257, "sampling_params": {"n": 4}}, "text"),
        ({"text": "a", "sampling_params": [{"n": 4}]}, "sampling_params"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": "a", "rid": SECRET}, "rid"),
        ({"text": "a", "temperature": 1}, "temperature"),
        ({"text": "a", "max_new_tokens": 1}, "max_new_tokens"),
        ({"text": "a", "max_tokens": 1}, "max_tokens"),
        ({"text": "a", "return_logprob": 1}, "return_logprob"),
        ({"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "return_text_in_logprobs": "x"}, "return_text_in_logprobs"),
        ({"text": "a", "image_data": SECRET}, "image_data"),
        ({"text": "a", "lora_path": SECRET}, "lora_path"),
        ({"text": "a", "custom_logit_processor": SECRET}, "custom_logit_processor"),
        ({"text": "a", "token_ids_logprob": [3]}, "token_ids_logprob"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "a", "session_params": {"id": SECRET}}, "session_params"),
        ({"text": "a", "priority": 3}, "priority"),
        ({"text": "a", "model": 3}, "model"),
        (sampling(max_new_tokens=-1), "sampling_params.max_new_tokens"),
        (sampling(max_new_tokens="3"), "sampling_params.max_new_tokens"),
        (sampling(max_new_tokens=2, min_new_tokens=3), "sampling_params.min_new_tokens"),
        (sampling(min_new_tokens=129), "sampling_params.min_new_tokens"),
        (sampling(temperature=-0.1), "sampling_params.temperature"),
        (sampling(stop=[""]), "sampling_params.stop.0"),
        (sampling(no_stop_trim="x"), "sampling_params.no_stop_trim"),
        (sampling(logit_bias={"a": SECRET}), "sampling_params.logit_bias"),
        (sampling(n=129), "sampling_params.n"),
        (sampling(sampling_seed=2**63), "sampling_params.sampling_seed"),
        (sampling(regex=""), "sampling_params.regex"),
        (sampling(regex=SECRET, ebnf=SECRET), "sampling_params.ebnf"),
        (sampling(json_schema=SECRET), "sampling_params.json_schema"),
        ({"text": "a", "json_schema": {}}, "json_schema"),
        (sampling(stop_regex=SECRET), "sampling_params.stop_regex"),
        (sampling(custom_params={"a": SECRET}), "sampling_params.custom_params"),
        (sampling(spaces_between_special_tokens=False), "sampling_params.spaces_between_special_tokens"),
        (sampling(max_tokens=3), "sampling_params.max_tokens"),
        (sampling(seed=3), "sampling_params.seed"),
        (sampling(return_logprob=True), "sampling_params.return_logprob"),
        (
            {"text": "x" * 2_000_000, "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"n": 64}},
            "sampling_params.n",
        ),
        ({"text": "x", "sampling_params": {"n": 128, "ebnf": "x" * 65_536}}, "sampling_params.n"),
        ({"text": ["x"] * 600, "sampling_params": {"stop": ["x" * 1000] * 15}}, "text"),
        (sampling(stop="x" * 1025), "sampling_params.stop.0"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "ignore_eos": 1}, "ignore_eos"),
        ({"prompt": "a", "temperature": 0.5}, "temperature"),
        ({"prompt": "a", "stop": SECRET}, "stop"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "stream": False}, "stream"),
        ({"prompt": "a", "sampling_params": {}}, "sampling_params"),
        ({"prompt": "a", "max_new_tokens": 3}, "max_new_tokens"),
        ({"prompt": "a", "return_logprob": True}, "return_logprob"),
        ({"prompt": "a", "messages": [SECRET]}, "messages"),
        ({"prompt": "a", "rid": SECRET}, "rid"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_field_is_refused_with_its_name_and_without_its_value(body: dict[str, Any], param: str) -> None:
    error = refusal(parse_generate, body)
    assert (error.status, error.param) == (400, param) and error.code in ("invalid_value", "unsupported_parameter")
    assert param.split(".")[0] in error.message and SECRET not in error.message and len(error.message) < 200


def test_the_two_forms_are_told_apart_by_their_fields() -> None:
    def form(**body: Any) -> type:
        return type(parse_generate(json.dumps(body).encode()))

    assert form(prompt="a") is form(prompt="a", text=None, input_ids=None) is TextRequest
    assert form(text="a") is form(input_ids=[1]) is form(text="a", prompt=None) is SGLangRequest


@pytest.mark.parametrize(
    "extra",
    [
        {"rid": None, "lora_path": "", "image_data": None, "return_hidden_states": False, "session_params": {}},
        {
            "sampling_params": {
                "regex": None,
                "json_schema": None,
                "spaces_between_special_tokens": True,
                "stop_regex": [],
            }
        },
        {"logprob_start_len": -1, "top_logprobs_num": 0, "return_logprob": False, "token_ids_logprob": None},
    ],
)
def test_what_clients_of_sglang_send_along_without_a_meaning_is_let_through(extra: dict[str, Any]) -> None:
    assert parse_generate(json.dumps({"text": "a", **extra}).encode()).unknown == ()


def test_what_changes_nothing_in_mini_sglangs_form_is_let_through() -> None:
    neutral = {"stream": True, "temperature": 0, "n": 1, "return_logprob": False, "top_p": None}
    assert parse_generate(json.dumps({"prompt": "a", **neutral}).encode()).unknown == ()


def test_unknown_names_are_let_through_and_listed_sorted() -> None:
    body = {"text": "a", "zeta": 1, "log_metrics": True, "sampling_params": {"beta": 1}}
    assert parse_generate(json.dumps(body).encode()).unknown == ("log_metrics", "sampling_params.beta", "zeta")
    assert parse_generate(b'{"prompt": "a", "zeta": 1}').unknown == ("zeta",)


# what it submits


def test_mini_sglangs_form_asks_for_the_most_probable_answer_of_16_tokens_as_a_stream() -> None:
    (event,) = generations({"prompt": "a"})
    assert event.sampling == SamplingParams(temperature=0, max_tokens=16)
    assert (event.prompt, event.endpoint, event.presentation.stream) == ("a", "/generate", True)
    (event,) = generations({"prompt": "a", "max_tokens": 3, "ignore_eos": True})
    assert event.sampling == SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def test_sglangs_sampling_params_are_submitted_as_they_were_asked_for() -> None:
    (event,) = generations(
        sampling(
            max_new_tokens=9, min_new_tokens=2, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, stop="x",
            stop_token_ids=[1, 2], ignore_eos=True, skip_special_tokens=False, no_stop_trim=True, presence_penalty=1,
            frequency_penalty=-0.5, repetition_penalty=1.1, sampling_seed=-5, logit_bias={"7": -100}, typical_p=0.7,
        )
        | {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    )  # fmt: skip
    assert event.sampling == SamplingParams(
        max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.9, top_k=0, min_p=0.1, stop=("x",),
        stop_token_ids=(1, 2), ignore_eos=True, skip_special_tokens=False, include_stop_str_in_output=True,
        presence_penalty=1, frequency_penalty=-0.5, repetition_penalty=1.1, seed=-5, logit_bias=((7, -100),),
        typical_p=0.7,
        logprobs=2, prompt_logprobs=2,
    )  # fmt: skip


def test_what_sglang_does_without_a_word_is_the_default() -> None:
    (event,) = generations({"text": "a"})
    assert event.sampling == SamplingParams(max_tokens=128, seed=event.sampling.seed)
    assert event.presentation == Presentation(whole_text=True, continuous_usage=True)
    (other,) = generations({"text": "a"})
    assert other.sampling.seed != event.sampling.seed, "drawn anew for each"


@pytest.mark.parametrize(
    ("asked", "logprobs", "prompt_logprobs"),
    [
        ({}, None, None),
        ({"return_logprob": True}, 0, None),
        ({"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 3}, 3, None),
        ({"return_logprob": True, "logprob_start_len": 0}, 0, 0),
        ({"return_logprob": True, "logprob_start_len": 7, "top_logprobs_num": 3}, 3, 3),
    ],
)
def test_only_the_scores_that_are_told_are_computed(
    asked: dict[str, Any], logprobs: int | None, prompt_logprobs: int | None
) -> None:
    (event,) = generations({"text": "a", **asked})
    assert (event.sampling.logprobs, event.sampling.prompt_logprobs) == (logprobs, prompt_logprobs)


@pytest.mark.parametrize(
    ("body", "prompts", "in_list"),
    [
        ({"text": "a"}, ["a"], False),
        ({"text": ["a"]}, ["a"], True),
        ({"text": ["a", "b"]}, ["a", "b"], True),
        ({"input_ids": [5, 0]}, [[5, 0]], False),
        ({"input_ids": [[5, 0]]}, [[5, 0]], True),
        ({"input_ids": [[5, 0], [7]]}, [[5, 0], [7]], True),
        (sampling(n=2), ["a", "a"], True),
        ({"text": ["a", "b"], "sampling_params": {"n": 2}}, ["a", "a", "b", "b"], True),
    ],
)
def test_each_choice_of_each_prompt_is_a_sibling(body: dict[str, Any], prompts: list[object], in_list: bool) -> None:
    events = generations(body)
    assert [event.prompt or list(event.prompt_ids) for event in events] == prompts
    assert {(event.siblings, event.presentation.in_list) for event in events} == {(len(prompts), in_list)}


def test_no_token_at_all_leaves_what_is_told_of_the_prompt() -> None:
    (event,) = generations(sampling(max_new_tokens=0) | {"return_logprob": True, "logprob_start_len": 3})
    assert (event.sampling.max_tokens, event.sampling.min_tokens) == (1, 0)
    assert (event.presentation.prompt_only, event.presentation.scores_from) == (True, 3)


# how it answers: SGLang's form


def finished(reason: FinishReason = "length", n: int = 2, stop_string: str = "") -> Finished:
    usage = Usage(prompt_tokens=4, completion_tokens=n, cached_tokens=1)
    timings = Timings(admitted_ms=1, first_token_ms=2, total_ms=1250)
    return Finished(n=n, reason=reason, stop_string=stop_string, usage=usage, timings=timings)


def tokens(n: int, text: str, index: int = 0, **more: Any) -> ClientEvent:
    return ClientEvent(f"{n}-0", n, TokensProduced(count=1, tokens=(100 + n,), text=text, step="1-1", **more), index)


def score(token: int, text: str, logprob: float, *top: tuple[int, str, float]) -> Logprob:
    others = tuple(TopLogprob(token=other, text=word, logprob=less) for other, word, less in top)
    return Logprob(token=token, text=text, logprob=logprob, top=others)


PROMPT = PromptInfo(
    num_tokens=4,
    cached_tokens=1,
    first=TokenText(token=1, text="A"),
    scores=Logprobs(
        (
            score(2, "b", -2.0, (9, "x", -0.5)),
            score(3, "bytes:\\xe4\\xbd", -3.0, (9, "x", -0.25)),
            score(4, "d", -4.0, (4, "d", -4.0)),
        )
    ),
)
ANSWER = (
    tokens(1, "Hel", prompt=PROMPT, scores=(score(101, "Hel", -0.5, (101, "Hel", -0.5)),)),
    tokens(2, "lo", scores=(score(102, "lo", -1.5, (8, "p", -0.5)),)),
)


def whole(body: dict[str, Any], *given: ClientEvent) -> Any:
    """Return the body of an answer after *given*."""
    return json.loads(answered(generations(body), given))


def streamed(
    body: dict[str, Any],
    *given: ClientEvent,
    uid: str = UID,
    events: list[Submitted] | None = None,
    ids: bool = False,
) -> bytes:
    return b"".join(map(frames_of(generations(body) if events is None else events, uid, ids=ids).of, given))


def documents(stream: bytes) -> list[Any]:
    """Return the JSON of each line, as SGLang's own clients read them: what is not blank is data."""
    lines = [line for line in stream.decode().splitlines() if line.strip()]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_whole_answer_is_sglangs() -> None:
    assert whole({"text": "a"}, *ANSWER, ended(finished())) == {
        "text": "Hello",
        "output_ids": [101, 102],
        "meta_info": {
            "id": UID,
            "finish_reason": {"type": "length", "length": 2},
            "prompt_tokens": 4,
            "completion_tokens": 2,
            "cached_tokens": 1,
            "e2e_latency": 1.25,
        },
    }


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (finished("length"), {"type": "length", "length": 2}),
        (finished("stop"), {"type": "stop", "matched": 102}),
        (finished("stop", stop_string="102"), {"type": "stop", "matched": "102"}),
    ],
)
def test_the_finish_reason_says_what_was_met(end: Finished, reason: dict[str, Any]) -> None:
    assert whole({"text": "a"}, *ANSWER, ended(end))["meta_info"]["finish_reason"] == reason


def test_several_answers_are_a_list_in_the_order_of_prompts_and_choices() -> None:
    body = {"text": ["a", "b"], "sampling_params": {"n": 2}}
    given = [each for i in range(4) for each in (tokens(1, "wxyz"[i], i), ended(finished(n=1), i))]
    told = whole(body, *reversed(given))
    assert [answer["text"] for answer in told] == ["w", "x", "y", "z"]
    assert [answer["meta_info"]["id"] for answer in told] == list(sibling_uids(UID, 4))
    assert {answer["meta_info"]["prompt_tokens"] for answer in told} == {4}


def test_a_list_of_one_is_answered_by_a_list_of_one() -> None:
    for body in ({"text": ["a"]}, {"input_ids": [[1, 2]]}):
        (answer,) = whole(body, *ANSWER, ended(finished()))
        assert (answer["text"], answer["meta_info"]["id"]) == ("Hello", UID)
        assert {frame["index"] for frame in documents(streamed({**body, "stream": True}, *ANSWER))} == {0}


LOGPROBS: dict[str, Any] = {"text": "a", "return_logprob": True}


def test_logprobs_are_value_token_and_null_and_of_the_answer_alone() -> None:
    first = tokens(1, "x", scores=(score(101, "x", -0.5),), prompt=PromptInfo(num_tokens=4))
    meta = whole(LOGPROBS, first, ANSWER[1], ended(finished()))["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 101, None], [-1.5, 102, None]]
    assert meta["input_token_logprobs"] == []
    assert not {"output_top_logprobs", "input_top_logprobs"} & set(meta)


@pytest.mark.parametrize("start", [0, 1, 3, 4, 9])
def test_logprobs_of_the_prompt_begin_where_they_are_asked_for_with_one_that_has_none(start: int) -> None:
    body = {**LOGPROBS, "logprob_start_len": start, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    meta = whole(body, *ANSWER, ended(finished()))["meta_info"]
    every = [[-1.0, 1, "A"], [-2.0, 2, "b"], [-3.0, 3, "\ufffd"], [-4.0, 4, "d"]][start:]
    tops = [None, [[-0.5, 9, "x"]], [[-0.25, 9, "x"]], [[-4.0, 4, "d"]]][start:]
    assert meta["input_token_logprobs"] == [[None, *one[1:]] for one in every[:1]] + every[1:]
    assert meta["input_top_logprobs"] == [None] * len(every[:1]) + tops[1:]
    assert meta["output_token_logprobs"] == [[-0.5, 101, "Hel"], [-1.5, 102, "lo"]]
    assert meta["output_top_logprobs"] == [[[-0.5, 101, "Hel"]], [[-0.5, 8, "p"]]]


def test_who_asks_for_no_token_is_told_of_the_prompt_alone() -> None:
    body = {**LOGPROBS, "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 0}
    given = (ANSWER[0], ended(finished("stop", n=1)))
    (frame,) = documents(streamed({**body, "stream": True}, *given))
    answer = whole(body, *given)
    assert frame == answer and (answer["text"], answer["output_ids"]) == ("", [])
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert answer["meta_info"]["completion_tokens"] == 0
    assert len(answer["meta_info"]["input_token_logprobs"]) == 4
    assert answer["meta_info"]["output_token_logprobs"] == []


def test_every_frame_of_a_stream_has_all_so_far_and_the_last_one_is_the_whole_answer() -> None:
    body = {**LOGPROBS, "logprob_start_len": 2, "top_logprobs_num": 1}
    first, second, last = documents(streamed({**body, "stream": True}, *ANSWER, ended(finished())))
    assert (first["text"], first["output_ids"]) == ("Hel", [101])
    meta = first["meta_info"]
    assert (meta["id"], meta["finish_reason"], meta["prompt_tokens"], meta["cached_tokens"]) == (UID, None, 4, 1)
    assert (meta["completion_tokens"], "e2e_latency" in meta) == (1, False)
    assert meta["output_token_logprobs"] == [[-0.5, 101, None]]
    assert (second["text"], second["meta_info"]["completion_tokens"]) == ("Hello", 2)
    assert last == whole(body, *ANSWER, ended(finished()))
    assert {key: second["meta_info"][key] for key in meta if key.startswith("input")} == {
        key: last["meta_info"][key] for key in meta if key.startswith("input")
    }


def test_frames_have_no_ids_and_no_comments_for_sglangs_clients_take_every_line_for_json() -> None:
    frames = frames_of(generations({"text": "a", "stream": True}), ids=False)
    stream = frames.of(ANSWER[0]) + KEEP_ALIVE + frames.of(ended(finished(n=1)))
    assert [document["text"] for document in documents(stream)] == ["Hel", "Hel"]
    assert [json.loads(frame.data)["text"] for frame in frames_in(stream)] == ["Hel", "Hel"], "a browser reads the same"


@pytest.mark.parametrize("text", ["a\u2028b", "a\u0085b\n\r\n", "\x00\x1e"])
def test_no_text_can_break_a_whole_text_frame(text: str) -> None:
    (frame, _) = documents(streamed({"text": "a"}, tokens(1, text), ended(finished(n=1))))
    assert frame["text"] == text


def test_the_stream_of_several_says_whose_each_frame_is() -> None:
    body = {"text": ["a", "b"], "stream": True}
    order = [tokens(1, "b", 1), tokens(1, "a", 0), ended(finished(n=1), 0), tokens(2, "c", 1), ended(finished(), 1)]
    told = [(frame["index"], frame["text"], frame["meta_info"]["id"]) for frame in documents(streamed(body, *order))]
    first, second = sibling_uids(UID, 2)
    assert told == [(1, "b", second), (0, "a", first), (0, "a", first), (1, "bc", second), (1, "bc", second)]
    assert "index" not in documents(streamed({"text": "a"}, ANSWER[0]))[0]


def test_one_of_several_is_read_by_its_own_uid_with_the_frames_that_it_had_among_them() -> None:
    events = generations({"text": ["a", "b"], "stream": True})
    given = [tokens(1, "b", 1), ended(finished(n=1), 1)]
    alone = [ClientEvent(each.entry_id, each.n, each.event) for each in given]
    assert streamed({}, *alone, uid=f"{UID}.1", events=events[1:]) == streamed({}, *given, events=events)


def test_an_end_that_is_no_success_is_the_error_of_every_endpoint() -> None:
    failed = Failed(status=503, code="shutting_down", message="Come again.")
    (_, last) = documents(streamed({"text": "a"}, ANSWER[0], ended(failed)))
    assert last["error"]["code"] == "shutting_down" and set(last["error"]) == {"message", "type", "param", "code"}


def test_what_is_not_for_clients_makes_no_frame() -> None:
    admitted = ClientEvent("0-3", 0, Admitted(engine="generate-0", epoch=1, step=1, fingerprint="f"))
    assert streamed({"text": "a"}, admitted) == streamed({"prompt": "a"}, admitted) == b""


# how it answers: Mini-SGLang's form


def texts(stream: bytes) -> str:
    """Return what a page hears of a stream of text."""
    return "".join(frame.data for frame in frames_in(stream) if not frame.kind)


@pytest.mark.parametrize(
    "text", ["a\nb", "\n", "\n\n\na", " a ", "a:b\ndata: c\nid: 7\nevent: error", "é漢🙂", "\u2028", ""]
)
def test_a_text_arrives_as_it_is_whatever_lines_it_has(text: str) -> None:
    stream = streamed({"prompt": "a"}, tokens(1, text), tokens(2, "."), ended(finished()), ids=True)
    assert texts(stream) == text + "."
    assert [frame.id for frame in frames_in(stream)] == (["1-0"] if text else []) + ["2-0"]


@given(st.lists(st.text(alphabet="ab\r\n []DONE", max_size=8), max_size=8))
def test_line_breaks_arrive_as_newlines_and_nothing_is_taken_for_the_end(parts: list[str]) -> None:
    given = [tokens(n, part) for n, part in enumerate([*parts, "[DONE]"], 1)]
    stream = streamed({"prompt": "a"}, *given, ended(finished()))
    expected = "".join([*parts, "[DONE]"]).replace("\r\n", "\n").replace("\r", "\n")
    assert texts(stream) == expected
    assert "[DONE]" not in [frame.data for frame in frames_in(stream)]


def test_a_text_without_tokens_to_show_makes_no_event() -> None:
    assert streamed({"prompt": "a"}, tokens(1, ""), ended(finished())) == b""


def test_an_error_is_an_event_of_its_own_that_no_text_can_be() -> None:
    failed = Failed(status=500, code="engine_error", message="It broke.")
    *_, error = frames_in(streamed({"prompt": "a"}, tokens(1, "x"), ended(failed), ids=True))
    assert (error.kind, error.id, json.loads(error.data)["error"]["code"]) == ("error", SEAL, "engine_error")
