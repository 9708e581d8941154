"""Chats with `store: true`: read, listed and deleted by their owner."""

from __future__ import annotations

from typing import Any

import pytest
from support.stand_in_stages import StandIn
from support.web_site import ANN, BOB, KEYS, Site, bearer, chat, site

PATH = "/v1/chat/completions"


async def got(here: Site, path: str, **headers: str) -> tuple[int, Any]:
    response = await here.get(path, **headers)
    return response.status_code, await response.get_json()


async def test_a_stored_chat_reads_as_it_was_answered(here: Site) -> None:
    said = await (await here.post(chat(store=True, n=2, metadata={"a": "b"}))).get_json()
    status, read = await got(here, f"{PATH}/{said['id']}")
    assert status == 200 and read == said | {"metadata": {"a": "b"}}
    _, messages = await got(here, f"{PATH}/{said['id']}/messages")
    assert [message["role"] for message in messages["data"]] == ["user"]


@pytest.mark.parametrize("fields", [{}, {"store": False}])
async def test_what_is_not_stored_is_not_there(here: Site, fields: Any) -> None:
    said = await (await here.post(chat(**fields))).get_json()
    assert (await got(here, f"{PATH}/{said['id']}"))[0] == 404


async def test_chats_are_listed_in_pages_the_oldest_first(here: Site) -> None:
    ids = [(await (await here.post(chat(store=True))).get_json())["id"] for _ in range(3)]
    await here.post(chat())
    _, page = await got(here, f"{PATH}?limit=2")
    assert [each["id"] for each in page["data"]] == ids[:2] and page["has_more"]
    _, page = await got(here, f"{PATH}?limit=2&after={ids[1]}")
    assert [each["id"] for each in page["data"]] == ids[2:] and not page["has_more"]
    _, page = await got(here, f"{PATH}?order=desc&limit=1")
    assert [each["id"] for each in page["data"]] == ids[2:]
    assert (await got(here, f"{PATH}?model=nobody"))[1]["data"] == []
    for wrong in ("limit=0", "limit=x", "order=up", "after=chatcmpl-x"):
        status, body = await got(here, f"{PATH}?{wrong}")
        assert (status, body["error"]["param"]) == (400, wrong.partition("=")[0])


async def test_chats_are_listed_by_their_metadata(here: Site) -> None:
    ids = []
    for metadata in ({"run": "1", "of": "a"}, {"run": "1", "of": "b"}, {}):
        said = await (await here.post(chat(store=True, metadata=metadata))).get_json()
        ids.append(said["id"])
    for query, found in (
        ("metadata[run]=1", ids[:2]),
        ("metadata[run]=1&metadata[of]=b", ids[1:2]),
        ("metadata[x]=", []),
    ):
        assert [each["id"] for each in (await got(here, f"{PATH}?{query}"))[1]["data"]] == found


async def test_a_deleted_chat_is_gone(here: Site) -> None:
    said = await (await here.post(chat(store=True))).get_json()
    client: Any = here.client
    response = await client.delete(f"{PATH}/{said['id']}")
    assert (await response.get_json())["deleted"] is True
    assert (await got(here, f"{PATH}/{said['id']}"))[0] == 404
    assert (await got(here, PATH))[1]["data"] == []


async def test_nobody_sees_the_chats_of_another(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url, keys=KEYS) as here:
        said = await (await here.post(chat(store=True), headers=bearer(ANN))).get_json()
        for path in ("", "/messages"):
            status, body = await got(here, f"{PATH}/{said['id']}{path}", **bearer(BOB))
            assert (status, body["error"]["code"]) == (404, "completion_not_found")
        assert (await got(here, PATH, **bearer(BOB)))[1]["data"] == []
        assert len((await got(here, PATH, **bearer(ANN)))[1]["data"]) == 1
