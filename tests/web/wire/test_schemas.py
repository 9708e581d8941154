"""Bodies of chat requests: what is refused and how, what is neutral, what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.wire import HELLO, MADE, chats, completions, refusal

from pipeline.events import SamplingParams
from web.wire.openai.schemas import parse_chat, parse_completion
from web.wire.sglang.schemas import parse_generate
from web.wire.submit import chat_events, seed_of

SECRET = "a-word-that-must-not-come-back"


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": HELLO, **fields}).encode()


BAD_VALUES: dict[str, list[Any]] = {
    "messages": [None, [], "hello"],
    "messages.0": [[SECRET]],
    "messages.0.role": [[{"content": "x"}], [{"role": SECRET, "content": "x"}]],
    "messages.1.role": [[*HELLO, {"role": "function", "content": "x", "name": "f"}]],
    "messages.0.content": [
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [SECRET]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": SECRET}]}],
    ],
    "messages.0.tool_calls.0.function": [[{"role": "assistant", "tool_calls": [{"id": SECRET}]}]],
    "messages.0.audio": [[{"role": "assistant", "audio": SECRET}]],
    "prompt": ["and messages"],
    "model": [3],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}],
    "max_tokens": [0, -2, 5.5, 1e300, "3", 3.5, True, 2**63],
    "n": [True, 0, 129, 1.5, "1"],
    "max_completion_tokens": [0],
    "min_tokens": [-1],
    "temperature": [2.01, -0.1, "1", True, float("nan"), float("inf")],
    "top_p": [-0.1, 1.5, float("nan")],
    "top_k": [-2, 1.5],
    "min_p": [1.1],
    "seed": [2**63, -(2**63) - 1, "7"],
    "stop.1": [["a", ""], ["a", "é" * 1025]],
    "stop": [["a"] * 129, ["a" * 1024] * 65, 3],
    "stop.0": ["a" * 1025],
    "stop_token_ids.0": [["3"], [-1]],
    "ignore_eos": ["true"],
    "logprobs": [3],
    "prompt_logprobs": [-1],
    "bad_words.0": [[""]],
    "bad_words": [SECRET],
    "truncate_prompt_tokens": [0, -2],
    "priority": [0.5],
    "chat_template_kwargs": [[SECRET]],
    "echo": [True],
    "best_of": [2],
    "suffix": [SECRET],
    "top_logprobs": [3],
    "logit_bias": [
        {"a": SECRET},
        {"-1": 5},
        {"1.0": 5},
        {"07": 5},
        {"9999999999": 5},
        {"7": 100.5},
        {"7": "5"},
        {str(token): 1 for token in range(1025)},
        [7],
    ],
    "allowed_token_ids": [[], 3],
    "allowed_token_ids.0": [[-1]],
    "presence_penalty": [2.5, -2.5],
    "frequency_penalty": [False, 3],
    "repetition_penalty": [0, 2.1, float("nan")],
    "response_format.type": [{"type": SECRET}],
    "response_format.json_schema": [{"type": "json_schema"}, {"type": "json_object", "json_schema": {"schema": {}}}],
    "response_format.json_schema.schema": [{"type": "json_schema", "json_schema": {"name": "a"}}],
    "response_format.schema": [{"type": "text", "schema": {}}],
    "response_format.value": [
        {"type": "json"},
        {"type": "text", "value": {}},
        {"type": "json_object", "value": {}, "schema": {}},
    ],
    "tools.0.function.name": [[{"type": "function", "function": {"name": f"{SECRET} {SECRET}"}}]],
    "tool_choice": [SECRET],
    "functions": [[{"name": SECRET}]],
    "structured_outputs": [{}, {"json_object": False}],
    "structured_outputs.choice": [{"regex": SECRET, "choice": [SECRET]}],
    "structured_outputs.structural_tag": [{"structural_tag": SECRET}],
    "structured_outputs.whitespace_pattern": [{"regex": SECRET, "whitespace_pattern": SECRET}],
    "guided_json": [SECRET, "[" * 300, json.dumps([0] * 60_000), {"const": float("nan")}],
    "guided_regex": [""],
    "guided_choice": [[]],
    "guided_choice.1": [[SECRET, ""]],
    "guided_whitespace_pattern": [SECRET],
    "ebnf": [SECRET * 10_000],
    "n_predict": [0, -2],
    "typical_p": [0],
    "truncation_side": [SECRET],
    "logprob_token_ids": [[3]],
    "skip_special_tokens": ["false"],
    "user": [3],
    "store": ["yes"],
    "metadata": [{"a": [SECRET]}, {"a": 10**30}, {"a": 2**63}, {"a": -(2**63) - 1}],
}
"""Of each field, or what is in it, values that it does not take."""
BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": None, "prompt": ""}, "prompt"),
    ({"messages": None, "prompt": ["a", "b"]}, "prompt"),
    ({"stream": True, "stream_options": {"include_usage": "true"}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"response_format": {"type": "json_object"}, "regex": SECRET}, "regex"),
    ({"json_schema": {}, "grammar": SECRET}, "grammar"),
    ({"n_predict": 3, "max_tokens": 4}, "n_predict"),
    ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
    ({"logprobs": True, "logprob_token_ids": [3] * 21}, "logprob_token_ids"),
    *(({param.split(".")[0]: value}, param) for param, values in BAD_VALUES.items() for value in values),
]


@pytest.mark.parametrize("param", dict.fromkeys(param for _, param in BAD))
def test_a_bad_field_is_refused_with_its_name_and_without_its_value(param: str) -> None:
    for fields in (fields for fields, name in BAD if name == param):
        error = refusal(parse_chat, body(**fields))
        assert (error.status, error.param) == (400, param) and error.code in ("invalid_value", "unsupported_parameter")
        assert param.split(".")[0] in error.message and SECRET not in error.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metadata": {"team": "red", "color": ["x"]}}, 'metadata at "color": Input should be a text, a number'),
        (
            {"metadata": {'say "a"': 2**63}},
            'metadata at "say \\"a\\"": Input should be a whole number of at most 64 bits',
        ),
        ({"metadata": {"k" * 1000: {}}}, f'metadata at "{"k" * 64}": '),
        ({"logit_bias": {"7": 1, "x": 2}}, 'logit_bias at "x": the key is not a token id; expected a whole number'),
        ({"logit_bias": {"7": 1, "8": 200}}, 'logit_bias at "8": Input should be less than or equal to 100'),
    ],
)
def test_an_error_in_an_object_of_the_clients_own_keys_quotes_the_key(fields: dict[str, Any], message: str) -> None:
    error = refusal(parse_chat, body(**fields))
    assert error.message.startswith(message) and error.param == next(iter(fields)), "the log has the name alone"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 40_000,
        b"[]",
        b"3",
        b'"a"',
    ],
    ids=["empty", "broken", "not utf-8", "lone surrogate", "too deep", "a list", "a number", "a string"],
)
@pytest.mark.parametrize("parse", [parse_chat, parse_generate])
def test_a_body_that_is_no_json_object_is_refused(parse: Callable[[bytes], object], raw: bytes) -> None:
    error = refusal(parse, raw)
    assert (error.status, error.param, error.code) == (400, None, "invalid_json")


def test_only_the_first_thing_that_is_wrong_is_said() -> None:
    error = refusal(parse_chat, body(messages=[{"role": "x"}] * 10_000))
    assert error.param == "messages.0.role" and len(error.message) < 200


def test_neutral_numbers_are_compared_as_json_numbers() -> None:
    assert parse_chat(body(best_of=1.0, stream_interval=1, echo=False)).unknown == ()


def test_a_whole_number_is_fine_where_a_float_is_expected() -> None:
    assert parse_chat(body(temperature=1, top_p=1)).temperature == 1.0


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ({"max_tokens": 5.0, "n": 2.0, "seed": 7.0}, {"max_tokens": 5, "n": 2, "seed": 7}),
        ({"top_logprobs": 2.0, "logprobs": True}, {"top_logprobs": 2, "logprobs": True}),
        ({"max_tokens": -1}, {}),
        ({"max_completion_tokens": -1}, {}),
        ({"stop": ""}, {}),
        ({"seed": 3, "top_p": 0}, {"seed": 3, "temperature": 0}),
        ({"seed": 3, "top_p": 0.0, "temperature": 1.5}, {"seed": 3, "temperature": 0}),
    ],
)
def test_what_can_mean_only_one_thing_means_that(said: dict[str, Any], means: dict[str, Any]) -> None:
    seed = {} if "seed" in said else {"seed": 1}
    first, second = (chats(**fields, **seed) for fields in (said, means))
    assert [event.sampling for event in first] == [event.sampling for event in second]


@pytest.mark.parametrize("kind", ["json", "json_object"])
def test_a_schema_as_in_tgi_is_one_as_in_openai(kind: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    first, second = (chats(response_format=asked)[0].constraint for asked in ({"type": kind, "value": schema}, named))
    assert first is not None and second is not None
    assert (first.kind, first.text, first.param) == (second.kind, second.text, "response_format.value")


def test_most_stop_strings_have_the_most_characters() -> None:
    stops = [f"{number:0512}" for number in range(128)]
    assert chats(stop=stops)[0].sampling.stop == tuple(stops)


def test_to_a_completion_minus_one_is_the_rest_of_the_context_and_nothing_is_sixteen() -> None:
    longest = [
        parse_completion(json.dumps({"prompt": "a", **fields}).encode()).longest
        for fields in ({"max_tokens": -1}, {"n_predict": -1}, {})
    ]
    assert longest == [None, None, 16]


def test_a_field_without_a_name_is_as_unknown_as_any_other() -> None:
    asked = parse_chat(body(**{"": {}}))
    assert (asked.longest, asked.unknown) == (None, ("",))


def test_unknown_names_are_let_through_and_listed_sorted() -> None:
    message = {"role": "user", "content": "x", "weight": 1}
    asked = parse_chat(body(zeta=1, alpha={"deep": [1]}, messages=[message], stream=True, stream_options={"beta": 1}))
    assert asked.unknown == ("alpha", "messages.weight", "stream_options.beta", "zeta")


def test_labels_are_kept_and_change_nothing() -> None:
    labels = {
        "user": "u",
        "metadata": {"a": "b", "most": 2**63 - 1, "least": -(2**63), "half": 0.5, "yes": True, "none": None},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    (event,) = chats(**labels)
    assert event.labels == labels


@pytest.mark.parametrize("name", ["user", "service_tier", "safety_identifier", "prompt_cache_key", "metadata"])
def test_labels_have_no_more_than_64_kb_together_in_utf8(name: str) -> None:
    def labels(size: int) -> dict[str, Any]:
        text = "é" * (size // 2)
        return {name: {"a": text} if name == "metadata" else text, "store": True}

    assert parse_chat(body(**labels(65_000))).labels == labels(65_000)
    for parse in (parse_chat, lambda raw: parse_completion(raw.replace(b'"messages"', b'"prompt":"x","m"'))):
        error = refusal(parse, body(**labels(4_000_000)))
        assert (error.status, error.param, error.code) == (400, name, "invalid_value")
        assert "`prompt_cache_key`) have 4000" in error.message and "at most 65536;" in error.message
    many = {"user": "u" * 40_000, "metadata": {str(i): "m" * 40 for i in range(700)}}
    assert refusal(parse_chat, body(**many)).param == "user"


def test_sampling_is_submitted_as_it_was_asked_for() -> None:
    sampling = chats(
        temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=-5, stop="x", stop_token_ids=[1, 2], ignore_eos=True,
        max_tokens=9, max_completion_tokens=7, min_tokens=2, presence_penalty=1, frequency_penalty=-0.5,
        repetition_penalty=1.1, logit_bias={"7": -100, "0": 2.5}, allowed_token_ids=[3, 7],
        bad_words=["no"], logprobs=True, top_logprobs=2, prompt_logprobs=0, include_stop_str_in_output=True,
        skip_special_tokens=False, typical_p=0.9, logprob_token_ids=[4],
    )[0].sampling  # fmt: skip
    assert sampling == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=0, min_p=0.1, seed=-5, stop=("x",), stop_token_ids=(1, 2), ignore_eos=True,
        max_tokens=7, min_tokens=2, presence_penalty=1.0, frequency_penalty=-0.5, repetition_penalty=1.1,
        logit_bias=((7, -100.0), (0, 2.5)), allowed_token_ids=(3, 7), bad_words=("no",), logprobs=2, prompt_logprobs=0,
        include_stop_str_in_output=True, skip_special_tokens=False, typical_p=0.9, logprob_token_ids=(4,),
    )  # fmt: skip


def test_names_of_llama_cpp_and_ollama_mean_the_same() -> None:
    (event,) = chats(n_predict=9, repeat_penalty=1.1)
    assert (event.sampling.max_tokens, event.sampling.repetition_penalty) == (9, 1.1)
    (event,) = chats(n_predict=9, max_tokens=9, repeat_penalty=1)
    assert (event.sampling.max_tokens, event.sampling.repetition_penalty) == (9, 1)
    for events in (chats(n_predict=-1), completions({"prompt": "a", "n_predict": -1})):
        assert events[0].sampling.max_tokens is None, "as many as fit"


def test_a_request_says_which_field_limits_its_answer() -> None:
    def limit(**fields: Any) -> str:
        return chats(**fields)[0].limit

    assert limit() == limit(n_predict=-1) == ""
    assert (limit(n_predict=5), limit(max_tokens=5)) == ("n_predict", "max_tokens")
    assert limit(max_tokens=7, max_completion_tokens=5) == "max_completion_tokens"
    for asked in ({}, {"max_tokens": 0, "echo": True}):
        assert completions({"prompt": "a", **asked})[0].limit == "", "nobody asked for 16"


def test_the_client_wins_over_the_model_and_the_model_over_openai() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    for fields, expected in (
        ({}, (0.6, 20, 1.0)),
        ({"temperature": None, "top_k": None, "top_p": None}, (0.6, 20, 1.0)),
        ({"temperature": 0}, (0.0, 20, 1.0)),
        ({"temperature": 1, "top_k": -1}, (1.0, 0, 1.0)),
        ({"top_k": 0, "top_p": 0.5}, (0.6, 0, 0.5)),
    ):
        sampling = chat_events(parse_chat(body(**fields)), **(MADE | {"defaults": defaults}))[0].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == expected
    assert defaults == {"temperature": 0.6, "top_k": 20}


@pytest.mark.parametrize("fields", [{}, {"seed": None}, {"seed": -1}, {"seed": -1.0}])
def test_without_a_seed_or_with_minus_one_it_is_drawn_anew_for_each_request(fields: dict[str, Any]) -> None:
    asked = parse_chat(body(**fields))
    first, second = (chat_events(asked, **MADE)[0].sampling.seed for _ in range(2))
    assert first != second and min(first, second) >= 0


def test_a_prompt_goes_to_the_model_without_a_template() -> None:
    (event,) = chats(messages=None, prompt="Once")
    assert (event.prompt, event.messages, event.sampling.max_tokens) == ("Once", (), None)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([5, 0], [[5, 0]]),
        ([[5, 0], [7]], [[5, 0], [7]]),
    ],
)
def test_a_completions_prompt_has_four_shapes(prompt: object, prompts: list[object]) -> None:
    request = parse_completion(json.dumps({"prompt": prompt}).encode())
    assert request.prompts == prompts
    events = completions({"prompt": prompt})
    assert [event.prompt or list(event.prompt_ids) for event in events] == prompts
    assert {event.sampling.max_tokens for event in events} == {16}, "OpenAI's default of this endpoint"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt.0"),
        ({"prompt": ["a", ""]}, "prompt.1"),
        ({"prompt": ["a", 3]}, "prompt.1"),
        ({"prompt": [3, "a"]}, "prompt.1"),
        ({"prompt": [3, True]}, "prompt.1"),
        ({"prompt": [-1]}, "prompt.0"),
        ({"prompt": [[3], 3]}, "prompt.1"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * 257, "n": 4}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2, "echo": True}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"suffix": SECRET}, "suffix"),
        ({"messages": [SECRET]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 2}, "max_completion_tokens"),
    ],
)
def test_a_bad_field_of_a_completion_is_refused_with_its_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(parse_completion, {"prompt": "a", **fields})
    assert (error.status, error.param) == (400, param) and SECRET not in error.message
    assert refusal(parse_completion, {}).param == "prompt"


def test_choices_are_submitted_together_each_with_a_seed_of_its_own_and_the_first_with_the_clients() -> None:
    events = completions({"prompt": ["a", "b"], "n": 3, "seed": 5})
    assert [event.prompt for event in events] == ["a"] * 3 + ["b"] * 3
    seeds = [event.sampling.seed for event in events]
    assert seeds[0] == 5 and seeds[:3] == seeds[3:] and len(set(seeds)) == 3, "a prompt's answers are its own"
    assert {(event.siblings, event.presentation.choices) for event in events} == {(6, 3)}


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_the_seed_of_a_choice_is_a_function_of_the_clients(seed: int) -> None:
    assert seed_of(seed, 0) == seed
    assert seed_of(seed, 1) == seed_of(seed, 1) != seed_of(seed, 2)
    assert all(-(2**63) <= seed_of(seed, choice) < 2**63 for choice in range(50))


def test_no_token_at_all_is_asked_for_with_echo() -> None:
    (event,) = completions({"prompt": "a", "max_tokens": 0, "echo": True, "logprobs": 1})
    assert (event.sampling.max_tokens, event.presentation.prompt_only, event.presentation.echo) == (1, True, True)
    assert (event.sampling.logprobs, event.sampling.prompt_logprobs) == (1, 1)


def test_a_large_prompt_has_many_answers_but_few_that_repeat_it() -> None:
    large = {"messages": [{"role": "user", "content": "x" * 2_000_000}], "n": 128}
    assert parse_chat(body(**large)).num_choices == 128
    for repeats in ({"return_token_ids": True}, {"prompt_logprobs": 0}):
        error = refusal(parse_chat, body(**large, **repeats))
        assert error.param == "n" and "at most 4" in error.message
    prompts = {"prompt": ["x" * 1_000_000, "y" * 1_000_000], "echo": True}
    assert len(parse_completion(json.dumps(prompts).encode()).prompts) == 2
    error = refusal(parse_completion, {**prompts, "n": 5})
    assert error.param == "n" and "at most 4" in error.message


def test_a_conversation_that_goes_on_with_its_last_message_opens_no_new_one() -> None:
    def templating(**fields: Any) -> tuple[bool, bool]:
        (event,) = chats(**fields)
        return event.templating.add_generation_prompt, event.templating.continue_final_message

    assert templating() == (True, False)
    assert templating(continue_final_message=True) == (False, True)
    assert templating(add_generation_prompt=False) == (False, False)
    assert templating(add_generation_prompt=False, continue_final_message=True) == (False, True)
