"""POST /abort_request, as SGLang has it."""

from __future__ import annotations

import asyncio
from typing import Any

from structlog.testing import capture_logs
from support.stand_in_stages import Stages, StandIn
from support.web_site import Site, chat, code_of, error_of, one_request, seal_of

from pipeline.events import SamplingParams, Submitted, new_uid
from pipeline.log.redis import RedisLog
from web.live.lookup import AT_ONCE

ABORT = "/abort_request"


def submit(log: RedisLog, uid: str, *, endpoint: str = "/generate") -> None:
    """Submit a request as another frontend would."""
    event = Submitted(endpoint=endpoint, frontend="web-9", prompt="p", sampling=SamplingParams())
    log.submit(uid, [event])


async def abort(here: Site, **body: Any) -> dict[str, list[str]]:
    response = await here.client.post(ABORT, json=body)
    assert response.status_code == 200
    told: dict[str, list[str]] = await response.get_json()
    assert set(told) == {"aborted", "ended", "unknown"}
    return told


async def test_a_request_is_ended_by_the_id_of_its_answer_and_its_client_is_told(
    here: Site, there: Site, stand_in: StandIn
) -> None:
    answer = asyncio.create_task(code_of(here.post(chat("silent"))))
    uid = await one_request(stand_in)
    assert await abort(there, rid=f"chatcmpl-{uid}") == {"aborted": [uid], "ended": [], "unknown": []}
    assert await answer == (499, "cancelled")
    assert await abort(here, rid=uid, abort_all=False) == {"aborted": [], "ended": [uid], "unknown": []}
    assert seal_of(stand_in.stages.log, uid)["by"] == "client"


async def test_what_is_no_request_is_no_error_and_what_is_no_body_is_one(bare: Site) -> None:
    for rid in ("x" * 256, "00000000000070008000000000000000"):
        assert await abort(bare, rid=rid) == {"aborted": [], "ended": [], "unknown": [rid]}
    response = await bare.client.post(ABORT, json={"rid": "x", "zeta": 1})
    assert response.headers["x-minisgl-unknown-fields"] == "zeta"
    status, error = await error_of(bare.client.post(ABORT, json={}))
    assert (status, error["param"]) == (400, "rid")


async def test_all_that_clients_have_sent_is_ended_whichever_frontend_took_it_and_nothing_else(
    bare: Site, stages: Stages
) -> None:
    uids = [new_uid() for _ in range(2 * AT_ONCE + 3)]
    for uid in uids:
        submit(stages.log, uid)
    probe, ended = new_uid(), new_uid()
    submit(stages.log, probe, endpoint="probe")
    submit(stages.log, ended)
    await abort(bare, rid=ended)
    with capture_logs() as lines:
        told = await abort(bare, abort_all=True)
    assert (sorted(told["aborted"]), told["ended"], told["unknown"]) == (sorted(uids), [], [])
    (line,) = [line for line in lines if line["event"] == "requests_aborted"]
    assert (line["all"], line["aborted"]) == (True, len(uids))
    assert (await abort(bare, abort_all=True, rid=""))["aborted"] == []
    assert set(stages.log.living()) == {probe}, "it belongs to no client, and says whether the server is ready"
