"""GET /v1/requests: the requests of the caller, the newest first. GET /v1/requests/<uid>/steps: what the engines did
for one of them, and who shared its batches.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, get_args

import orjson
from quart import Blueprint, Response, request

from pipeline.errors import RequestError
from pipeline.names import PROBE
from pipeline.views.company import Company
from pipeline.views.requests import ENDED, RequestFacts, RequestState
from web.http.keys import Caller
from web.live.catalogue import NEWEST
from web.live.folding import company_of, folded
from web.live.frontend import Frontend, reaching
from web.routes.access import known_caller
from web.routes.answers import json_response
from web.routes.named import history_of, uid_in
from web.routes.openapi import operation

LIMIT: Final = 50
MOST: Final = 200
MOST_SEARCHED: Final = 200
"""Characters of a text to search for."""
MOST_COMPANIONS: Final = 500
"""Most companions whose owners are looked up; the others are shown as numbers."""
SHOWN: Final = (
    *("uid", "state", "reason", "endpoint", "model", "submitted_ms", "prompt_tokens", "cached_tokens", "output_tokens"),
    *("tokens_per_s", "engine", "owner", "labels", "replay_of"),
)
"""Fields that the list shows unchanged."""
STATES: Final = frozenset(get_args(RequestState))
GROUPS: Final = {"ended": ENDED, "open": STATES - ENDED}
_NUMBER: Final = re.compile("[1-9][0-9]{0,2}")
_PLACE: Final = re.compile(r"[0-9a-f]{1,32}(\.[0-9]{1,4})?")
QUERY: Final = {
    "limit": {"description": f"Most requests in the answer, 1 to {MOST}.", "pattern": f"^{_NUMBER.pattern}$"},
    "before": {"description": "Only older requests: the `next` of the page before.", "pattern": f"^{_PLACE.pattern}$"},
    "state": {"description": "Only requests in one of these states, with commas; or `open`, or `ended`."},
    "search": {"description": "Only requests with this text in uid, model, endpoint, reason, engine or labels."},
}


def listing_routes(frontend: Frontend) -> Blueprint:
    routes = Blueprint("listing", __name__)

    @routes.get("/v1/requests")
    @operation("The requests of this key, the newest first", query=QUERY)
    async def listing() -> Response:
        who = known_caller()
        before, limit = _before(), number_asked("limit", LIMIT, MOST)
        states, text = _states(), request.args.get("search", "")[:MOST_SEARCHED].lower()
        with reaching("requests_not_listed"):
            listed = await frontend.catalogue.newest(before, limit, _fits(who, states, text))
        requests = [plain(facts) | {"archived": facts.uid in listed.archived} for facts in listed.requests]
        return json_response({"requests": requests, "next": listed.next or None, "complete": listed.is_complete})

    @routes.get("/v1/requests/<name>/steps")
    @operation("Who shared the batch with a request, and why its tokens were late")
    async def steps(name: str) -> Response:
        who = known_caller()
        uid = uid_in(name)
        with reaching("request_not_read", uid=uid):
            async with frontend.folding.turn():
                history = await history_of(frontend, uid, who, "steps")
                company = await company_of(frontend.log, history)
                seen = {} if who.is_admin else await frontend.catalogue.owners(company.companions[:MOST_COMPANIONS])
                body = await folded(len(history.tokens), functools.partial(_company, company, who, seen))
        return json_response(body)

    return routes


def _company(company: Company, who: Caller, owners: Mapping[str, str]) -> bytes:
    """Return which requests shared the batches of a request, as JSON. Those that *who* may not see are numbers."""
    numbers: dict[str, int] = {}

    def called(other: str) -> str | int:
        if who.may_see(owners.get(other, "")):
            return other
        return numbers.setdefault(other, len(numbers) + 1)

    plain_company = company.plain(called)
    return orjson.dumps({"others": len(numbers)} | plain_company)


def plain(facts: RequestFacts) -> dict[str, Any]:
    """Return a request as the list shows it."""
    took_ms = max(facts.ended_ms - facts.submitted_ms, 0) if facts.ended_ms else None
    return {name: getattr(facts, name) for name in SHOWN} | {"took_ms": took_ms}


def number_asked(name: str, usual: int, most: int) -> int:
    """Return the query parameter *name*. Raises RequestError unless it is a number from 1 to *most*."""
    given = request.args.get(name, str(usual))
    if not _NUMBER.fullmatch(given) or int(given) > most:
        message = f"{name}: should be a whole number from 1 to {most}"
        raise RequestError(message, param=name, code="invalid_value")
    return int(given)


def _before() -> str:
    given = request.args.get("before") or NEWEST
    if given != NEWEST and not _PLACE.fullmatch(given):
        message = "before: should be a uid, or the `next` of the page before"
        raise RequestError(message, param="before", code="invalid_value")
    return given


def _states() -> frozenset[str]:
    """Return the states that are asked for. Raises RequestError if one is none."""
    given = [word for word in request.args.get("state", "").split(",") if word]
    for word in given:
        if word not in STATES and word not in GROUPS:
            expected = ", ".join(sorted(STATES | GROUPS.keys()))
            raise RequestError(f"state: should be one of {expected}", param="state", code="invalid_value")
    return frozenset().union(*(GROUPS.get(word, {word}) for word in given)) if given else STATES


def _fits(who: Caller, states: frozenset[str], text: str) -> Callable[[RequestFacts], bool]:
    def fits(facts: RequestFacts) -> bool:
        is_shown = facts.endpoint != PROBE and who.may_see(facts.owner) and facts.state in states
        return is_shown and (not text or text in _searched(facts))

    return fits


def _searched(facts: RequestFacts) -> str:
    labels = orjson.dumps(facts.labels).decode() if facts.labels else ""
    texts = (facts.uid, facts.model, facts.endpoint, facts.reason, facts.engine, labels)
    return "\n".join(texts).lower()
