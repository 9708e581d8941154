"""What HTTP clients see, with stand-in stages behind a real Redis."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.stand_in_stages import BOS, Script, StandIn, finished, tokens
from support.web_site import CHAT, IDS, Site, bytes_of, chat, error_of, one_request, request_lines, seal_of, until

import web.live.listener
import web.live.open_request
import web.routes.generations
from ops.sse_reader import frames_in
from pipeline.events import Failed, Logprob, Logprobs, PromptInfo, Submitted, TokenText, TopLogprob, new_uid
from web.wire.pieces import PIECE_BYTES


async def test_keywords_of_schemas_that_no_grammar_counts_are_named_in_a_header(here: Site) -> None:
    schema = {"properties": {"a,ä" * 100: {"maximum": 2**64}, "n": {"multipleOf": 1e300, "maximum": 2**53}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    response = await here.post(chat(tools=[tool], json_schema=schema))
    codes, names = zip(*(one.split("=") for one in response.headers["x-minisgl-warnings"].split(", ")), strict=True)
    assert set(codes) == {"ignored_keyword"}
    fields = ("json_schema", "tools.0.function.parameters")
    assert names[1::2] == tuple(f"{field}.properties.n.multipleOf" for field in fields)
    assert [len(name) for name in names[::2]] == [128, 128] and names[0].startswith("json_schema.properties.a%2C%C3")
    plain = await here.post(chat(json_schema={"maximum": 2**53}))
    assert plain.status_code == 200 and "x-minisgl-warnings" not in plain.headers


async def test_a_whole_completion(here: Site, stand_in: StandIn) -> None:
    response = await here.post(chat(model="demo", seed=3, user="ann", zeta=1) | {"al,pha\n": 2})
    body = await response.get_json()
    ((uid, submitted),) = stand_in.requests()
    assert response.status_code == 200 and body["id"] == f"chatcmpl-{uid}" and body["model"] == "demo"
    assert body["choices"][0]["message"]["content"] == "Hello\u2028!"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["total_tokens"] == 8
    assert response.headers["x-minisgl-uid"] == uid
    assert response.headers["x-minisgl-unknown-fields"] == "al%2Cpha%0A, zeta"
    assert (submitted.sampling.seed, submitted.labels, submitted.model) == (3, {"user": "ann"}, "demo")


async def test_a_header_names_what_is_strange_about_a_request(here: Site) -> None:
    function = {"name": "look", "arguments": '{"city": "Pa'}
    called = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    strange = "invalid_arguments=messages.1.tool_calls.0.function.arguments"
    begun = f"{BOS}[INST] Hi [/INST]"
    for path, body, warning in (
        ("/v1/chat/completions", {"messages": [*chat()["messages"], called]}, strange),
        ("/v1/completions", {"prompt": begun}, "double_bos=prompt"),
        ("/v1/completions", {"prompt": ["Hi", begun], "stream": True}, "double_bos=prompt"),
        ("/generate", {"text": begun}, "double_bos=prompt"),
        ("/tokenize", {"prompt": begun}, "double_bos=prompt"),
        ("/v1/completions", {"prompt": "Hi"}, None),
    ):
        response = await here.client.post(path, json=body)
        assert (response.status_code, response.headers.get("x-minisgl-warnings")) == (200, warning)
        await response.get_data()


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", chat()), ("/generate", {"text": "a"})], ids=["chat", "generate"]
)
async def test_a_byte_order_mark_before_a_body_is_left_out(here: Site, path: str, body: dict[str, Any]) -> None:
    sent = b"\xef\xbb\xbf" + json.dumps(body).encode()
    response = await here.client.post(path, data=sent, headers={"content-type": "application/json"})
    assert response.status_code == 200, await response.get_data()


def scored(num_tokens: int, num_top: int) -> PromptInfo:
    top = tuple(TopLogprob(token=token, text=f"é{token}", logprob=-token / 8) for token in range(num_top))
    score = Logprob(token=99, text="\u2028", logprob=-0.5, top=top)
    first = TokenText(token=99, text="\u2028")
    return PromptInfo(num_tokens=num_tokens, text="Dear", scores=Logprobs([score] * (num_tokens - 1)), first=first)


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20, "stream": True}])
async def test_choices_share_the_scores_of_their_prompt_and_a_long_answer_comes_whole(
    here: Site, stand_in: StandIn, asked: dict[str, Any]
) -> None:
    def says(event: Submitted) -> Script:
        own = PromptInfo(num_tokens=500, text="Dear") if event.presentation.echo else None
        first = event.sampling.prompt_logprobs is not None
        yield from [None] * 3 if first else ()  # the other one is faster
        yield 1, tokens(1).model_copy(update={"prompt": scored(500, 20) if first else own})
        yield 1, finished(1)

    stand_in.scripts["Dear"] = says
    response = await here.client.post("/v1/completions", json={"prompt": "Dear", "n": 2, **asked})
    of_prompts = [event.sampling.prompt_logprobs for _, event in stand_in.requests()]
    assert response.status_code == 200 and sorted(of_prompts, key=str) == [20, None], "it is scored once"
    sent = await response.get_data(as_text=False)
    assert len(sent) > 4 * PIECE_BYTES
    if asked.get("stream"):
        *frames, done, _ = sent.split(b"\n\n")
        assert done == b"data: [DONE]" and b"\xe2\x80\xa8" not in sent
        chunks = [json.loads(frame.partition(b"data: ")[2])["choices"][0] for frame in frames]
        opening = [chunk["logprobs"] for chunk in chunks if chunk["text"] == "Dear"]
        assert len(opening) == 2 and opening[0] == opening[1] and len(opening[0]["tokens"]) == 500
    else:
        one, two = json.loads(sent)["choices"]
        assert one["prompt_logprobs"] == two["prompt_logprobs"] and len(one["prompt_logprobs"]) == 500


async def test_a_whole_answer_holds_no_more_scores_than_it_may(
    here: Site, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def says(event: Submitted) -> Script:
        for n in itertools.count(1):
            yield n, tokens(n).model_copy(update={"scores": (scored(2, 4).scores[0],)})

    stand_in.scripts["endless scores"] = says
    monkeypatch.setattr(web.routes.generations, "MOST_SCORES", 20)
    asked = chat("endless scores", logprobs=True, top_logprobs=4, n=2)
    status, error = await error_of(here.post(asked))
    assert (status, error["code"], error["param"]) == (400, "too_many_scores", "logprobs")
    for uid, _ in stand_in.requests():
        assert seal_of(stand_in.stages.log, uid)["code"] == "too_many_scores", "nothing of it goes on"


async def test_a_copy_of_a_request_is_labelled_with_its_uid(here: Site, stand_in: StandIn) -> None:
    uid = f"{new_uid()}.1"
    for sent in (chat(user="ann", n=2), chat()):
        assert (await here.post(sent, headers={"x-minisgl-copy-of": uid})).status_code == 200
    labels = [submitted.labels for _, submitted in stand_in.requests()]
    assert sorted(labels, key=len) == [{"copy_of": uid}, *[{"user": "ann", "copy_of": uid}] * 2]
    status, error = await error_of(here.post(chat(), headers={"x-minisgl-copy-of": "me"}))
    assert (status, error["param"], error["code"]) == (400, "x-minisgl-copy-of", "invalid_value")


STREAMED: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, chat(stream=True)),
    ("/v1/completions", {"prompt": "hello", "stream": True}),
    ("/generate", {"text": "hello", "stream": True}),
    ("/generate", {"prompt": "hello"}),
)


@pytest.mark.parametrize(("path", "body"), STREAMED, ids=["chat", "completion", "sglang", "mini-sglang"])
async def test_a_stream_has_lines_of_data_and_blank_lines_alone_unless_its_client_asks_for_ids(
    here: Site, path: str, body: dict[str, Any]
) -> None:
    plain = await bytes_of(here.client.post(path, json=body))
    assert {line.partition(b" ")[0] for line in plain.split(b"\n")} == {b"data:", b""}
    for headers in ({"x-minisgl-event-ids": "0"}, IDS):
        response = await here.client.post(path, json=body, headers=headers)
        uid, frames = response.headers["x-minisgl-uid"], frames_in(await response.get_data(as_text=False))
        ids = {frame.id for frame in frames if frame.id}
        assert ids >= {"1-0", "3-0"} if headers == IDS else not ids
        again = frames_in(await here.read(f"/v1/requests/{uid}/events"))
        assert len(again) > 2 and [frame.data for frame in again] == [frame.data for frame in frames]
        assert {frame.id for frame in again} >= {"1-0", "3-0"}, "those who come back need not ask"


@pytest.mark.parametrize("given", ["", "yes", "1, 1"])
async def test_a_wrong_wish_for_ids_is_refused_and_reaches_no_stage(here: Site, stand_in: StandIn, given: str) -> None:
    headers = {"x-minisgl-event-ids": given}
    status, error = await error_of(here.post(chat(stream=True), headers=headers))
    assert (status, error["param"], error["code"]) == (400, "x-minisgl-event-ids", "invalid_value")
    assert not stand_in.requests()


async def test_a_streamed_completion(here: Site) -> None:
    role, *texts, last, usage = await here.chunks(chat(stream_options={"include_usage": True}))
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [text["choices"][0]["delta"]["content"] for text in texts] == ["Hel", "lo\u2028!"]
    assert last["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_a_refusal_of_a_stage_has_its_status_streamed_or_not(here: Site) -> None:
    for stream in (False, True):
        status, error = await error_of(here.post(chat("refuse", stream=stream)))
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")


async def test_a_failure_after_the_first_token_is_an_error_frame_or_a_status(here: Site) -> None:
    *_, last = await here.chunks(chat("break"))
    assert last["error"]["code"] == "engine_error"
    assert (await error_of(here.post(chat("break"))))[0] == 500


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat("silent")), ("/generate", {"text": "silent"})], ids=["chat", "generate"]
)
async def test_a_stream_is_kept_alive_by_blank_lines_while_it_waits(
    here: Site, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(web.live.listener, "KEEP_ALIVE_S", 0.01)
    async with here.connection(body | {"stream": True}, path=path) as connection:
        assert await connection.receive() == await connection.receive() == b"\n"
        uid = await one_request(stand_in)
        failed = Failed(status=503, code="engine_gone", message="It is gone.")
        await here.log.end(uid, failed, frontend="web-0")
        while not (piece := await connection.receive()).strip():
            pass
        assert b'"code":"engine_gone"' in piece and piece.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_our_own_bug_in_an_answer_is_logged_once_as_ours_and_cancelled_by_us(
    here: Site, stand_in: StandIn, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [1] if stream else []  # so many reads bring what they should: a stream breaks off after it has begun

    async def broken(opened: web.live.open_request.OpenRequest) -> list[Any]:
        if not good:
            raise RuntimeError("a secret")
        good.pop()
        return await opened.listeners[0].next()

    monkeypatch.setattr(web.live.open_request.OpenRequest, "next", broken)
    with capture_logs() as lines:
        if stream:
            chunks = await here.chunks(chat("endless"))
            assert chunks[-1]["error"]["code"] == "internal_error"
        else:
            assert (await error_of(here.post(chat("endless"))))[1]["code"] == "internal_error"
        await until(lambda: not here.is_busy)
    (line,) = request_lines(lines)
    assert (line["status"], line["error"]) == (500, "internal_error")
    assert seal_of(stand_in.stages.log, line["uid"])["by"] == "web"
