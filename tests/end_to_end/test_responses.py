"""/v1/responses with the demo model: responses survive what dies, chain after a restart, end once in the background."""

from __future__ import annotations

import contextlib
import json
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.browser import browsing
from support.redis_servers import command
from support.servers import Server, eventually, serve

from ops.sse_reader import frames_in
from pipeline.archive.reader import open_archive
from pipeline.names import Names

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("demo_server")]

PATH = "/v1/responses"
PAGE_SIZE = 64
WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "get_weather", "description": "Tells the weather of a city", "parameters": WEATHER}
QUESTION = "What is the weather in Rome?"
ANSWER = "It is sunny and 20 degrees in Rome."


def create(server: Server, given: Any, **fields: Any) -> Any:
    return server.ask(PATH, {"temperature": 0, "tools": [TOOL], "input": given, **fields})


def result_of(response: Any) -> list[dict[str, Any]]:
    (call,) = (item for item in response["output"] if item["type"] == "function_call")
    return [{"type": "function_call_output", "call_id": call["call_id"], "output": "sunny, 20 degrees"}]


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


def patient(server: Server, path: str, **options: Any) -> httpx.Response:
    """Return the answer of a server, as soon as a web process is there."""
    deadline_s = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.TransportError):
            found = httpx.get(f"{server.url}{path}", timeout=10, **options)
            if found.status_code < 500:
                return found
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def kill(server: Server) -> None:
    """Kill everything at once."""
    for process in server.command.processes():
        with contextlib.suppress(Exception):
            process.kill()


def test_a_call_its_result_and_an_answer_read_the_pages_of_before(demo_server: Server) -> None:
    called = create(demo_server, QUESTION)
    again = [{"role": "user", "content": QUESTION}, *called["output"], *result_of(called)]
    answer = create(demo_server, again)
    assert text_of(answer) == ANSWER
    cached = answer["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= (called["usage"]["total_tokens"] - 1) // PAGE_SIZE * PAGE_SIZE
    chained = create(demo_server, result_of(called), previous_response_id=called["id"])
    referred = [{"role": "user", "content": QUESTION}, {"type": "item_reference", "id": called["output"][0]["id"]}]
    by_reference = create(demo_server, [*referred, *result_of(called)])
    tokens = {each["usage"]["input_tokens"] for each in (answer, chained, by_reference)}
    assert text_of(chained) == text_of(by_reference) == ANSWER and len(tokens) == 1


def test_the_tokens_are_those_of_a_chat(demo_server: Server) -> None:
    said = [{"role": "user", "content": QUESTION}]
    function = {name: TOOL[name] for name in ("name", "description", "parameters")}
    chat = {"messages": [{"role": "system", "content": "Be brief."}, *said], "temperature": 0}
    theirs = demo_server.ask(
        "/v1/chat/completions", chat | {"tools": [{"type": "function", "function": function}], "max_tokens": 50}
    )
    mine = create(demo_server, said, instructions="Be brief.", max_output_tokens=50)
    (call,) = theirs["choices"][0]["message"]["tool_calls"]
    assert mine["output"][0]["arguments"] == call["function"]["arguments"]
    assert mine["usage"]["input_tokens"] == theirs["usage"]["prompt_tokens"]


def test_the_same_bytes_come_after_any_event_whatever_died_and_from_the_archive(tmp_path: Path) -> None:
    """The engine dies in mid-stream, then the web process and Redis; then the log loses the response."""
    body = {"input": "Count from 1 to 30", "max_output_tokens": 100, "seed": 5, "stream": True}
    headers = {"x-minisgl-event-ids": "1"}
    archive = tmp_path / "archive"
    with serve(tmp_path, "--archive", str(archive), demo=True) as server:
        quiet = httpx.post(f"{server.url}{PATH}", json=body, headers=headers, timeout=60)
        read = b""
        with httpx.stream("POST", f"{server.url}{PATH}", json=body, headers=headers, timeout=60) as response:
            uid = response.headers["x-minisgl-uid"]
            for piece in response.iter_raw():
                if not read:
                    server.command.workers("generate")[0].kill()
                read += piece
        read = read.lstrip(b"\n")
        assert folded(read) == folded(quiet.content)
        eventually(lambda: uid in open_archive(str(archive)).find([uid]), "it is archived")
        time.sleep(1.5)  # Redis writes each second
        (web,) = server.command.workers("web")
        (redis,) = (each for each in server.command.processes() if "valkey" in each.name())
        web.kill()
        redis.kill()
        check_every_cursor(server, uid, read)
        eventually(lambda: command(server.redis_url, "DEL", Names().request(uid)) == 1, "it is gone from the log")
        check_every_cursor(server, uid, read)
        assert patient(server, f"{PATH}/resp_{uid}").json()["output"] == final(read)["output"]


def check_every_cursor(server: Server, uid: str, read: bytes) -> None:
    """See that the rest of a stream comes after each of its ids and sequence numbers."""
    path = f"{PATH}/resp_{uid}?stream=true"
    frames = read.split(b"\n\n")[:-1]
    last = len(frames) - 1
    places = {place: frame.split(b"\n")[0].removeprefix(b"id: ").decode() for place, frame in enumerate(frames)}
    ids = {place: entry_id for place, entry_id in places.items() if frames[place].startswith(b"id: ")}
    assert len(ids) > 20 and last > 30
    for place, entry_id in ids.items():
        rest = b"".join(frame + b"\n\n" for frame in frames[place + 1 :])
        assert patient(server, path, headers={"Last-Event-ID": entry_id}).content.lstrip(b"\n") == rest
    for number in range(-1, last + 1):
        rest = b"".join(frame + b"\n\n" for frame in frames[number + 1 :])
        cursor = f"&starting_after={number}" if number >= 0 else ""
        assert patient(server, path + cursor).content.lstrip(b"\n") == rest


def final(stream: bytes) -> Any:
    """Return the response of the last event."""
    return json.loads([*frames_in(stream)][-1].data)["response"]


def folded(stream: bytes) -> str:
    """Return the text of a stream, put together from its deltas."""
    events = (json.loads(frame.data) for frame in frames_in(stream))
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert text == text_of(final(stream))
    return text


def test_a_chain_of_four_with_a_call_goes_on_after_a_restart(tmp_path: Path) -> None:
    flags = ("--api-key", "ann", "bob", "--archive", str(tmp_path / "archive"))
    with serve(tmp_path, *flags, demo=True) as server:
        first = keyed(server, "ann", input=QUESTION)
        second = keyed(server, "ann", input=result_of(first), previous_response_id=first["id"])
        assert text_of(second) == ANSWER
    with serve(tmp_path, *flags, demo=True) as server:
        third = keyed(server, "ann", input="What is the weather in Rome?", previous_response_id=second["id"])
        fourth = keyed(server, "ann", input=result_of(third), previous_response_id=third["id"])
        assert text_of(fourth) == ANSWER and fourth["previous_response_id"] == third["id"]
        for where in ("live", "archived"):
            items = asked(server, "ann", "GET", f"/{fourth['id']}/input_items?order=asc&limit=100").json()["data"]
            kinds = [item["type"] for item in items]
            round_trip = ["message", "function_call", "function_call_output"]
            assert kinds == [*round_trip, "message", *round_trip]
            for method, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", ""), ("POST", "/cancel")):
                assert asked(server, "bob", method, f"/{fourth['id']}{path}").status_code == 404, where
            body = {"input": "on", "previous_response_id": fourth["id"]}
            assert asked(server, "bob", "POST", "", json=body).status_code == 404
            assert asked(server, "ann", "GET", f"/{fourth['id']}").json()["output"] == fourth["output"]
            uid = fourth["id"].removeprefix("resp_")
            eventually(partial(is_archived, flags[-1], uid), "it is archived")
            command(server.redis_url, "DEL", Names().request(uid))


def is_archived(archive: str, uid: str) -> bool:
    return uid in open_archive(archive).find([uid])


def asked(server: Server, key: str, method: str, path: str, **options: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.request(method, f"{server.url}{PATH}{path}", headers=headers, timeout=60, **options)


def keyed(server: Server, key: str, **body: Any) -> Any:
    answer = asked(server, key, "POST", "", json={"temperature": 0, "tools": [TOOL], **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_response_in_the_background_ends_once_though_everything_is_killed_at_random(tmp_path: Path) -> None:
    body = {"input": "Count from 1 to 99", "temperature": 0, "background": True}
    with serve(tmp_path, demo=True) as server:
        quiet = server.ask(PATH, body | {"background": False})
        ids = [server.ask(PATH, body)["id"] for _ in range(8)]
        assert len(text_of(quiet)) > 100
        for _ in range(2):
            time.sleep(random.uniform(0, 0.2))
            kill(server)
            server.command.process.wait()
            with serve(tmp_path, demo=True, ready=False) as server:
                time.sleep(random.uniform(1, 3))
                kill(server)
                server.command.process.wait()
        with serve(tmp_path, demo=True, ready=False):
            time.sleep(2)  # .. and once it is stopped, which ends what clients wait for
        with serve(tmp_path, demo=True) as server:
            for response_id in ids:
                found: dict[str, Any] = {}

                def is_done(path: str = f"{PATH}/{response_id}", found: dict[str, Any] = found) -> bool:
                    found.update(patient(server, path).json())
                    return found["status"] not in ("queued", "in_progress")

                eventually(is_done, "it is done", 60)
                assert (found["status"], text_of(found)) == (quiet["status"], text_of(quiet))
                with server.log() as log:
                    (history,) = log.histories([response_id.removeprefix("resp_")])
                tokens = [int(entry.id.split("-")[0]) for entry in history if entry.id.endswith("-0")]
                assert tokens == sorted(set(tokens))


def test_a_limit_beyond_the_context_ends_where_the_context_does(demo_server: Server) -> None:
    counting = {"type": "array", "items": {"type": "string", "pattern": "^a{200}$"}, "minItems": 9, "maxItems": 9}
    asked = {"text": {"format": {"type": "json_schema", "name": "n", "schema": counting}}, "max_output_tokens": 32_000}
    answer = create(demo_server, "word " * 4050, tools=[], **asked)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["usage"]["total_tokens"] == 4096


def test_a_prompt_that_is_too_long_loses_its_beginning_if_its_client_wants_that(demo_server: Server) -> None:
    answer = create(demo_server, "word " * 6000, tools=[], truncation="auto", max_output_tokens=5)
    assert (answer["truncation"], answer["usage"]["input_tokens"]) == ("auto", 4091)
    refused = httpx.post(f"{demo_server.url}{PATH}", json={"input": "word " * 6000}, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_the_playground_opens_a_chain_and_goes_on(demo_server: Server, tmp_path: Path) -> None:
    called = create(demo_server, QUESTION)
    answer = create(demo_server, result_of(called), previous_response_id=called["id"])
    with browsing(tmp_path) as browser:
        browser.open(f"{demo_server.url}/requests/{answer['id'].removeprefix('resp_')}")
        browser.click("a[href^='/?response=']")
        browser.until(lambda: len(browser.all(".message")) == 4, "the question, the call, its result and the answer")
        assert ANSWER in browser.text(".answer:last-child") and "get_weather" in browser.text("main")
        browser.type("#question", "What is 17 plus 25?\n")
        browser.until(lambda: "42" in browser.all(".message")[-1].text, "it goes on")
        browser.open(f"{demo_server.url}/?response=resp_{'0' * 32}")
        browser.has(".notice.bad", "not found")
        browser.allow("404")
        browser.leave()
