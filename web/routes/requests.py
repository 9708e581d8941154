"""/v1/requests/<uid>: a request that is there, running or finished, whoever sent it and whichever process took it.

GET tells its story, DELETE cancels it, GET .../events sends what its endpoint sent, from the start or after an event.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Final

import structlog
from quart import Blueprint, Response, request

from pipeline.errors import LogError, RequestError, UndecodableEvent
from pipeline.events import Cancelled, Submitted, decode
from pipeline.history import story
from pipeline.log import Entry
from pipeline.names import SUBMITTED_ID
from web.answers import json_response, stream_response
from web.frontend import UNREACHABLE, Frontend
from web.streams import EventFrames, frames_for, written
from web.uids import drawn_ms, uid_of

logger = structlog.get_logger()

PATH: Final = "/v1/requests/<name>"
LAST_EVENT_ID: Final = "Last-Event-ID"
_EVENT_ID: Final = re.compile(r"(0|[1-9][0-9]{0,19})-(0|[1-9][0-9]{0,19})")


def request_routes(frontend: Frontend) -> Blueprint:
    routes = Blueprint("requests", __name__)

    @routes.get(PATH)
    async def tell(name: str) -> Response:
        uid = _known(name)
        with _Unreachable(uid):
            history = (await frontend.log.histories({uid: ""}))[uid]
            if not history:
                raise _absent(uid, frontend.limits.retention_s)
            return json_response(story(uid, history))

    @routes.delete(PATH)
    async def cancel(name: str) -> Response:
        uid = _known(name)
        with _Unreachable(uid):
            submitted = _submitted(uid, await frontend.log.entries(uid, (SUBMITTED_ID,)), frontend)
            retention_ms = int(frontend.limits.retention_s * 1000)
            event = Cancelled(by="client")
            done = await frontend.log.end(uid, event, frontend=submitted.frontend, retention_ms=retention_ms)
        logger.info("request_cancelled", uid=uid, cancelled=done)
        return json_response({"id": uid, "object": "request", "cancelled": done})

    @routes.get(f"{PATH}/events")
    async def events(name: str) -> Response:
        uid = _known(name)
        frontend.admit()
        whole = _asks_for_events(request.args.get("format"))
        after, where = _cursor()
        with _Unreachable(uid):
            ids = (SUBMITTED_ID, after) if after else (SUBMITTED_ID,)
            there = await frontend.ask(frontend.log.entries(uid, ids))
            submitted = _submitted(uid, there, frontend)
        if after and after not in there:
            raise RequestError(f"{where}: the request has no event {after}", param=where, code="invalid_value")
        frames = EventFrames() if whole else frames_for(uid, submitted)
        if frames is None:
            message = f"format: a request of {submitted.endpoint} has no frames; send `events`"
            raise RequestError(message, param="format", code="invalid_value")
        client = await frontend.read(uid, submitted, whole=whole)
        response = stream_response(written(client, frames, after=after))
        response.headers["x-minisgl-uid"] = uid
        return response

    return routes


class _Unreachable:
    """What fails in it because of the log is told to the client as such."""

    def __init__(self, uid: str) -> None:
        self._uid = uid

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, LogError) and not isinstance(error, UndecodableEvent):  # which would be our bug
            logger.warning("request_not_read", uid=self._uid, error=str(error))
            raise RequestError(UNREACHABLE, code="overloaded", status=503) from None


def _known(name: str) -> str:
    """Return the uid in a path. Raises RequestError when it is none."""
    uid = uid_of(name)
    if not uid:
        raise _not_found()
    return uid


def _submitted(uid: str, there: Mapping[str, Entry], frontend: Frontend) -> Submitted:
    """Return how the history begins. Raises RequestError when there is none."""
    if SUBMITTED_ID not in there:
        raise _absent(uid, frontend.limits.retention_s)
    event = decode(there[SUBMITTED_ID].fields)
    assert isinstance(event, Submitted)
    return event


def _absent(uid: str, retention_s: float) -> RequestError:
    """Return the error for a request that has no history: it has expired, if it was there at all."""
    age_s = time.time() - drawn_ms(uid) / 1000
    if age_s < retention_s:  # so young, or of the future, that it cannot have expired
        return _not_found()
    message = f"The log keeps a request for {retention_s:g} s after its end (--retention); that is over."
    return RequestError(message, code="request_expired", status=404)


def _not_found() -> RequestError:
    message = "There is no such request; the response header x-minisgl-uid of a request names it."
    return RequestError(message, code="request_not_found", status=404)


def _asks_for_events(given: str | None) -> bool:
    """Say whether the raw events are meant, not the frames. Raises RequestError for what is neither."""
    if given not in (None, "events"):
        raise RequestError("format: should be `events`, or left out", param="format", code="invalid_value")
    return given is not None


def _cursor() -> tuple[str, str]:
    """Return the id after which the client wants to go on, or nothing, and where it said so.

    A browser that comes again sends the header beside the address that it was given. Raises RequestError for no id.
    """
    for where, given in ((LAST_EVENT_ID, request.headers.get(LAST_EVENT_ID)), _asked("starting_after")):
        if given:
            if not _EVENT_ID.fullmatch(given):
                raise RequestError(f"{where}: should be the id of an event", param=where, code="invalid_value")
            return given, where
    return "", ""


def _asked(name: str) -> tuple[str, str | None]:
    return name, request.args.get(name)
