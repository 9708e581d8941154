"""What every route has in common: errors, ids, log lines; and the routes that need no request of the log."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

import pytest
from quart import request
from structlog.testing import capture_logs
from support.stand_in_stages import CONTEXT, MODELS, NUMERICS, StandIn
from support.web_site import CHAT, Site, chat, error_of, request_lines, site, until

import web.app
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import CACHE_CONFIG, GENERATION_SPEED, KV_CACHE_USAGE, NUM_RUNNING
from pipeline.names import TOKENIZE
from pipeline.stage.slots import Status
from web.config import DEFAULT_BODY_BYTES
from web.routes.info import internal_state


async def test_every_error_has_the_nested_body(here: Site) -> None:
    client = here.client
    assert (await error_of(client.get("/nothing")))[0] == 404
    assert (await error_of(client.get("/v1/models/nobody/has-it")))[1]["code"] == "model_not_found"
    assert (await error_of(client.post(CHAT, data=b"{")))[1]["code"] == "invalid_json"
    wrong_method = await client.get("/v1/completions")
    assert wrong_method.status_code == 405 and "POST" in wrong_method.headers["Allow"]
    assert (await error_of(client.get("/v1/completions")))[1]["code"] == "method_not_allowed"
    large = client.post(CHAT, data=b" " * (DEFAULT_BODY_BYTES + 1))
    assert (await error_of(large))[1]["code"] == "request_too_large"


async def test_what_is_refused_before_any_route_has_a_canonical_line_too(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.app, "BODY_TIMEOUT_S", 0.2)
    async with site(redis_url, ready=False) as here:

        async def broken() -> str:
            raise RuntimeError("a secret")

        here.app.add_url_rule("/broken", view_func=broken)
        with capture_logs() as lines:
            await here.client.get("/nothing" + "x" * 1000)
            await here.client.delete(CHAT)
            await here.client.post(CHAT, data=b" " * (DEFAULT_BODY_BYTES + 1))
            status, error = await error_of(here.client.get("/broken"))
            assert status == 500 and "our bug" in error["message"] and "secret" not in error["message"]
            async with here.client.request(CHAT, method="POST") as connection:
                await connection.send(b"{")
                assert b"did not arrive" in await connection.receive()  # the rest of the body never comes
        said = request_lines(lines)
        assert [(line["status"], line["error"], line["method"]) for line in said] == [
            (404, "not_found", "GET"),
            (405, "method_not_allowed", "DELETE"),
            (413, "request_too_large", "POST"),
            (500, "internal_error", "GET"),
            (408, "request_timeout", "POST"),
        ]
        assert [line["path"] for line in said[1:]] == [CHAT, CHAT, "/broken", CHAT]
        assert said[0]["path"].startswith("/nothing") and len(said[0]["path"]) < 300


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/files", "/v1/files/a/content", "/v1/images/generations", "/api/chat"]
)
async def test_what_the_server_does_not_have_is_said_and_not_tried_again(bare: Site, path: str) -> None:
    for answer in (bare.client.post(path, data=b"{}"), bare.client.get(path)):
        response = await answer
        error = (await response.get_json())["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "not_implemented", None)
        assert path.startswith(error["message"].split()[5].rstrip(";")), error["message"]


@pytest.mark.parametrize("model", ["gpt-5", "tgi", "", "default", None, *MODELS])
async def test_any_model_name_is_answered_by_the_served_model_and_a_header_has_its_name(
    here: Site, model: str | None
) -> None:
    served = model if model in MODELS else MODELS[0]
    whole = await here.post(chat(model=model))
    assert whole.status_code == 200 and (await whole.get_json())["model"] == served
    streamed = await here.post(chat(model=model, stream=True))
    told = [answer.headers["x-minisgl-model"] for answer in (whole, streamed)]
    assert told == [quote(served, safe="/")] * 2


async def test_strict_model_names_refuse_a_name_that_is_not_served(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url, strict_model_names=True) as here:
        for path, body in ((CHAT, chat(model="gpt-5")), ("/tokenize", {"prompt": "a", "model": "tgi"})):
            status, error = await error_of(here.client.post(path, json=body))
            assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
        for name in (*MODELS, "default", None):
            assert (await here.post(chat(model=name))).status_code == 200


async def test_the_version_is_that_of_the_package_and_ping_is_health(bare: Site) -> None:
    assert await (await bare.get("/version")).get_json() == {"version": version("minisgl"), "engines": []}
    assert await (await bare.get("/ping")).get_json() == await (await bare.get("/health")).get_json()


async def test_the_version_says_how_each_ready_engine_computes(redis_url: str, stand_in: StandIn) -> None:
    about = Status(slot="generate-1", owner="", pid=1, host="h", phase="ready", numerics="t", why_torch="no compiler")
    for status in (about, about.model_copy(update={"slot": "generate-2", "phase": "loading"})):
        assert stand_in.stages.log.announce(status.slot, status.model_dump_json())
    async with site(redis_url) as here:
        said = await (await here.get("/version")).get_json()
    assert said["engines"] == [
        {"slot": "generate-0", "numerics": NUMERICS, "batch_invariant": True},
        {"slot": "generate-1", "numerics": "t", "batch_invariant": False, "why_torch": "no compiler"},
    ]


async def test_no_answer_is_cut_for_its_length(bare: Site) -> None:
    """The stream of more than a minute is in `test_connections.py`."""
    assert bare.app.config["RESPONSE_TIMEOUT"] is None and bare.app.config["BODY_TIMEOUT"] is None


async def test_a_request_id_is_taken_over_when_it_is_sound_and_drawn_otherwise(bare: Site) -> None:
    for given, sound in (("abc-1.2_x", True), ("x" * 129, False), ("a b", False), ("", False)):
        response = await bare.client.get("/health", headers={"x-request-id": given})
        assert (response.headers["x-request-id"] == given) is sound and response.headers["x-request-id"]


async def test_models_are_what_the_engines_say(here: Site, stand_in: StandIn) -> None:
    listed = await (await here.client.get("/v1/models")).get_json()
    assert [model["id"] for model in listed["data"]] == list(MODELS)
    one = await (await here.client.get("/v1/models/org/demo")).get_json()
    expected = {"object": "model", "owned_by": "minisgl", "parent": None, "max_model_len": CONTEXT}
    assert one == listed["data"][0] and expected.items() <= one.items()
    stand_in.stages.has_chat_template = False
    stand_in.stages.say_phase("ready", TOKENIZE)

    async def lacks_template() -> bool:
        told = await (await here.client.get("/v1/models/org/demo")).get_json()
        return bool(told == one | {"has_chat_template": False})

    async with asyncio.timeout(10):
        while not await lacks_template():
            await asyncio.sleep(0.05)


async def test_a_base_url_without_v1_works(here: Site) -> None:
    for path in ("/models", f"/models/{MODELS[0]}"):
        assert await (await here.get(path)).get_json() == await (await here.get(f"/v1{path}")).get_json()
    for path, body in (("/chat/completions", chat()), ("/completions", {"prompt": "Hey"})):
        answers = [await here.client.post(base + path, json=body) for base in ("/v1", "")]
        assert [answer.status_code for answer in answers] == [200, 200]
        first, second = [await answer.get_json() for answer in answers]
        assert first.keys() == second.keys() and first["object"] == second["object"]


async def test_clients_of_other_servers_learn_the_model_and_its_context(here: Site) -> None:
    model, server, props = [
        await (await here.get(path)).get_json() for path in ("/get_model_info", "/get_server_info", "/props")
    ]
    assert [told["model_path"] for told in (model, server, props)] == [MODELS[0]] * 3
    assert model["is_generation"] is True
    assert await (await here.get("/server_info")).get_json() == server, "SGLang's newer name"
    assert (await here.get("/model_info")).status_code == 404, "its benchmark would load that tokenizer"
    assert (server["context_length"], server["status"]) == (CONTEXT, "ready")
    assert props["default_generation_settings"]["n_ctx"] == CONTEXT
    (state,) = server["internal_states"]
    assert state == {"slot": "generate-0", "model_path": MODELS[0], "context_length": CONTEXT}, "it has no metrics"
    assert state.get("avg_spec_accept_length") is None, "as SGLang's benchmark asks for it"


def test_each_engine_is_described_by_what_it_publishes() -> None:
    measures = Measures()
    measures.set(CACHE_CONFIG, 1, "16", "bfloat16", "True", "100")
    measures.set(NUM_RUNNING, 3)
    measures.set(KV_CACHE_USAGE, 0.25)
    measures.set(GENERATION_SPEED, 41.5)
    status = Status(
        slot="generate-1", owner="1:a", pid=1, host="h", models=("m", "n"), context=64, metrics=measures.snapshot()
    )
    assert internal_state(status) == {
        "slot": "generate-1",
        "model_path": "m",
        "context_length": 64,
        "page_size": 16,
        "memory_usage": {"token_capacity": 1600},
        "num_running_reqs": 3,
        "num_queue_reqs": 0,
        "token_usage": 0.25,
        "last_gen_throughput": 41.5,
    }
    older = status.model_copy(update={"metrics": "of another version", "models": ()})
    assert internal_state(older) == {"slot": "generate-1", "model_path": "", "context_length": 64}


async def test_who_asks_for_the_model_before_there_is_one_is_told_to_wait(bare: Site) -> None:
    for path in ("/get_model_info", "/get_server_info", "/server_info", "/props"):
        assert (await error_of(bare.get(path)))[0] == 503


@pytest.mark.parametrize("way", ["too large", "left alone"])
async def test_nothing_keeps_the_bytes_of_a_body_that_was_not_read_to_its_end(bare: Site, way: str) -> None:
    """Not the error, which is in a cycle with it, and not the timers that were cancelled, which asyncio drops later."""
    bodies = []

    @bare.app.before_request
    async def note() -> None:
        bodies.append(request.body)

    async with bare.client.request(CHAT, method="POST") as connection:
        await connection.send(b" " * 1000)
        await until(lambda: bodies and bodies[0]._data)
        if way == "too large":
            await connection.send(b" " * DEFAULT_BODY_BYTES)
            assert b"request_too_large" in await connection.receive()
        else:
            await connection.disconnect()
    await until(lambda: not bodies[0]._data)
    error = bodies[0]._must_raise
    assert (error is not None) is (way == "too large")
    assert error is None or error.__traceback__ is None


@pytest.mark.parametrize("leaves", ["never", "with the last byte", "early"])
async def test_a_request_is_answered_in_the_task_that_it_has_until_its_client_leaves(bare: Site, leaves: str) -> None:
    tasks, left, sent = list[object](), asyncio.Event(), list[str]()

    async def receive() -> dict[str, object]:
        if tasks:
            await left.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        sent.append(str(message["type"]))
        if leaves == "with the last byte" and not message.get("more_body", True):
            left.set()
            await asyncio.sleep(0)

    async def slow() -> str:
        tasks.append(asyncio.current_task())
        if leaves == "early":
            left.set()
            await asyncio.sleep(60)
        return "done"

    bare.app.add_url_rule("/slow", view_func=slow)
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/slow",
    }
    scope |= {"query_string": b"", "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 1)}
    await bare.app.asgi_app(scope, receive, send)  # type: ignore[arg-type]
    assert tasks == [asyncio.current_task()]
    await asyncio.sleep(0)  # no cancellation is left over
    assert sent[:1] == ([] if leaves == "early" else ["http.response.start"])
