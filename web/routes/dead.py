"""GET /v1/dead: the dead letters. POST /v1/dead/<id>/requeue: send one again.

If there are keys, both need the admin key.
"""

from __future__ import annotations

from typing import Final

import structlog
from quart import Blueprint, Response, request

from pipeline.errors import RequestError
from pipeline.events import Submitted
from pipeline.log.protocol import Entry, Submission
from pipeline.log.redis import AsyncRedisLog
from pipeline.views.history import REQUEUED_FROM, plain_letter, sent_again
from web.live.frontend import Frontend, reaching
from web.live.open_request import submit_without_client
from web.live.refusals import refusal
from web.routes.access import check_admin
from web.routes.answers import json_response
from web.routes.listing import number_asked
from web.routes.named import is_id
from web.routes.openapi import operation
from web.wire.uids import uid_of

logger = structlog.get_logger()

LIMIT: Final = 50
MOST: Final = 100
READ_AT_ONCE: Final = 10
"""Letters in one read; each may have 64 KB."""
MOST_SEARCHED: Final = 1000
"""Most letters, the newest first, that are searched for a uid."""
LEAST_ID: Final = "0-0"
QUERY: Final = {
    "limit": {"description": f"Most letters in the answer, 1 to {MOST}.", "pattern": "^[1-9][0-9]{0,2}$"},
    "before": {"description": "Only older letters: the `next` of the page before.", "pattern": "^[0-9]+-[0-9]+$"},
    "uid": {"description": f"Only the letter of this request, if it is among the newest {MOST_SEARCHED:,}."},
}


def dead_letter_routes(frontend: Frontend) -> Blueprint:
    routes = Blueprint("dead", __name__)

    @routes.get("/v1/dead")
    @operation("The dead letters, the newest first", query=QUERY)
    async def letters() -> Response:
        _check()
        limit, before, uid = number_asked("limit", LIMIT, MOST), _before(), _uid()
        entries: list[Entry] = []
        if uid:
            with reaching("letters_not_read"):
                letter = await _letter_of(frontend.log, uid)
            return json_response({"dead": [plain_letter(letter)] if letter else [], "next": None})
        if before == LEAST_ID:  # Redis refuses an interval that ends before the least id; this one is empty
            return json_response({"dead": [], "next": None})
        with reaching("letters_not_read"):
            while len(entries) < limit:
                some = min(limit - len(entries), READ_AT_ONCE)
                found = await frontend.log.dead_letters(some, before=before)
                entries += found
                if len(found) < some:
                    before = ""
                    break
                before = found[-1].id
        return json_response({"dead": [plain_letter(letter) for letter in entries], "next": before or None})

    @routes.post("/v1/dead/<name>/requeue")
    @operation("Send the request of a dead letter again, under a new uid, and drop the letter")
    async def requeue(name: str) -> Response:
        _check()
        try:
            frontend.admit()
            with reaching("letter_not_read"):
                letter = await _letter(frontend, name)
                event = await _request(frontend.log, letter)
            uid = (await submit_without_client(frontend, event, letter=letter.id)).uid
        except RequestError as error:
            logger.info("request", status=error.status, error=error.code)
            raise
        dead_uid = letter.fields["uid"]
        logger.info("request_requeued", uid=uid, of=dead_uid)
        return json_response({"uid": uid, REQUEUED_FROM: dead_uid})

    return routes


def _check() -> None:
    """Refuse a caller without the admin key, with a log line. Raises RequestError."""
    try:
        check_admin()
    except RequestError as error:
        path = request.url_rule.rule if request.url_rule else ""
        logger.info("request", status=error.status, error=error.code, method=request.method, path=path)
        raise


def _before() -> str:
    given = request.args.get("before", "")
    if given and not is_id(given):
        raise RequestError("before: should be the id of a letter", param="before", code="invalid_value")
    return given


def _uid() -> str:
    given = request.args.get("uid", "")
    if given and not uid_of(given):
        raise RequestError("uid: should be that of a request", param="uid", code="invalid_value")
    return uid_of(given)


async def _letter(frontend: Frontend, name: str) -> Entry:
    """Return the letter with the id, or of the request with the uid, *name*. Raises as the log does.

    Raises:
        RequestError: There is none.
    """
    found = await frontend.log.dead_letter(name) if is_id(name) else await _letter_of(frontend.log, uid_of(name))
    if found is None:
        raise refusal(frontend, Submission.GONE, None)
    return found


async def _letter_of(log: AsyncRedisLog, uid: str) -> Entry | None:
    """Return the letter of the request *uid*, if it is among the newest. Raises as the log does."""
    before = ""
    for _ in range(0, MOST_SEARCHED if uid else 0, READ_AT_ONCE):
        letters = await log.dead_letters(READ_AT_ONCE, before=before)
        found = next((letter for letter in letters if letter.fields.get("uid") == uid), None)
        if found is not None or len(letters) < READ_AT_ONCE:
            return found
        before = letters[-1].id
    return None


async def _request(log: AsyncRedisLog, letter: Entry) -> Submitted:
    """Return the request that asks the same again. Raises as the log does.

    Raises:
        RequestError: Nothing is left of it.
    """
    uid = letter.fields.get("uid", "")
    history = (await log.histories({uid: ""}, max_entries=1))[uid] if uid else None
    event = sent_again(uid, history or ())
    if event is None:
        message = (
            "Nothing can be sent again: the letter is about no request, or its history is gone. `minisgl dead show` "
            "shows what the letter holds, and the client can send the request again."
        )
        raise RequestError(message, code="history_gone", status=409)
    return event
