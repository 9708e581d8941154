"""POST /tokenize, POST /detokenize and GET /tokenizer_info, with stand-in stages behind a real Redis."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from quart import Response
from structlog.testing import capture_logs
from support.redis_servers import command
from support.stand_in_stages import CONTEXT, MODELS, StandIn
from support.web_site import Site, chat, error_of, one_request, request_lines, site, until

from pipeline.events import Answered, Cancelled, Submitted, Templating
from pipeline.names import SEAL, Names
from web.wire.openai.tokenizer import MOST_TOKENS, parse_detokenize, parse_tokenize

SECRET = "a-word-that-must-not-come-back"
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look"}}
KEY = {"Idempotency-Key": "a-key"}


async def json_of(response: Response) -> Any:
    assert response.status_code == 200 and response.content_type == "application/json"
    return await response.get_json()


async def post(here: Site, path: str, body: Any, **options: Any) -> Response:
    return await here.client.post(path, json=body, **options)


# the bodies


BAD_TOKENIZE: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": "a", "messages": HELLO}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [1, 2]}, "prompt.0"),
    ({"prompt": ["a", None]}, "prompt.1"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a", "b"], "messages": HELLO}, "prompt"),
    ({"prompt": "a", "content": SECRET}, "content"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": SECRET}]}]}, "messages.0.tool_calls.0.function"),
    ({"messages": HELLO, "chat_template": SECRET}, "chat_template"),
    ({"messages": HELLO, "chat_template_kwargs": {SECRET: [2**63]}}, "chat_template_kwargs"),
    ({"messages": HELLO, "add_generation_prompt": "yes"}, "add_generation_prompt"),
    ({"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
    ({"prompt": "a", "tools": [TOOL]}, "tools"),
    ({"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ({"prompt": "a", "reasoning_effort": "low"}, "reasoning_effort"),
    ({"messages": HELLO, "reasoning_effort": SECRET}, "reasoning_effort"),
    ({"messages": HELLO, "enable_thinking": 1}, "enable_thinking"),
    ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ({"prompt": "a", "return_token_strs": "true"}, "return_token_strs"),
    ({"prompt": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ({"prompt": "a", "model": 3}, "model"),
]
BAD_DETOKENIZE: list[tuple[dict[str, Any], str]] = [
    ({}, "tokens"),
    ({"tokens": "ab"}, "tokens"),
    ({"tokens": [[1, 2], 3]}, "tokens.1"),
    ({"tokens": [[1, 2], [-1]]}, "tokens.1.0"),
    ({"tokens": [1, -1]}, "tokens.1"),
    ({"tokens": [1, 2**31]}, "tokens.1"),
    ({"tokens": [True]}, "tokens.0"),
    ({"tokens": [1], "skip_special_tokens": 0}, "skip_special_tokens"),
]
BAD = [("/tokenize", *row) for row in BAD_TOKENIZE] + [("/detokenize", *row) for row in BAD_DETOKENIZE]


async def test_a_bad_field_is_refused_by_its_name_and_goes_nowhere(here: Site, stand_in: StandIn) -> None:
    for path, fields, param in BAD:
        data = json.dumps(fields).encode()  # which has NaN, as some clients do
        status, error = await error_of(here.client.post(path, data=data))
        assert (status, error["param"]) == (400, param)
        assert SECRET not in error["message"], error
    assert stand_in.requests() == []


def test_a_list_of_more_tokens_than_any_text_has_is_refused() -> None:
    tokens = b'{"tokens":[' + b"1," * MOST_TOKENS + b"%s]}"
    with pytest.raises(Exception, match="tokens"):
        parse_detokenize(tokens % b"1")
    assert len(parse_detokenize(tokens.replace(b"1,", b"", 1) % b"1").tokens) == MOST_TOKENS


def test_a_conversation_is_submitted_with_all_that_its_template_is_given() -> None:
    body = {
        "messages": [{"role": "developer", "content": "d"}, {"role": "assistant", "content": "So"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "add_special_tokens": True,
        "chat_template_kwargs": {"style": "brief"},
        "reasoning_effort": "none",
        "tools": [TOOL],
        "return_token_strs": True,
    }
    (event,) = parse_tokenize(json.dumps(body).encode()).submitted(frontend="web-0", model="m")
    assert event == Submitted(
        endpoint="/tokenize",
        frontend="web-0",
        model="m",
        task="tokenize",
        messages=({"role": "system", "content": "d"}, {"role": "assistant", "content": "So"}),
        add_special_tokens=True,
        templating=Templating(
            add_generation_prompt=False,
            continue_final_message=True,
            tools=(TOOL,),
            variables={"enable_thinking": False, "reasoning_effort": "none", "style": "brief"},
        ),
        return_pieces=True,
        sampling=event.sampling,
    )


# the answers


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_a_text_and_a_conversation_are_answered_with_their_tokens(
    here: Site, stand_in: StandIn, prefix: str
) -> None:
    for body in ({"prompt": "ab"}, {"messages": [{"role": "user", "content": "ab"}]}):
        response = await post(here, f"{prefix}/tokenize", body | {"model": "demo"})
        told = {"count": 2, "max_model_len": CONTEXT, "tokens": [97, 98], "token_strs": None}
        assert await json_of(response) == told
        uid, event = stand_in.requests()[-1]
        assert (response.headers["x-minisgl-uid"], event.model, event.endpoint) == (uid, "demo", "/tokenize")
    answer = await json_of(await post(here, f"{prefix}/tokenize", {"prompt": "ab", "return_token_strs": True}))
    assert answer["token_strs"] == ["a", "b"]
    empty = await json_of(await post(here, f"{prefix}/tokenize", {"prompt": ""}))
    assert (empty["count"], empty["tokens"]) == (0, [])
    answer = await json_of(await post(here, f"{prefix}/detokenize", {"tokens": [104, 105]}))
    assert answer == {"prompt": "hi", "text": "hi"}
    assert (await json_of(await post(here, f"{prefix}/detokenize", {"tokens": []})))["prompt"] == ""


async def test_several_texts_are_answered_with_lists_in_their_order(here: Site, stand_in: StandIn) -> None:
    several = {"prompt": ["ab", "", "c"], "return_token_strs": True}
    response = await post(here, "/tokenize", several)
    assert await json_of(response) == {
        "count": [2, 0, 1],
        "max_model_len": CONTEXT,
        "tokens": [[97, 98], [], [99]],
        "token_strs": [["a", "b"], [], ["c"]],
    }
    uid = response.headers["x-minisgl-uid"]
    assert sorted(each for each, _ in stand_in.requests()) == [f"{uid}.{index}" for index in range(3)]
    alone = await json_of(await post(here, "/tokenize", {"prompt": ["ab"]}))
    assert (alone["count"], alone["tokens"]) == ([2], [[97, 98]]), "a list of one is answered by a list"
    answer = await json_of(await post(here, "/detokenize", {"tokens": [[104, 105], []]}))
    assert answer == {"prompt": ["hi", ""], "text": ["hi", ""]}
    first = await post(here, "/tokenize", several, headers=KEY)
    again = await post(here, "/tokenize", several, headers=KEY)
    assert await json_of(first) == await json_of(again)
    assert first.headers["x-minisgl-uid"] == again.headers["x-minisgl-uid"]


async def test_a_text_that_is_refused_has_the_status_and_refuses_those_beside_it(here: Site) -> None:
    for prompt in ("refuse", ["ab", "refuse", "c"]):
        status, error = await error_of(post(here, "/tokenize", {"prompt": prompt}))
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")


async def test_several_texts_have_no_more_tokens_together_than_one(redis_url: str, stand_in: StandIn) -> None:
    with capture_logs() as lines:
        async with site(redis_url) as here:
            status, error = await error_of(post(here, "/tokenize", {"prompt": ["x" * 200_000] * 3}))
    assert (status, error["param"]) == (413, "prompt") and "262144" in error["message"]
    assert [line["status"] for line in request_lines(lines)] == [413]


async def test_special_tokens_are_kept_in_a_text_unless_it_is_said_otherwise(here: Site, stand_in: StandIn) -> None:
    for given, skipped in ((None, False), (False, False), (True, True)):
        await json_of(await post(here, "/detokenize", {"tokens": [104], "skip_special_tokens": given}))
        assert stand_in.requests()[-1][1].sampling.skip_special_tokens is skipped


async def test_the_tokenizer_tells_what_it_is_like(here: Site, stand_in: StandIn) -> None:
    assert await json_of(await here.get("/tokenizer_info")) == {"eos_token": "!"}
    ((_, event),) = stand_in.requests()
    assert (event.task, event.model) == ("describe", MODELS[0])


async def test_unknown_names_are_listed_in_the_header(here: Site) -> None:
    message = {"role": "user", "content": "a", "weight": 1}
    tool = {"type": "function", "function": {"name": "f", "deep": 1}}
    response = await post(here, "/tokenize", {"messages": [message], "tools": [tool], "zeta": 1})
    assert response.headers["x-minisgl-unknown-fields"] == "messages.weight, tools.function.deep, zeta"
    response = await post(here, "/detokenize", {"tokens": [97], "zeta": 1})
    assert response.headers["x-minisgl-unknown-fields"] == "zeta"


# requests like any other


async def test_each_has_a_canonical_line_and_a_history(redis_url: str, stand_in: StandIn) -> None:
    with capture_logs() as lines:
        async with site(redis_url) as here:
            await post(here, "/tokenize", {"prompt": "abc"})
            await post(here, "/detokenize", {"tokens": [97, 98]})
            await here.get("/tokenizer_info")
            await post(here, "/tokenize", {"prompt": 3})
            (tokenized, detokenized, _) = stand_in.requests()
            story = await json_of(await here.get(f"/v1/requests/{tokenized[0]}"))
            assert (story["state"], story["prompt_tokens"], story["text"]) == ("finished", 3, "")
            assert [(moment["what"], moment["who"]) for moment in story["moments"]] == [
                ("submitted", "web-0"),
                ("answered", "tokenize-0"),
            ]
            assert story["moments"][0]["task"] == "tokenize"
            assert (await json_of(await here.get(f"/v1/requests/{detokenized[0]}")))["text"] == "ab"
    said = request_lines(lines)
    assert [(line["status"], line.get("task"), line.get("prompt_tokens")) for line in said] == [
        (200, "tokenize", 3),
        (200, "detokenize", 2),
        (200, "describe", 0),
        (400, None, None),
    ]
    assert [line.get("uid") for line in said] == [*(uid for uid, _ in stand_in.requests()), None]


async def test_its_events_can_be_read_raw_and_have_no_frames(here: Site) -> None:
    uid = (await post(here, "/tokenize", {"prompt": "ab", "return_token_strs": True})).headers["x-minisgl-uid"]
    status, error = await error_of(here.get(f"/v1/requests/{uid}/events"))
    assert (status, error["param"]) == (400, "format")
    response = await here.get(f"/v1/requests/{uid}/events?format=events")
    submitted, answered, done, _ = (await response.get_data(as_text=True)).split("\n\n")
    assert done == "data: [DONE]" and json.loads(submitted.partition("data: ")[2])["prompt"] == "ab"
    entry_id, _, data = answered.partition("\ndata: ")
    assert entry_id == f"id: {SEAL}"
    event = json.loads(data)
    assert Answered.model_validate(event) == Answered(
        ms=event["ms"], token_ids=(97, 98), pieces=("a", "b"), by="tokenize-0"
    )


async def test_a_request_that_is_read_while_it_waits_ends_with_its_answer(here: Site, stand_in: StandIn) -> None:
    waiting = asyncio.create_task(post(here, "/tokenize", {"prompt": "silent"}))
    uid = await one_request(stand_in)
    reading = asyncio.create_task(here.get(f"/v1/requests/{uid}/events?format=events"))
    await until(lambda: len(here.frontend.tail.listeners) == 2)
    answer = Answered(token_ids=(7,), by="tokenize-0")
    await here.log.end(uid, answer, frontend="web-0")
    assert (await json_of(await waiting))["tokens"] == [7]
    assert '"token_ids":[7]' in await (await reading).get_data(as_text=True)


async def test_it_does_not_count_in_the_estimate_of_when_there_is_room_again(here: Site, stand_in: StandIn) -> None:
    tokenizing = asyncio.create_task(post(here, "/tokenize", {"prompt": "silent"}))
    await until(stand_in.requests)
    assert not here.frontend.retry_after._running
    async with here.connection(chat("silent")):
        await until(lambda: len(stand_in.requests()) == 2)
        await until(lambda: len(here.frontend.retry_after._running) == 1)
    await here.log.end(stand_in.requests()[0][0], Cancelled(by="me"), frontend="web-0")
    assert (await tokenizing).status_code == 499


async def test_what_is_sent_twice_under_one_key_is_one_request(here: Site, stand_in: StandIn) -> None:
    first = await post(here, "/tokenize", {"prompt": "ab"}, headers=KEY)
    again = await post(here, "/v1/tokenize", {"prompt": "ab"}, headers=KEY)
    assert await json_of(first) == await json_of(again)
    assert first.headers["x-minisgl-uid"] == again.headers["x-minisgl-uid"]
    assert len(stand_in.requests()) == 1


async def test_nothing_of_it_is_left_among_the_living_or_the_waiting(here: Site, redis_url: str) -> None:
    await json_of(await post(here, "/tokenize", {"prompt": "ab"}))
    names = Names()
    assert [command(redis_url, "XLEN", key) for key in (names.submitted, names.tokenized)] == [0, 0]
    assert command(redis_url, "ZCARD", names.live) == 0
