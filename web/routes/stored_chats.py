"""GET and DELETE /v1/chat/completions/<id>: chats with `store: true`, as OpenAI has them. The log is the store."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import orjson
from quart import Blueprint, Response, request

from pipeline.errors import RequestError
from pipeline.events import AnyEvent, Finished, TokensProduced
from pipeline.names import base_uid
from pipeline.views.requests import RequestFacts
from web.http.keys import Caller
from web.live.catalogue import NEWEST
from web.live.frontend import Frontend, reaching
from web.live.lookup import Lookup
from web.routes.access import known_caller
from web.routes.answers import json_response
from web.routes.openapi import operation
from web.routes.stored import PAGES, delete_all, find_own, fold, page_of
from web.wire.endpoints import CHAT_ENDPOINT, body_of
from web.wire.openai.answers import Choice, choices_for
from web.wire.uids import uid_of

PATH: Final = f"{CHAT_ENDPOINT}/<name>"
MOST_FOUND: Final = 500
"""Most chats, the newest, among which a list has its pages."""
MOST_LOOKS: Final = 16
"""Most looks at what the log and the archive have; one is at about 256 requests that are not known yet."""
FILTERS: Final = {
    "model": {"description": "Only answers of this model."},
    "metadata[key]": {"description": "Only chats with this value under this key of their `metadata`."},
}


def stored_chat_routes(frontend: Frontend) -> Blueprint:
    routes = Blueprint("stored_chats", __name__)

    @routes.get(CHAT_ENDPOINT)
    @operation("The stored chats of this key", query=PAGES | FILTERS)
    async def listing() -> Response:
        who = known_caller()
        with reaching("chats_not_listed"):
            uids = await _newest(frontend, who)
            page = page_of([{"id": f"chatcmpl-{uid}"} for uid in reversed(uids)], "asc")
            bodies = []
            for item in page["data"]:
                with suppress(RequestError):  # it was deleted meanwhile
                    bodies.append(await _body(frontend, *await _found(frontend, item["id"], who)))
        return json_response(page | {"data": [orjson.Fragment(body) for body in bodies]})

    @routes.get(PATH)
    @operation("A stored chat")
    async def read(name: str) -> Response:
        who = known_caller()
        with reaching("chat_not_read", uid=name):
            return json_response(await _body(frontend, *await _found(frontend, name, who)))

    @routes.get(f"{PATH}/messages")
    @operation("The messages of a stored chat", query=PAGES)
    async def messages(name: str) -> Response:
        who = known_caller()
        with reaching("chat_not_read", uid=name):
            _, found = await _found(frontend, name, who)
        said = [{"id": f"{name}-{place}", **message} for place, message in enumerate(found.submitted.messages)]
        return json_response(page_of(said, "asc"))

    @routes.delete(PATH)
    @operation("Delete a stored chat")
    async def delete(name: str) -> Response:
        who = known_caller()
        with reaching("chat_not_read", uid=name):
            await delete_all(frontend, (await _found(frontend, name, who))[1])
        return json_response({"object": "chat.completion.deleted", "id": name, "deleted": True})

    return routes


async def _newest(frontend: Frontend, who: Caller) -> Sequence[str]:
    """Return the uids of the newest chats that *who* has stored. Raises as the log does."""
    model = request.args.get("model")
    named = ((re.fullmatch(r"metadata\[(.*)\]", name), text) for name, text in request.args.items())
    wanted = {found[1]: text for found, text in named if found}

    def fits(facts: RequestFacts) -> bool:
        is_stored = facts.endpoint == CHAT_ENDPOINT and facts.labels.get("store") is True and not facts.replay_of
        is_its = is_stored and facts.state == "finished" and who.may_see(facts.owner) and model in (None, facts.model)
        return is_its and wanted.items() <= facts.labels.get("metadata", {}).items()

    found: dict[str, None] = {}
    before = NEWEST
    for _ in range(MOST_LOOKS):
        listed = await frontend.catalogue.newest(before, MOST_FOUND, fits)
        found |= dict.fromkeys(base_uid(facts.uid) for facts in listed.requests)
        before = listed.next
        if not before or len(found) >= MOST_FOUND:
            break
    return [*found][:MOST_FOUND]


async def _found(frontend: Frontend, name: str, who: Caller) -> tuple[str, Lookup]:
    uid = uid_of(name) if "." not in name else ""  # an answer alone is none
    found = await find_own(frontend, uid, who, CHAT_ENDPOINT) if uid else None
    if found is None:
        raise RequestError(f"Chat completion with id '{name}' not found.", code="completion_not_found", status=404)
    return uid, found


async def _body(frontend: Frontend, uid: str, found: Lookup) -> bytes:
    """Return a chat, once it has ended. Raises as the log does.

    Raises:
        RequestError: It has not ended, or not well.
    """
    choices = choices_for(uid, [found.submitted] * len(found.uids))
    archived = await frontend.archived.read(found.uids) if found.archived is not None else {}
    for choice, each in zip(choices, found.uids, strict=True):
        await fold(frontend, each, archived.get(each), partial(_apply, choice))
    if any(choice.finished is None for choice in choices):
        message = f"Chat completion '{uid}' has no answer: it runs, failed or was cancelled; /v1/requests/{uid} tells."
        raise RequestError(message, code="completion_not_found", status=404)
    told: dict[str, Any] = orjson.loads(b"".join(body_of(uid, [found.submitted] * len(choices), choices)))
    return orjson.dumps(told | {"metadata": found.submitted.labels.get("metadata", {})})


def _apply(choice: Choice, event: AnyEvent) -> None:
    match event:
        case TokensProduced():
            choice.apply(event)
        case Finished():
            choice.finish(event)
