"""GET /metrics: what every process measured and what the log holds, with stand-in stages behind a real Redis."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import closing
from typing import Any

import orjson
import psutil
import pytest
from support.measured import Scrape
from support.redis_servers import RunningServer, command
from support.stand_in_stages import MODELS, StandIn
from support.web_site import ADMIN, Site, bearer, chat, code_of, error_of, site, until

import web.live.metrics
import web.live.open_request
from pipeline.events import Cancelled, Failed
from pipeline.log.operations.usage import DAY_MS
from pipeline.log.protocol import DeadLetter, Inbox, Occupancy, RequestLimits, Used
from pipeline.log.redis import RedisLog
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import (
    BETWEEN_TOKENS_SECONDS,
    FAMILIES,
    GENERATION_TOKENS,
    HTTP_REQUESTS,
    NUM_RUNNING,
    NUM_WAITING,
    PREFIX,
    PROMPTS,
    REFUSALS,
    REQUEST_SUCCESS,
)
from pipeline.metrics.process import ProcessMeasures
from pipeline.names import Names
from pipeline.stage.slots import Status
from web.http.keys import Caller, Keys, hash_of, read_keys

LEASE_MS = 60_000
MODEL = MODELS[0]


async def scrape(here: Site) -> Scrape:
    response = await here.get("/metrics")
    assert response.status_code == 200
    assert response.content_type == "text/plain; version=0.0.4; charset=utf-8"
    return Scrape(await response.get_data(as_text=True))


def publish(url: str, slot: str, metrics: str, **said: Any) -> None:
    """Say what a worker in *slot* has measured, for 10 s."""
    with closing(RedisLog(url, Names())) as log:
        owner = log.acquire(slot, "test", LEASE_MS)
        assert owner is not None
        status = Status(slot=slot, owner=str(owner), pid=1, host="here", phase="ready", metrics=metrics)
        log.renew(owner, LEASE_MS, status.model_copy(update=said).model_dump_json())


async def test_one_text_shows_what_every_process_measured(here: Site, redis_url: str) -> None:
    engine, detokenizer, tokenizer, frontend = (Measures() for _ in range(4))
    engine.set(NUM_RUNNING, 3)
    engine.set(NUM_WAITING, 2)
    engine.add(GENERATION_TOKENS, amount=70)
    detokenizer.add(REQUEST_SUCCESS, "stop", amount=4)
    for seconds in (0.002, 0.002, 0.004, 100.0):
        detokenizer.observe(BETWEEN_TOKENS_SECONDS, seconds)
    tokenizer.add(PROMPTS, amount=5)
    tokenizer.add(REFUSALS, "template_error")
    frontend.add(HTTP_REQUESTS, "/health", "GET", amount=9)
    publish(redis_url, "generate-1", engine.snapshot(), models=("m",))
    publish(redis_url, "detokenize-1", detokenizer.snapshot())
    publish(redis_url, "tokenize-1", tokenizer.snapshot())
    publish(redis_url, "web-1", frontend.snapshot())

    seen = await scrape(here)
    at = {"slot": "generate-1", "model_name": "m"}
    assert seen.total("num_requests_running", **at) == 3
    assert seen.total("num_requests_waiting", **at) == seen.total("num_requests_waiting") == 2
    assert seen.total("generation_tokens_total", **at) == 70
    at = {"slot": "detokenize-1", "model_name": "m"}  # the model of the engine whose steps it reads
    assert seen.total("request_success_total", finished_reason="stop", **at) == 4
    buckets = {bound: seen.total("inter_token_latency_seconds_bucket", le=bound, **at) for bound in ("0.001", "+Inf")}
    assert buckets == {"0.001": 0, "+Inf": 4}
    assert seen.total("inter_token_latency_seconds_bucket", le="0.002", **at) == 2
    assert seen.total("inter_token_latency_seconds_bucket", le="80.0", **at) == 3
    assert seen.total("inter_token_latency_seconds_sum", **at) == pytest.approx(100.008)
    assert seen.total("tokenize_prompts_total", slot="tokenize-1") == 5
    assert seen.total("tokenize_refusals_total", slot="tokenize-1", code="template_error") == 1
    assert seen.total("http_requests_total", slot="web-1", endpoint="/health") == 9
    assert seen.values("http_requests_total", "slot") == {"web-0", "web-1"}
    assert seen.total("log_up") == seen.total("log_server_info", server="Valkey") == 1
    assert [version[:2] for version in seen.values("log_server_info", "version")] == ["9."]
    assert seen.total("worker_ready") == 7, "the three stand-ins, too; a frontend says itself what it is"


async def test_what_has_not_happened_yet_is_there_as_zero(here: Site, redis_url: str) -> None:
    for stage in ("tokenize", "generate", "detokenize", "archive"):
        publish(redis_url, f"{stage}-1", Measures().snapshot())

    seen = await scrape(here)
    measured = [one for one in FAMILIES if one.stages and not one.bare and (one.known or not one.labels)]
    for family in measured:
        suffix = "_count" if family.kind == "histogram" else ""
        slots = {f"{stage}-0" if stage == "web" else f"{stage}-1" for stage in family.stages}
        assert seen.values(family.name + suffix, "slot") >= slots, family.name
    assert seen.values("request_success_total", "finished_reason") == {"stop", "length", "abort", "error"}
    assert seen.total("step_time_seconds_count") == seen.total("e2e_request_latency_seconds_sum") == 0
    kinds = {PREFIX + family.name.removesuffix("_total"): family.kind for family in measured if family.buckets == ()}
    assert kinds.items() <= {name.removesuffix("_total"): kind for name, kind in seen.kinds.items()}.items()
    of_log = {series for (name, series) in seen.samples if name == f"{PREFIX}num_requests_running"}
    assert of_log == {frozenset({("slot", "generate-1"), ("model_name", MODEL)})}, "generate-0 measures nothing"


async def test_workers_of_other_versions_break_nothing(here: Site, redis_url: str) -> None:
    known, other = Measures(), Measures()
    known.add(GENERATION_TOKENS, amount=7)
    other.add(GENERATION_TOKENS, amount=8)
    other.observe(BETWEEN_TOKENS_SECONDS, 0.1)
    publish(redis_url, "generate-1", known.snapshot())
    tomorrow = {"": 1, "tomorrow_total": [[3]], "tomorrow": {"a": 1}}
    publish(redis_url, "generate-2", orjson.dumps(orjson.loads(other.snapshot()) | tomorrow).decode())
    publish(redis_url, "generate-3", "}{ no snapshot")
    with closing(RedisLog(redis_url, Names())) as log:
        for slot in ("generate-4", "detokenize-1"):
            owner = log.acquire(slot, "test", LEASE_MS)
            assert owner is not None
            log.renew(owner, LEASE_MS, '{"slot": "s", "owner": "o", "pid": 1, "host": "h", "of_tomorrow": []}')

    seen = await scrape(here)
    tokens = {slot: seen.total("generation_tokens_total", slot=slot) for slot in ("generate-1", "generate-2")}
    assert tokens == {"generate-1": 7, "generate-2": 8}
    assert seen.total("generation_tokens_total", slot="generate-3") == 0
    assert not seen.of("worker_ready", slot="generate-4")
    assert not any("tomorrow" in name for name, _ in seen.samples)


async def test_the_own_counts_are_those_of_the_moment_and_shown_once(here: Site, redis_url: str) -> None:
    older = Measures()
    older.add(HTTP_REQUESTS, "/health", "GET", amount=2)
    publish(redis_url, "web-0", older.snapshot())

    for _ in range(3):
        await here.get("/health")
    assert (await scrape(here)).total("http_requests_total", slot="web-0", endpoint="/health") == 3


# what the log holds


async def test_the_streams_show_what_waits_and_what_is_worked_on(here: Site, redis_url: str, stand_in: StandIn) -> None:
    async with here.connection(chat("silent")), here.connection(chat("silent")):
        await until(lambda: len(stand_in.requests()) == 2)
        stand_in.close()
        answers = [asyncio.create_task(here.post(chat("silent"))) for _ in range(3)]
        with closing(RedisLog(redis_url, Names())) as log:
            await until(lambda: log.backlog(Inbox.submitted(log.names)) == 3)
            entry, _ = log.read(Inbox.submitted(log.names), "tokenize-0", max_entries=2, block_ms=0)
            uid = entry.fields["uid"]
            seen = await scrape(here)
            failed = Failed(status=500, code="poisonous", message="It died.")
            letter = DeadLetter("tokenize", entry.fields, 4, "It died.")
            log.end(uid, failed, frontend="web-0", consume=entry, dead=letter)
            later = await scrape(here)
            for each in log.living():
                log.end(each, Cancelled(by="test"), frontend="web-0")
        await asyncio.wait(answers)
    depths = {
        stream: [seen.total(f"stream_{name}", stream=stream) for name in ("length", "pending", "lag")]
        for stream in ("submitted", "tokenized", "steps:generate-0")
    }
    assert depths == {"submitted": [3, 2, 1], "tokenized": [2, 2, 0], "steps:generate-0": [0, 0, 0]}
    assert seen.total("num_requests_waiting", slot="log", model_name=MODEL) == 3
    assert (seen.total("num_requests_live"), seen.total("dead_letters")) == (5, 0)
    assert (later.total("num_requests_live"), later.total("dead_letters")) == (4, 1)
    assert later.total("stream_length", stream="submitted") == 2


async def test_what_owners_used_today_is_shown_for_those_with_most_tokens_and_summed_up_for_the_others(
    bare: Site, log: RedisLog
) -> None:
    today, hashed = int(time.time() * 1000) // DAY_MS, hash_of("sk-ann")
    for number in range(60):
        log.recount(f"team-{number}", today, {"m": Used(1, 0, 1000 + number, 0, 7), "n": Used(requests=1)})
    for owner in (hashed, "other", ""):
        log.recount(owner, today, {"m": Used(5, 1, 5000, 100, 9)})
    log.recount("team-0", today - 1, {"m": Used(900, 0, 10**6, 0, 0)})
    seen = await scrape(bare)
    named = {"", hashed[:8], "other", *(f"team-{number}" for number in range(13, 60))}
    assert seen.values("owner_requests_total", "owner") == named, "50, and the sum"
    assert seen.total("owner_requests_total", owner=hashed[:8]) == 5
    assert seen.total("owner_requests_total", owner="team-59") == 2
    assert seen.total("owner_prompt_tokens_total", owner="team-59") == 1059
    assert seen.total("owner_output_tokens_total", owner="") == 9
    assert seen.total("owner_prompt_tokens_total", owner="other") == 5000 + sum(1000 + number for number in range(13))
    assert seen.kinds[f"{PREFIX}owner_requests"] == "counter"


@pytest.mark.parametrize(
    "keys", [read_keys(["sk-ann"], "", ADMIN), read_keys((), "", ADMIN), read_keys(["sk-ann"], "")]
)
async def test_with_keys_only_the_admin_key_sees_owners_and_their_usage(
    redis_url: str, log: RedisLog, keys: Keys
) -> None:
    log.recount("team-a", int(time.time() * 1000) // DAY_MS, {"m": Used(requests=1)})
    async with site(redis_url, ready=False, keys=keys) as here:
        texts = {key: str(await here.read("/metrics", **bearer(key))) for key in ("", "sk-wrong", "sk-ann", ADMIN)}
    is_admin_there = keys.find([ADMIN]) is not None
    assert [key for key, text in texts.items() if "team-a" in text] == ([ADMIN] if is_admin_there else [])
    assert all("num_requests_live" in text for text in texts.values())


async def test_a_redis_that_is_gone_leaves_what_this_process_knows(
    own_redis: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.open_request, "END_TRIES", 1)
    stand_in = StandIn(own_redis.url)
    async with site(own_redis.url) as here:
        assert (await here.post(chat())).status_code == 200
        before = await scrape(here)
        stand_in.close()
        own_redis.process.kill()
        own_redis.process.wait()
        seen = await scrape(here)
        assert (await error_of(here.post(chat())))[0] == 503
        rejected = await scrape(here)
    assert before.total("log_up") == 1 and before.of("stream_length")
    assert seen.total("log_up") == 0 and not seen.of("stream_length") and not seen.of("worker_ready")
    assert seen.values("http_requests_total", "slot") == {"web-0"}
    assert seen.total("http_responses_total", endpoint="/v1/chat/completions", status_code="200") == 1
    assert seen.total("commit_latency_seconds_count", commit="submit") == 1
    assert rejected.total("admission_rejections_total", reason="log_unreachable") == 1


async def test_a_redis_that_stands_still_delays_the_answer_no_longer_than_our_patience(
    own_redis: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web.live.metrics, "PATIENCE_S", 0.05)
    with closing(StandIn(own_redis.url)):
        async with site(own_redis.url) as here:
            own_redis.process.send_signal(signal.SIGSTOP)
            try:
                assert (await scrape(here)).total("log_up") == 0
            finally:
                own_redis.process.send_signal(signal.SIGCONT)
            await until(lambda: not here.is_busy)
            assert (await scrape(here)).total("log_up") == 1


async def test_who_asks_while_a_text_is_made_gets_that_one(here: Site) -> None:
    times = 0
    occupancy = here.log.occupancy

    async def counted() -> Occupancy:
        nonlocal times
        times += 1
        return await occupancy()

    here.log.occupancy = counted  # type: ignore[method-assign]  # this instance's alone
    texts = [await each.get_data() for each in await asyncio.gather(*(here.get("/metrics") for _ in range(5)))]
    assert len(set(texts)) == 1 and times == 1
    await scrape(here)
    assert times == 2


async def test_a_process_is_measured_by_the_names_of_prometheus_own_libraries(here: Site, redis_url: str) -> None:
    before = ProcessMeasures()
    sum(range(2_000_000))
    text = before.snapshot()
    publish(redis_url, "generate-1", text)
    seen = await scrape(here)
    this = psutil.Process()
    assert seen.values("process_open_fds", "slot") == {"generate-1"}, "who cannot tell says nothing"
    assert {name: kind for name, kind in seen.kinds.items() if name.startswith("process_")} == {
        "process_cpu_seconds": "counter",
        "process_resident_memory_bytes": "gauge",
        "process_virtual_memory_bytes": "gauge",
        "process_start_time_seconds": "gauge",
        "process_open_fds": "gauge",
        "process_max_fds": "gauge",
    }
    assert 0 < seen.total("process_cpu_seconds_total") <= sum(this.cpu_times()[:2])
    assert seen.total("process_start_time_seconds") == pytest.approx(this.create_time(), abs=2)
    memory = this.memory_info()
    assert seen.total("process_resident_memory_bytes") == pytest.approx(memory.rss, rel=0.3)
    assert seen.total("process_virtual_memory_bytes") == pytest.approx(memory.vms, rel=0.3)
    assert 3 <= seen.total("process_open_fds") < seen.total("process_max_fds") == this.rlimit(psutil.RLIMIT_NOFILE)[0]


# the frontend


async def test_what_clients_ask_for_is_counted_once_for_each_request_that_finished(here: Site) -> None:
    for body in (chat(), {**chat(), "max_tokens": 7}, {**chat(), "n": 3, "max_tokens": 7, "stream": True}):
        await (await here.client.post("/v1/chat/completions", json=body)).get_data()
    two = {"prompt": ["a", "b"], "n": 2, "max_tokens": 5}
    assert (await here.client.post("/v1/completions", json=two)).status_code == 200
    await error_of(here.post(chat("break")))
    assert (await here.client.post("/tokenize", json={"prompt": "ab"})).status_code == 200
    await until(lambda: not here.is_busy)
    seen = await scrape(here)

    def counted(name: str) -> tuple[float, float]:
        at = {"slot": "web-0", "model_name": MODEL}
        return seen.total(f"{name}_count", **at), seen.total(f"{name}_sum", **at)

    assert counted("request_params_n") == (5, 1 + 1 + 3 + 2 + 2)
    assert counted("request_params_max_tokens") == (1 + 3 + 4, 7 + 3 * 7 + 4 * 5)
    assert counted("request_max_num_generation_tokens") == (5, 5 * 3)


async def test_requests_and_responses_are_counted_by_route_and_never_by_path(here: Site) -> None:
    uids = [(await here.post(chat())).headers["x-minisgl-uid"] for _ in range(2)]
    await here.chunks(chat())
    await error_of(here.post(chat("refuse")))
    await error_of(here.post({"messages": 3}))
    for uid in uids:
        await here.get(f"/v1/requests/{uid}")
    for path in ("/nothing", "/nothing/else?a=1"):
        await error_of(here.get(path))
    await here.client.open("/health", method="BREW", json={})
    await here.client.head("/health")
    seen = await scrape(here)

    def counted(name: str, *labels: str) -> dict[tuple[str, ...], float]:
        found = seen.of(name, slot="web-0")
        return {tuple(dict(has)[label] for label in labels): value for has, value in found.items()}

    assert counted("http_requests_total", "endpoint", "method") == {
        ("/v1/chat/completions", "POST"): 5,
        ("/v1/requests/<name>", "GET"): 2,
        ("/health", "HEAD"): 1,
        ("/metrics", "GET"): 1,
        ("unknown", "GET"): 2,
        ("unknown", "unknown"): 1,
    }
    assert counted("http_responses_total", "endpoint", "method", "status_code") == {
        ("/v1/chat/completions", "POST", "200"): 3,
        ("/v1/chat/completions", "POST", "400"): 2,
        ("/v1/requests/<name>", "GET", "200"): 2,
        ("/health", "HEAD", "200"): 1,
        ("unknown", "GET", "404"): 2,
        ("unknown", "unknown", "405"): 1,
    }
    assert seen.total("commit_latency_seconds_count", commit="submit") == 4
    assert seen.total("disconnects_total") == seen.total("admission_rejections_total") == 0


def reasons(seen: Scrape, name: str, label: str = "reason") -> dict[str, float]:
    """Return value of *label* -> count, of the frontend's own that are not zero."""
    return {dict(has)[label]: value for has, value in seen.of(name, slot="web-0").items() if value}


async def test_streams_are_counted_while_they_are_open_and_clients_that_leave(here: Site, stand_in: StandIn) -> None:
    async with here.connection(chat("endless", stream=True)) as one, here.connection(chat("silent")):
        await one.receive()
        await until(lambda: len(stand_in.requests()) == 2)
        uid = stand_in.requests()[0][0]
        async with here.reading(f"/v1/requests/{uid}/events") as reader:
            await reader.receive()
            assert (await scrape(here)).total("streams_open", slot="web-0") == 2
    await until(lambda: not here.is_busy)
    seen = await scrape(here)
    assert seen.total("streams_open", slot="web-0") == 0
    assert reasons(seen, "disconnects_total") == {"client": 3}
    assert reasons(seen, "request_success_total", "finished_reason") == {"abort": 2}


async def test_a_client_that_does_not_get_the_end_of_its_answer_is_counted_with_the_reason(
    here: Site, stand_in: StandIn
) -> None:
    assert (await here.chunks(chat("break")))[-1]["error"]["code"] == "engine_error"
    answer = asyncio.create_task(error_of(here.post(chat("silent"))))
    await until(lambda: len(stand_in.requests()) == 2)
    assert (await here.client.delete(f"/v1/requests/{stand_in.requests()[1][0]}")).status_code == 200
    assert (await answer)[0] == 499
    here.log.limits = RequestLimits(timeout_s=0.1)
    assert await code_of(here.post(chat("silent"))) == (504, "timeout")
    here.log.limits = RequestLimits()
    answer = asyncio.create_task(error_of(here.post(chat("silent"))))
    await until(lambda: len(stand_in.requests()) == 4)
    await here.frontend.drain(0)
    assert (await answer)[0] == 503
    assert (await error_of(here.post(chat())))[1]["code"] == "shutting_down"
    seen = await scrape(here)
    assert reasons(seen, "disconnects_total") == {"error": 1, "cancelled": 1, "deadline": 1, "shutdown": 1}
    assert reasons(seen, "request_success_total", "finished_reason") == {"abort": 1, "error": 2}
    assert reasons(seen, "admission_rejections_total") == {"shutting_down": 1}


@pytest.mark.parametrize("limit", ["requests_per_minute", "concurrent_requests", "log_bytes"])
async def test_what_a_key_may_not_send_is_counted_with_the_limit(redis_url: str, stand_in: StandIn, limit: str) -> None:
    reason = {"log_bytes": "log_share"}.get(limit, limit)  # log_bytes is that of the whole log
    ann = {"authorization": "Bearer sk-ann"}
    async with site(redis_url, keys=Keys([Caller.of(hash_of("sk-ann"), **{limit: 1})])) as here:
        async with here.connection(chat("silent"), ann):
            await until(stand_in.requests)
            assert (await error_of(here.post(chat(), headers=ann)))[0] == 429
        await until(lambda: not here.is_busy)
        assert reasons(await scrape(here), "admission_rejections_total") == {reason: 1}


async def test_what_is_not_let_in_is_counted_with_the_reason(redis_url: str, stand_in: StandIn) -> None:
    async with site(redis_url, limits=RequestLimits(max_queued=1)) as here:
        command(redis_url, "CONFIG", "SET", "maxmemory", "1")
        assert (await error_of(here.post(chat())))[0] == 503
        command(redis_url, "CONFIG", "SET", "maxmemory", "0")
        async with here.waiting():
            await until(stand_in.requests)
            assert (await error_of(here.post(chat())))[0] == 503
        here.frontend.readiness.models = ()
        assert (await error_of(here.post(chat())))[1]["code"] == "loading"
        seen = await scrape(here)
    assert reasons(seen, "admission_rejections_total") == {"queue_full": 1, "log_full": 1, "loading": 1}
