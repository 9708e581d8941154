"""GET /metrics of a real server: after known requests every count is exactly theirs, through every process."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
import pytest
from support.measured import Scrape
from support.servers import MEASURED_CONTEXT as CONTEXT
from support.servers import Server, eventually
from support.streams import Stream, body, events_of

from pipeline.events import Finished, TakenOver, Tokenized, TokensProduced
from pipeline.names import GENERATE, STAGES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("measured_server")]

PAGE_SIZE = 16
CHAT = "/v1/chat/completions"
LONG_PROMPT = "The log is the memory of the program. " * 4


@pytest.fixture(scope="module")
def server(measured_server: Server) -> Server:
    return measured_server


def scrape(server: Server) -> Scrape:
    response = httpx.get(f"{server.url}/metrics", timeout=10)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Scrape(response.text)


class Since:
    """What was counted since a scrape, of all slots together."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.before = self.now = scrape(server)

    def count(self, name: str, **labels: str) -> float:
        return sum(self.now.of(name, **labels).values()) - sum(self.before.of(name, **labels).values())

    def is_now(self, **counts: float) -> bool:
        """Look again: say whether so much was counted."""
        self.now = scrape(self.server)
        return {name: self.count(name) for name in counts} == counts


def settled(server: Server) -> Since:
    """Wait until the processes have said all that they counted: the last of it is the end of a request."""
    wanted = ("tokenize_prompts_total", "prompt_tokens_total", "e2e_request_latency_seconds_count")

    def all_said() -> bool:
        seen = scrape(server)
        return seen.total("tokenize_prompts_total") == seen.total("e2e_request_latency_seconds_count") >= 1

    eventually(all_said, f"{wanted} agree")
    return Since(server)


def test_after_some_requests_every_count_is_exactly_theirs(server: Server) -> None:
    since = settled(server)
    streams = [Stream(server, f"{LONG_PROMPT} {number}", max_tokens=5 + number) for number in range(3)]
    uids = [stream.join().uid for stream in streams]
    for number in range(3):  # the last one comes twice: most of its prompt is in the cache
        answer = server.post(body(f"Whole number {min(number, 1)}. {LONG_PROMPT}", max_tokens=4))
        assert answer.status_code == 200
        uids.append(answer.headers["x-minisgl-uid"])
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= PAGE_SIZE
    assert server.post(body("Too much. " * CONTEXT)).status_code == 400  # says the tokenizer
    assert server.post(body("Hot.", temperature=9)).status_code == 400  # says the frontend
    assert httpx.get(f"{server.url}/v1/nowhere/{uids[0]}").status_code == 404
    with server.log() as log:
        histories = [events_of(log, uid) for uid in uids]
    ends = [events[-1] for events in histories]
    finished = [end for end in ends if isinstance(end, Finished)]
    assert len(finished) == 6
    cached = sum(end.usage.cached_tokens for end in finished)
    prompts = sum(len(event.token_ids) for events in histories for event in events if isinstance(event, Tokenized))
    tokens = sum(event.count for events in histories for event in events if isinstance(event, TokensProduced))
    assert tokens == 5 + 6 + 7 + 3 * 4

    eventually(
        lambda: since.is_now(
            tokenize_prompts_total=6,
            tokenize_tokens_total=prompts,
            tokenize_refusals_total=1,
            prompt_tokens_total=prompts,
            generation_tokens_total=tokens,
            prefix_cache_queries_total=prompts,
            prefix_cache_hits_total=cached,
            iteration_tokens_total_sum=prompts - cached + tokens,
            time_to_first_token_seconds_count=6,
            inter_token_latency_seconds_count=tokens - 6,
            e2e_request_latency_seconds_count=6,
            request_prompt_tokens_sum=prompts,
            request_generation_tokens_sum=tokens,
            request_success_total=6,
            request_params_n_sum=6,
            request_params_max_tokens_sum=tokens,  # each answer has as many as it may
            request_max_num_generation_tokens_sum=tokens,
        ),
        "every process has said what it counted",
    )
    assert since.count("request_success_total", finished_reason="length", slot="detokenize-0", model_name="llama") == 6
    assert since.count("tokenize_refusals_total", code="context_length_exceeded", slot="tokenize-0") == 1
    milliseconds: Mapping[str, int] = {
        "time_to_first_token_seconds": sum(end.timings.first_token_ms for end in finished),
        "e2e_request_latency_seconds": sum(end.timings.total_ms for end in finished),
        "request_queue_time_seconds": sum(end.timings.admitted_ms for end in finished),
        "request_prefill_time_seconds": sum(end.timings.first_token_ms - end.timings.admitted_ms for end in finished),
        "request_decode_time_seconds": sum(end.timings.total_ms - end.timings.first_token_ms for end in finished),
        "inter_token_latency_seconds": sum(end.timings.total_ms - end.timings.first_token_ms for end in finished),
    }
    for name, expected_ms in milliseconds.items():
        assert since.count(f"{name}_sum") * 1000 == pytest.approx(expected_ms, abs=0.01), name
    assert milliseconds["e2e_request_latency_seconds"] > 0  # the parts of so short a time can all be 0 ms
    cache = {"block_size": str(PAGE_SIZE), "enable_prefix_caching": "True", "slot": "generate-0", "model_name": "llama"}
    assert since.now.total("cache_config_info", **cache) == 1
    assert since.now.values("process_resident_memory_bytes", "slot") == {f"{stage}-0" for stage in STAGES}
    steps = since.count("step_time_seconds_count")
    assert steps == since.count("iteration_tokens_total_count") >= max(7, 3 * 4)
    commits = {name: since.count("commit_latency_seconds_count", commit=name) for name in ("submit", "tokenized")}
    assert commits == {"submit": 7, "tokenized": 6}
    for name in ("step", "produced"):  # short steps share commits, but not those of requests that come one by one
        assert since.count("commit_latency_seconds_count", commit=name) >= 3
    assert since.count("http_requests_total", endpoint=CHAT, method="POST") == 8
    assert since.count("http_responses_total", endpoint=CHAT, status_code="200") == 6
    assert since.count("http_responses_total", endpoint=CHAT, status_code="400") == 2
    assert since.count("http_responses_total", endpoint="unknown", status_code="404") == 1
    for name in ("disconnects_total", "gap_fills_total", "admission_rejections_total", "num_preemptions_total"):
        assert since.count(name) == 0, name
    holds = {name: since.now.total(name) for name in ("num_requests_running", "kv_cache_usage_perc", "streams_open")}
    assert set(holds.values()) == {0}
    assert since.now.total("num_requests_live") == since.now.total("stream_length") == 0
    assert since.now.total("worker_ready") == len(STAGES) and since.now.total("log_up") == 1


def test_a_client_that_leaves_is_counted_where_it_was_and_where_its_request_was_ended(server: Server) -> None:
    since = settled(server)
    stream = Stream(server, "Never mind.", max_tokens=CONTEXT // 2).begun()
    eventually(lambda: scrape(server).total("num_requests_running", slot="generate-0") == 1, "its engine has said so")
    during = scrape(server)
    assert during.total("streams_open", slot="web-0") == during.total("num_requests_live") == 1
    assert during.total("stream_pending", stream="tokenized") == 1 and during.total("kv_cache_usage_perc") > 0
    stream.leave()
    eventually(lambda: since.is_now(disconnects_total=1, request_success_total=1), "it is cancelled")
    assert since.count("disconnects_total", reason="client", slot="web-0") == 1
    assert since.count("request_success_total", finished_reason="abort", slot="web-0") == 1
    eventually(lambda: scrape(server).total("num_requests_running") == 0, "its engine lets go of it")
    after = scrape(server)
    assert after.total("streams_open") == after.total("num_requests_live") == 0
    eventually(lambda: since.is_now(time_to_first_token_seconds_count=1), "its detokenizer has said so")
    assert since.count("e2e_request_latency_seconds_count") == 0


@pytest.mark.night  # by day test_takeover has who took over
def test_the_counts_of_an_engine_that_died_begin_anew_and_it_says_whom_it_took_over(server: Server) -> None:
    stream = Stream(server, "Go on, whatever happens.", max_tokens=CONTEXT // 8).begun()
    before = scrape(server)
    (worker,) = server.command.workers(GENERATE)
    worker.kill()
    text, reason = stream.answer
    assert text and reason == "length"
    with server.log() as log:
        events = events_of(log, stream.uid)
    assert sum(isinstance(event, TakenOver) for event in events) == 1
    eventually(lambda: scrape(server).total("takeovers_total", slot="generate-0") == 1, "the new engine says so")
    eventually(lambda: scrape(server).total("num_requests_running") == 0, "and that it is done")
    after = scrape(server)
    assert before.total("takeovers_total") == 0
    assert 0 < after.total("generation_tokens_total") < CONTEXT // 8, "it made the rest of them"
    assert after.total("prompt_tokens_total") == 0, "and the prompt is no new one"
    tokenized = [each.total("tokenize_prompts_total") for each in (before, after)]
    assert tokenized[1] >= max(tokenized[0], 1), "nobody else died"
