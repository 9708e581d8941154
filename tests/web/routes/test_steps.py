"""GET /v1/requests/<uid>/steps: read from the journals of a Redis, in pieces, for whoever may see the request."""

from __future__ import annotations

from typing import Any

import pytest
from support.lived_requests import LivedRequests
from support.log_contract import put
from support.web_site import ADMIN, ANN, BOB, Site, bearer, code_of

import web.live.folding
from ops.replay.show import why
from pipeline.events import Chunk, StepCompleted, StepStats, TokenRow, encode
from pipeline.log.journal import JournalWriter
from pipeline.log.protocol import Entry
from pipeline.log.redis import RedisLog
from pipeline.names import Names, new_uid
from web.http.keys import hash_of

ENGINE = "generate-0"


def submitted_ms(log: RedisLog, uid: str) -> int:
    return int(log.histories([uid])[0][0].fields["ms"])


class Journalled:
    """An engine whose steps are in its journal; each has a token for all requests that run."""

    def __init__(self, log: RedisLog, uid: str, *, first: int = 1) -> None:
        self._log, self._writer, self._number = log, JournalWriter(), first
        self._submitted_ms = submitted_ms(log, uid)

    def steps(self, after_ms: int, count: int, **running: int) -> None:
        """Make steps, 10 ms apart, the first so long after *uid* was submitted.

        *running*: uid -> the number of its first token here, or 0 for a prompt of 5.
        """
        began_ms = self._submitted_ms + after_ms
        for index in range(count):
            step = StepCompleted(
                rows=tuple(TokenRow(uid=uid, n=n + index, token=7) for uid, n in running.items() if n),
                chunks=tuple(Chunk(uid=uid, start=0, count=5) for uid, n in running.items() if not n),
                figures=StepStats(decode_rows=sum(n > 0 for n in running.values()), forward_ms=9, free_pages=100),
            )
            entry = Entry(f"1-{self._number}", {"ms": str(began_ms + 10 * index)} | encode(step))
            put(self._log, self._log.names.journal(ENGINE), self._writer.fields(entry, step), entry.id)
            self._number += 1


async def steps_of(here: Site, uid: str, key: str = "") -> dict[str, Any]:
    response = await here.get(f"/v1/requests/{uid}/steps", **bearer(key))
    told: dict[str, Any] = await response.get_json()
    assert response.status_code == 200, told
    return told


def lived_with(log: RedisLog, texts: int, *, owner: str = "") -> str:
    """Return a request of *owner* that was admitted in step 1 and got token n in step n."""
    lived = LivedRequests(log)
    lived.owner = owner
    uid = lived.running()
    lived.tokens(uid, *texts * "x")
    lived.finished(uid, texts)
    return uid


@pytest.mark.parametrize("at_once", [2, 64])
async def test_the_steps_are_those_of_the_journal_however_they_are_read(
    bare: Site, log: RedisLog, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(web.live.folding, "READ_AT_ONCE", at_once)
    monkeypatch.setattr(web.live.folding, "LONG", at_once)
    uid, other = lived_with(log, 7), new_uid()
    Journalled(log, uid).steps(10, 7, **{other: 4, uid: 1})
    told = await steps_of(bare, uid)
    assert [(step["id"], step["n"], step["rows"]) for step in told["steps"]] == [(f"1-{n}", n, 2) for n in range(1, 8)]
    assert [step.get("companions") for step in told["steps"]] == [[other], *6 * [None]]
    assert (told["uid"], told["complete"], told["others"]) == (uid, True, 0)


async def test_rows_that_a_step_does_not_repeat_are_found_before_the_first_one(
    bare: Site, log: RedisLog, lived: LivedRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.folding, "READ_AT_ONCE", 3)
    uid, other = lived.running(), new_uid()
    engine = Journalled(log, uid)
    engine.steps(-1000, 20, **{other: 1})
    engine.steps(10, 1, **{other: 21, uid: 0})
    told = await steps_of(bare, uid)
    assert [(step["id"], step["prompt_tokens"], step["companions"]) for step in told["steps"]] == [("1-21", 5, [other])]


async def test_a_late_token_has_the_reasons_that_replay_show_gives(bare: Site, log: RedisLog) -> None:
    uid = lived_with(log, 3)
    engine = Journalled(log, uid, first=0)
    engine.steps(5, 1, **{new_uid(): 0})
    engine.steps(400, 3, **{uid: 1})
    told = await steps_of(bare, uid)
    (wait,) = [wait for wait in told["waits"] if wait["n"] == 1]
    shown = why(log, ENGINE, "1-1", uid, 1, submitted_ms(log, uid))
    assert shown is not None
    assert told["complete"] and wait["waited_ms"] == shown.waited_ms == 400
    assert wait["why"] == shown.reasons and wait["why"][0] == "a prompt of 5 tokens was prefilled in 1 chunk"


async def test_requests_of_other_owners_are_numbers(keyed: Site, log: RedisLog) -> None:
    mine, friend, other = (lived_with(log, 2, owner=hash_of(key)) for key in (ANN, ANN, BOB))
    unknown = new_uid()
    engine = Journalled(log, mine)
    engine.steps(10, 1, **{other: 1, mine: 1, friend: 1})
    engine.steps(20, 1, **{unknown: 1, mine: 2, other: 2})
    told = await steps_of(keyed, mine, ANN)
    assert [step["companions"] for step in told["steps"]] == [[1, friend], [2, 1]]
    assert told["others"] == 2 and other not in str(told)
    told = await steps_of(keyed, mine, ADMIN)
    assert [step["companions"] for step in told["steps"]] == [[other, friend], [unknown, other]]
    assert await code_of(keyed.get(f"/v1/requests/{mine}/steps", **bearer(BOB))) == (404, "request_not_found")


async def test_without_a_journal_nothing_is_known_and_siblings_have_their_own(bare: Site, log: RedisLog) -> None:
    uid = lived_with(log, 2)
    waiting = LivedRequests(log).submitted()
    assert await steps_of(bare, uid) == {"uid": uid, "complete": False, "others": 0, "steps": [], "waits": []}
    assert (await steps_of(bare, waiting))["complete"] is True
    base = new_uid()
    before = log.histories([waiting])[0][0]
    for index in range(2):
        fields = dict(before.fields) | {"siblings": "2"}
        put(log, Names().request(f"{base}.{index}"), fields, "0-1")
    assert await code_of(bare.get(f"/v1/requests/{base}/steps")) == (400, "several_requests")
    assert (await steps_of(bare, f"{base}.1"))["steps"] == []
