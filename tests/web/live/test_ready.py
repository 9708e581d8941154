"""GET /ready and /health_generate: whether every stage is there, and a token goes through all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, closing
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.redis_servers import RunningServer, command
from support.stand_in_stages import CONTEXT, MODELS, Stages, StandIn, finished, tokens
from support.web_site import Site, chat, error_of, seal_of, site, until

import web.live.ready
from pipeline.events import SamplingParams
from pipeline.log.protocol import RequestLimits
from pipeline.log.redis import AsyncRedisLog
from pipeline.names import Names
from pipeline.stage.slots import Offer, Phase, Status

PATH = "/health_generate"


@pytest.fixture
def always_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found before counts for nobody."""
    monkeypatch.setattr(web.live.ready, "TRIAL_COUNTS_S", 0.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes is seen at once."""
    monkeypatch.setattr(web.live.ready, "POLL_READY_S", 0.02)


async def health(here: Site) -> tuple[int, dict[str, Any]]:
    response = await here.client.get(PATH)
    return response.status_code, await response.get_json()


def probes(stand_in: StandIn) -> list[str]:
    return [uid for uid, event in stand_in.seen if event.endpoint == "probe"]


OK: dict[str, Any] = {"status": "ok", "waiting_for": [], "detail": ""}


async def test_each_time_a_token_goes_through_every_stage(
    here: Site, redis_url: str, stand_in: StandIn, always_new: None
) -> None:
    for num_probes in (2, 3):  # the first one was that of the start
        assert await health(here) == (200, OK)
        assert len(probes(stand_in)) == num_probes
    _, event = stand_in.seen[-1]
    assert (event.sampling.max_tokens, event.sampling.temperature) == (1, 0)
    assert command(redis_url, "ZCARD", Names().live) == 0


async def test_those_who_ask_at_once_share_one_token_and_none_who_leaves_takes_it_along(
    bare: Site, stages: Stages, always_new: None
) -> None:
    stages.say_phase("ready")
    await until(lambda: bare.frontend.readiness.waiting_for == ("probe",))
    await asyncio.to_thread(answer_one, stages)  # that of the start
    await until(lambda: bare.frontend.readiness.probed)
    async with bare.reading(PATH):
        asking = [asyncio.create_task(health(bare)) for _ in range(5)]
        await until(lambda: bare.frontend.tail.listeners)
    await asyncio.to_thread(answer_one, stages)
    assert await asyncio.gather(*asking) == 5 * [(200, OK)]
    assert await asyncio.to_thread(stages.take_in) == []


def answer_one(stages: Stages) -> None:
    while not (came := stages.take_in()):
        pass
    ((uid, _),) = came
    stages.say(uid, 1, tokens(1), finished(1), frontend="web-0")


async def test_a_token_of_the_last_second_counts_whoever_it_was_for(here: Site, stand_in: StandIn) -> None:
    async with here.connection(chat("endless", stream=True)) as connection:
        await connection.receive()
        assert await health(here) == (200, OK)
    assert len(probes(stand_in)) == 1


async def test_a_stage_that_is_not_there_is_named_at_once(
    here: Site, redis_url: str, stand_in: StandIn, always_new: None
) -> None:
    command(redis_url, "DEL", Names().status("generate-0"))
    await until(lambda: here.frontend.readiness.missing)
    assert await health(here) == (503, {"status": "loading", "waiting_for": ["generate"], "detail": ""})
    assert len(probes(stand_in)) == 1


async def test_a_token_that_does_not_come_is_waited_for_and_cancelled_and_nobody_asks_for_another_at_once(
    here: Site, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.ready, "TRIAL_PATIENCE_S", 0.2)
    stand_in.answers_probes = False
    expected = {"status": "failing", "waiting_for": ["probe"], "detail": "nothing within 0.2 s"}
    for counts_s in (0.0, 60.0):
        monkeypatch.setattr(web.live.ready, "TRIAL_COUNTS_S", counts_s)
        assert await health(here) == (503, expected)
    _, uid = probes(stand_in)
    await until(lambda: not here.is_busy)
    assert (await here.client.get("/health")).status_code == 200, "the process lives all the same"
    assert seal_of(stand_in.stages.log, uid)["by"] == "web"


async def test_behind_much_work_the_tokens_of_others_show_that_every_stage_works(
    here: Site, stand_in: StandIn, always_new: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.ready, "TRIAL_PATIENCE_S", 0.2)
    async with here.connection(chat("endless", stream=True)) as connection:
        await connection.receive()
        stand_in.answers_probes = False
        assert await health(here) == (200, OK)
    assert len(probes(stand_in)) == 2


async def test_a_server_that_takes_nothing_more_is_not_well(
    redis_url: str, stand_in: StandIn, always_new: None
) -> None:
    async with site(redis_url, limits=RequestLimits(max_queued=1)) as here, here.waiting():
        await until(stand_in.requests)
        status, body = await health(here)
        assert (status, body["detail"]) == (503, "too many requests are waiting")


async def test_a_server_that_goes_down_says_so(here: Site) -> None:
    await here.frontend.drain(0.1)
    assert await health(here) == (503, {"status": "draining", "waiting_for": [], "detail": ""})


async def test_without_redis_nobody_waits_for_long_and_nothing_is_said_of_where_it_is(
    own_redis: RunningServer, always_new: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.ready, "TRIAL_PATIENCE_S", 0.2)
    monkeypatch.setattr(web.live.ready, "TRIAL_LOG_PATIENCE_S", 0.2)
    stand_in = StandIn(own_redis.url)
    async with site(own_redis.url) as here:
        stand_in.close()
        own_redis.process.kill()
        own_redis.process.wait()
        status, body = await health(here)
        assert (status, body["detail"]) == (503, "the log does not answer")


# the probe, and what is ready


async def test_while_no_engine_is_ready_the_ranks_that_are_not_are_named(bare: Site, stages: Stages) -> None:
    owners = [stages.log.acquire(f"rank-{rank}-0", "here", 60_000) for rank in range(2)]

    def say(rank: int, phase: Phase) -> None:
        owner = owners[rank]
        assert owner is not None
        status = Status(slot=owner.slot, owner=str(owner), pid=1, host="here", phase=phase, group="g", num_ranks=3)
        assert stages.log.renew(owner, 60_000, status.model_dump_json())

    readiness = bare.frontend.readiness
    stages.say_phase("ready", "tokenize", "detokenize")
    say(0, "waiting")
    say(1, "ready")
    await until(lambda: readiness.waiting_for == ("generate", "rank-0", "rank-2"))
    phases = [each["phase"] for name, each in readiness.stages().items() if name.startswith("rank")]
    assert phases == ["waiting", "ready", "absent"]
    stages.say_phase("ready", "generate")
    await until(lambda: readiness.waiting_for == ("probe",))


async def test_it_is_ready_once_every_stage_is_and_a_token_went_through(redis_url: str, stages: Stages) -> None:
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


def on_demand(url: str) -> AbstractAsyncContextManager[Site]:
    return site(url, ready=False, engines_on_demand=True)


async def test_where_engines_come_on_demand_requests_are_taken_without_one_and_no_probe_starts_one(
    redis_url: str,
) -> None:
    with closing(Stages(redis_url, {"temperature": 0.6})) as stages:
        async with on_demand(redis_url) as here:
            assert (await here.client.get("/ready")).status_code == 503
            stages.say_phase("ready")
            await until(lambda: here.frontend.readiness.sampling_defaults)
            assert (await here.get(PATH)).status_code == 200
        stages.leave("generate")
        async with on_demand(redis_url) as here:  # one that has never seen an engine
            ready = here.frontend.readiness
            await until(lambda: not ready.waiting_for)
            assert (await here.client.get("/ready")).status_code == 200
            assert ready.missing == ("generate",)
            assert (ready.models, ready.context, ready.batch_invariant) == (MODELS, CONTEXT, True)
            assert ready.sampling_defaults == {"temperature": 0.6}
            assert (await here.client.get(PATH)).status_code == 503
            assert stages.take_in() == []
            asking = asyncio.create_task(here.post(chat()))
            await until(lambda: stages.waiting() == 1)
            ((uid, _),) = await asyncio.to_thread(stages.take_in)
            stages.say_phase("ready", "generate")
            await asyncio.to_thread(stages.say, uid, 1, tokens(1), finished(1), frontend="web-0")
            assert (await asking).status_code == 200
            stages.say_phase("loading", "tokenize")
            await until(lambda: ready.waiting_for == ("tokenize",))


async def test_a_request_for_a_model_that_nobody_knows_yet_is_taken_because_it_starts_the_engine(
    redis_url: str,
) -> None:
    with closing(Stages(redis_url)) as stages:
        stages.say_phase("ready", "detokenize")
        stages.say_phase("waiting", "tokenize")  # for an engine, which knows the context
        async with on_demand(redis_url) as here:
            await until(lambda: not here.frontend.readiness.waiting_for)
            assert (await here.client.get("/v1/models")).status_code == 200
            assert (await here.client.get("/server_info")).status_code == 200
            assert (await here.client.get("/v1/models/any")).status_code == 200
            asking = asyncio.create_task(here.post(chat(model="any")))
            await until(lambda: stages.waiting() == 1)
            ((uid, event),) = await asyncio.to_thread(stages.take_in)
            assert event.model == "any"
            await asyncio.to_thread(stages.say, uid, 1, tokens(1), finished(1), frontend="web-0")
            assert (await asking).status_code == 200


async def test_the_offer_of_another_tokenizers_model_does_not_count(redis_url: str) -> None:
    with closing(Stages(redis_url, {"temperature": 0.6})) as stages:
        stages.say_phase("ready")
        async with on_demand(redis_url) as here:
            await until(lambda: here.frontend.readiness.models)
            stages.leave("generate")
            stages.tokenizer = "of another model"
            stages.say_phase("waiting", "tokenize")
            await until(lambda: not here.frontend.readiness.models)
            assert here.frontend.readiness.sampling_defaults == {} and not here.frontend.readiness.waiting_for


async def test_an_offer_that_the_log_has_lost_or_of_an_earlier_model_is_kept_again(redis_url: str) -> None:
    with closing(Stages(redis_url)) as stages:
        stages.say_phase("ready")
        async with on_demand(redis_url):
            await until(stages.log.last_engine)
            command(redis_url, "DEL", Names().last_engine)
            await until(stages.log.last_engine)
            for lost in ("{", '{"models": ["of old"]}'):
                command(redis_url, "SET", Names().last_engine, lost)
                await until(lambda: Offer.parse(stages.log.last_engine()).models == MODELS)
    async with site(redis_url, ready=False) as here:  # a frontend that waits for engines does not look
        await until(lambda: here.frontend.readiness.missing)
        assert here.frontend.readiness.models == ()


async def test_a_full_log_does_not_make_a_frontend_with_engines_on_demand_unready(redis_url: str) -> None:
    with closing(Stages(redis_url)) as stages:
        stages.say_phase("ready")
        command(redis_url, "CONFIG", "SET", "maxmemory", "1")
        async with on_demand(redis_url) as here:
            await until(lambda: here.frontend.readiness.models == MODELS)
            assert not here.frontend.readiness.waiting_for
        command(redis_url, "CONFIG", "SET", "maxmemory", "0")


async def test_a_frontend_takes_requests_while_the_only_engine_starts_again(redis_url: str, stand_in: StandIn) -> None:
    path = "/ready?for=requests"
    async with site(redis_url, ready=False) as here:
        await until(lambda: here.frontend.readiness.probed)
        assert (await here.client.get(path)).status_code == 200
        stand_in.stages.say_phase("loading", "generate")
        await until(lambda: here.frontend.readiness.missing == ("generate",))
        assert (await here.client.get("/ready")).status_code == 503
        assert (await here.client.get(path)).status_code == 200
        here.frontend.draining = True
        assert (await here.client.get(path)).status_code == 503


async def test_a_frontend_that_has_seen_no_engine_takes_no_requests(bare: Site) -> None:
    assert (await bare.client.get("/ready?for=requests")).status_code == 503


async def test_requests_are_taken_while_the_probe_waits_behind_others_and_their_tokens_are_as_good(
    redis_url: str, stand_in: StandIn
) -> None:
    stand_in.answers_probes = False
    async with site(redis_url, ready=False) as here:
        await until(lambda: len(stand_in.seen) == 1)  # the probe, which nobody answers
        response = await here.client.get("/ready")
        assert response.status_code == 503 and (await response.get_json())["waiting_for"] == ["probe"]
        assert (await here.post(chat())).status_code == 200
        await until(lambda: not here.frontend.readiness.waiting_for)
        assert (await here.client.get("/ready")).status_code == 200


async def test_a_probe_that_is_not_answered_is_cancelled_and_sent_again_with_more_patience(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.ready, "PROBE_PATIENCE_S", 0.1)
    monkeypatch.setattr(web.live.ready, "PROBE_RETRY_S", 0.01)
    stand_in.answers_probes = False
    with capture_logs() as lines:
        async with site(redis_url, ready=False) as here:
            await until(lambda: len(stand_in.seen) == 3)
            stand_in.answers_probes = True
            await until(lambda: not here.frontend.readiness.waiting_for)
            assert (await here.client.get("/ready")).status_code == 200
    failed = [line for line in lines if line["event"] == "probe_failed"]
    assert [line["uid"] for line in failed] == [uid for uid, _ in stand_in.seen[: len(failed)]]
    assert [line["outcome"] for line in failed[:3]] == [f"nothing within {s} s" for s in ("0.1", "0.2", "0.4")]
    assert {seal_of(stand_in.stages.log, line["uid"])["by"] for line in failed} == {"web"}


async def test_a_probe_that_cannot_be_submitted_is_sent_again(
    redis_url: str, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.ready, "PROBE_RETRY_S", 0.01)
    command(redis_url, "CONFIG", "SET", "maxmemory", "1")
    with capture_logs() as lines:
        async with site(redis_url, ready=False) as here:
            await until(lambda: [line for line in lines if line["event"] == "probe_failed"])
            command(redis_url, "CONFIG", "SET", "maxmemory", "0")
            await until(lambda: not here.frontend.readiness.waiting_for)


async def test_stages_are_looked_at_while_the_probe_is_under_way_and_again_before_ready_is_said(
    bare: Site, stages: Stages
) -> None:
    readiness = bare.frontend.readiness
    stages.say_phase("ready")
    await until(lambda: readiness.waiting_for == ("probe",) and bare.frontend.tail.listeners)
    stages.say_phase("loading", "detokenize")
    await until(lambda: readiness.waiting_for == ("detokenize",))
    stages.say_phase("ready", "detokenize")
    await until(lambda: readiness.waiting_for == ("probe",))
    ((uid, _),) = stages.take_in()
    stages.say_phase("loading", "generate")  # what was said before was of the server before
    stages.say(uid, 1, tokens(1), finished(1), frontend="web-0")
    await until(lambda: readiness.probed)
    assert readiness.waiting_for == ("generate",)
    assert [said["phase"] for said in bare.said if said["phase"] != "waiting"] == []


async def test_the_model_of_the_server_before_is_not_served_while_the_next_one_loads(
    bare: Site, stages: Stages
) -> None:
    stages.say_phase("ready")
    await until(lambda: bare.frontend.readiness.models)
    stages.say_phase("loading", "generate")
    await until(lambda: bare.frontend.readiness.waiting_for == ("generate",))
    assert (await error_of(bare.post(chat(model="the-next"))))[1]["code"] == "loading"
    assert (await (await bare.client.get("/v1/models")).get_json())["data"] == []


async def test_no_request_sees_half_of_a_poll(bare: Site, stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    readiness = bare.frontend.readiness

    async def statuses_of_ranks(log: AsyncRedisLog) -> dict[str, Sequence[Status]]:
        seen.append(("generate" in readiness.missing, not readiness.models))
        return {}

    monkeypatch.setattr(web.live.ready, "statuses_of_ranks", statuses_of_ranks)
    stages.say_phase("ready")
    await until(lambda: readiness.models)
    stages.say_phase("loading", "generate")
    await until(lambda: not readiness.models)
    assert all(without_engine == without_model for without_engine, without_model in seen)


async def test_a_model_whose_engines_died_is_not_served_beside_the_one_that_came_after_it(
    bare: Site, stages: Stages
) -> None:
    """Statuses stay for 10 s. The next engine has the lowest slot that is free, or announces itself there."""
    dead = Status(slot="generate-1", owner="1:n", pid=1, host="h", phase="ready", models=("dead",), context=8)
    for slot in ("generate-1", "generate-2"):
        owner = stages.log.acquire(slot, "n", 60_000)
        assert owner is not None
        status = dead.model_copy(update={"slot": slot, "fingerprint": "w0"})
        assert stages.log.renew(owner, 60_000, status.model_dump_json())
    await until(lambda: bare.frontend.readiness.models == ("dead",))
    stages.say_phase("ready")
    await until(lambda: "demo" in bare.frontend.readiness.models)
    assert (bare.frontend.readiness.models, bare.frontend.readiness.context) == (MODELS, CONTEXT)


async def test_a_stage_that_is_down_for_a_moment_refuses_no_request(here: Site, redis_url: str) -> None:
    for stage in ("generate-0", "tokenize-0"):
        command(redis_url, "DEL", Names().status(stage))
    await until(lambda: here.frontend.readiness.waiting_for == ("tokenize", "generate"))
    assert (await here.client.get("/ready")).status_code == 503
    assert (await here.post(chat(model="demo"))).status_code == 200


async def test_what_a_request_does_not_say_of_sampling_is_as_the_model_recommends(redis_url: str) -> None:
    recommended = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}

    stages = Stages(redis_url, recommended)
    with closing(StandIn(redis_url, stages)) as stand_in:
        async with site(redis_url) as here:
            for fields in ({}, {"temperature": None, "top_k": None}, {"temperature": 1, "top_k": 0, "top_p": 1}):
                assert (await here.post(chat(seed=1, **fields))).status_code == 200
            command(redis_url, "DEL", Names().status("generate-0"))  # a moment without an engine
            await until(lambda: here.frontend.readiness.waiting_for == ("generate",))
            assert (await here.post(chat(seed=1))).status_code == 200
            stages.sampling_defaults = {}  # another one, that was told to recommend nothing
            stages.say_phase("ready", "generate")
            await until(lambda: not (here.frontend.readiness.waiting_for or here.frontend.readiness.sampling_defaults))
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
