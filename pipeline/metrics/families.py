"""The definitions of all metrics: every family that /metrics shows, declared once.

Names and meanings are vLLM's where it has them, under `minisgl:`. Buckets hold all of vLLM's bounds, so that its
dashboards read the same, and finer ones below, because a step may take less than its first. Knows no values.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from pipeline.names import ARCHIVE, DETOKENIZE, GENERATE, STAGES, TOKENIZE, WEB

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

PREFIX: Final = "minisgl:"
SLOT: Final = "slot"
MODEL: Final = "model_name"
LOG_SLOT: Final = "log"
"""Stands for the slot of entries that wait in the log and that no worker has."""


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One metric. A counter's name ends in `_total`; its samples have the labels `slot`, `model_name` and its own."""

    name: str
    kind: Kind
    help: str
    stages: tuple[str, ...] = ()
    """Stages that measure it; empty: the process that shows metrics reads it from the log."""
    labels: tuple[str, ...] = ()
    """Names of its own labels. Their values are never a client's words: Prometheus keeps a series for each value."""
    known: tuple[str, ...] = ()
    """Values of the only label that are shown as 0 from the start, so that a rate counts the first event."""
    buckets: tuple[float, ...] = ()
    """Upper bounds, inclusive. One more bucket, above all of them, is implied."""
    of_model: bool = False
    """Whether it has the label `model_name`, as vLLM's have."""
    bare: bool = False
    """Whether it is shown without our prefix, under the name that Prometheus' client libraries use."""

    @property
    def shown_as(self) -> str:
        """Name in the text of /metrics."""
        return self.name if self.bare else PREFIX + self.name


# Bounds. vLLM's first ones are marked; what is before them is ours.

_FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S: Final = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)  # vLLM's from 0.01 on
_REQUEST_S: Final = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)  # vLLM's from 0.3 on
_TOKENS: Final = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))  # to 500,000
_STEP_TOKENS: Final = (1.0, *(float(2**power) for power in range(3, 15)))
_COMMIT_S: Final = (
    *(0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25),
    *(0.5, 1.0, 2.5, 5.0),
)
_BATCH_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


def _of_engine(name: str, kind: Kind, help: str, buckets: tuple[float, ...] = ()) -> Family:
    return Family(name, kind, help, (GENERATE,), buckets=buckets, of_model=True)


def _of_process(name: str, kind: Kind, help: str) -> Family:
    return Family(f"process_{name}", kind, help, (*STAGES, ARCHIVE), bare=True)


def _of_request(name: str, help: str, buckets: tuple[float, ...]) -> Family:
    return Family(name, "histogram", help, (DETOKENIZE,), buckets=buckets, of_model=True)


# An engine.

NUM_RUNNING: Final = _of_engine("num_requests_running", "gauge", "Requests that an engine computes.")
NUM_WAITING: Final = _of_engine(
    "num_requests_waiting",
    "gauge",
    f"Requests that wait to be computed: in an engine for pages or, as the slot `{LOG_SLOT}`, in the log for an engine "
    "or a tokenizer.",
)
KV_CACHE_USAGE: Final = _of_engine("kv_cache_usage_perc", "gauge", "Share of the pages that requests hold; 1 is all.")
PREFIX_QUERIES: Final = _of_engine(
    "prefix_cache_queries_total",
    "counter",
    "Prompt tokens that were looked up in the prefix cache, once for each request.",
)
PREFIX_HITS: Final = _of_engine(
    "prefix_cache_hits_total", "counter", "Prompt tokens that were found there and not computed."
)
PROMPT_TOKENS: Final = _of_engine(
    "prompt_tokens_total",
    "counter",
    "Tokens of the prompts that were computed to their end, those from the prefix cache included.",
)
GENERATION_TOKENS: Final = _of_engine(
    "generation_tokens_total", "counter", "Tokens that an engine made. Tokens after a stop string count, too."
)
DRAFT_TOKENS: Final = _of_engine(
    "spec_decode_num_draft_tokens_total", "counter", "Tokens that were drafted, and computed beside those before them."
)
ACCEPTED_TOKENS: Final = _of_engine(
    "spec_decode_num_accepted_tokens_total", "counter", "Drafted tokens that were right: steps that were not needed."
)
GENERATION_SPEED: Final = _of_engine(
    "gen_throughput",
    "gauge",
    "Tokens per second that an engine made when it last had requests, over a second or all of a shorter time.",
)
NUM_PREEMPTIONS: Final = _of_engine(
    "num_preemptions_total", "counter", "How often a request gave its pages back for another one."
)
STEP_TOKENS: Final = _of_engine(
    "iteration_tokens_total", "histogram", "Prompt and output tokens that one step computed.", _STEP_TOKENS
)
STEP_SECONDS: Final = _of_engine(
    "step_time_seconds", "histogram", "A step's forward pass, until its tokens are there.", _TOKEN_S
)
TAKEOVERS: Final = _of_engine(
    "takeovers_total", "counter", "Requests that an engine went on with which another owner of a slot had begun."
)

CACHE_CONFIG: Final = Family(
    "cache_config_info",
    "gauge",
    "Always 1; the labels tell the cache of an engine: tokens in a page, dtype, whether prefixes are shared, pages.",
    (GENERATE,),
    ("block_size", "cache_dtype", "enable_prefix_caching", "num_gpu_blocks"),
    of_model=True,
)

# A request, by Redis' clock, as its detokenizer sees it.

FIRST_TOKEN_SECONDS: Final = _of_request(
    "time_to_first_token_seconds", "From the submit of a request to its first token.", _FIRST_TOKEN_S
)
BETWEEN_TOKENS_SECONDS: Final = _of_request(
    "inter_token_latency_seconds", "From one token of a request to the next, in whole milliseconds.", _TOKEN_S
)
PER_TOKEN_SECONDS: Final = _of_request(
    "request_time_per_output_token_seconds",
    "A finished request's mean time between two tokens, where it has two.",
    _TOKEN_S,
)
REQUEST_SECONDS: Final = _of_request(
    "e2e_request_latency_seconds", "From the submit of a finished request to its last token.", _REQUEST_S
)
QUEUE_SECONDS: Final = _of_request(
    "request_queue_time_seconds",
    "From the submit of a finished request to its first admission by an engine.",
    _REQUEST_S,
)
PREFILL_SECONDS: Final = _of_request(
    "request_prefill_time_seconds", "From the admission of a finished request to its first token.", _REQUEST_S
)
DECODE_SECONDS: Final = _of_request(
    "request_decode_time_seconds", "From the first token of a finished request to its last.", _REQUEST_S
)
INFERENCE_SECONDS: Final = _of_request(
    "request_inference_time_seconds", "From the admission of a finished request to its last token.", _REQUEST_S
)
REQUEST_PROMPT_TOKENS: Final = _of_request("request_prompt_tokens", "Prompt tokens of a finished request.", _TOKENS)
REQUEST_GENERATION_TOKENS: Final = _of_request(
    "request_generation_tokens", "Tokens of a finished request's answer.", _TOKENS
)
REQUEST_SUCCESS: Final = Family(
    "request_success_total",
    "counter",
    "Requests that ended: stop, length; abort: somebody cancelled it; error: it failed. Counted by who ended it; what "
    "a tokenizer refuses is not in it.",
    (GENERATE, DETOKENIZE, WEB),
    ("finished_reason",),
    known=("stop", "length", "abort", "error"),
    of_model=True,
)

# A request as its client sent it, counted when all of its choices have finished.

PARAMS_N: Final = Family(
    "request_params_n",
    "histogram",
    "`n` of a finished request.",
    (WEB,),
    buckets=(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0),
    of_model=True,
)
PARAMS_MAX_TOKENS: Final = Family(
    "request_params_max_tokens",
    "histogram",
    "`max_tokens` of each choice of a finished request, where it has a limit.",
    (WEB,),
    buckets=_TOKENS,
    of_model=True,
)
MAX_GENERATION_TOKENS: Final = Family(
    "request_max_num_generation_tokens",
    "histogram",
    "Tokens of the longest choice of a finished request.",
    (WEB,),
    buckets=_TOKENS,
    of_model=True,
)

# A process, by the names of Prometheus' client libraries.

CPU_SECONDS: Final = _of_process("cpu_seconds_total", "counter", "Time on a CPU, of the process and the system for it.")
RESIDENT_BYTES: Final = _of_process("resident_memory_bytes", "gauge", "Memory of the process that is in RAM.")
VIRTUAL_BYTES: Final = _of_process("virtual_memory_bytes", "gauge", "Address space of the process.")
START_SECONDS: Final = _of_process("start_time_seconds", "gauge", "When the process was started, since 1970.")
OPEN_FDS: Final = _of_process("open_fds", "gauge", "Open files and connections.")
MAX_FDS: Final = _of_process("max_fds", "gauge", "Most files and connections that the process may have open.")

# Ours only.

COMMIT_SECONDS: Final = Family(
    "commit_latency_seconds",
    "histogram",
    "A commit to the log, from its sending to the answer: submit by a frontend, tokenized, step by an engine, produced "
    "by a detokenizer.",
    STAGES,
    ("commit",),
    buckets=_COMMIT_S,
)
BURIED: Final = Family(
    "requests_buried_total",
    "counter",
    "Requests that were ended because they had killed their worker again and again: each is a dead letter.",
    (TOKENIZE, GENERATE, DETOKENIZE, ARCHIVE),
)
UNREADABLE_ENTRIES: Final = Family(
    "unreadable_entries_total",
    "counter",
    "Entries of the log that could not be read: each becomes a dead letter; those of replies are skipped.",
    STAGES,
    ("stream",),
    known=("submitted", "tokenized", "steps", "replies"),
)
PROMPTS: Final = Family("tokenize_prompts_total", "counter", "Prompts that were tokenized.", (TOKENIZE,))
PROMPTS_TOKENS: Final = Family("tokenize_tokens_total", "counter", "Tokens that they became.", (TOKENIZE,))
REFUSALS: Final = Family(
    "tokenize_refusals_total",
    "counter",
    "Requests that a tokenizer ended, by the error's code.",
    (TOKENIZE,),
    ("code",),
)
BATCH_SECONDS: Final = Family(
    "tokenize_batch_seconds",
    "histogram",
    "What a tokenizer read at once, from the read to its last commit.",
    (TOKENIZE,),
    buckets=_BATCH_S,
)
HTTP_REQUESTS: Final = Family(
    "http_requests_total", "counter", "Requests, by the route that takes them.", (WEB,), ("endpoint", "method")
)
HTTP_RESPONSES: Final = Family(
    "http_responses_total",
    "counter",
    "Responses begun; a client that left before has none.",
    (WEB,),
    ("endpoint", "method", "status_code"),
)
STREAMS_OPEN: Final = Family("streams_open", "gauge", "Clients that are being streamed to, or wait for it.", (WEB,))
DISCONNECTS: Final = Family(
    "disconnects_total",
    "counter",
    "Clients that did not get the end of their answer: they left, the deadline passed, the server shut down, somebody "
    "cancelled the request, or it failed.",
    (WEB,),
    ("reason",),
    known=("client", "deadline", "shutdown", "cancelled", "error"),
)
GAP_FILLS: Final = Family(
    "gap_fills_total",
    "counter",
    "How often a client was fed from its request's history, because what this process was told had a gap, was more "
    "than a slow client took, or could not be read.",
    (WEB,),
    ("reason",),
    known=("gap", "slow_client", "unreadable"),
)
REJECTIONS: Final = Family(
    "admission_rejections_total",
    "counter",
    "Requests that were refused.",
    (WEB,),
    ("reason",),
    known=(
        *("loading", "queue_full", "log_full", "log_bytes", "log_unreachable", "unacknowledged"),
        *("requests_per_minute", "requests_per_day", "tokens_per_minute", "tokens_per_day", "queued_requests"),
        *("concurrent_requests", "max_background", "log_share", "shutting_down"),
    ),
)
EXPIRED_EARLY: Final = Family(
    "responses_expired_early_total",
    "counter",
    "Stored responses that were kept as briefly as other requests, because all of them took more than a quarter of "
    "--max-log-bytes. An archive still has them.",
    (WEB,),
)

ARCHIVED: Final = Family(
    "archive_requests_total", "counter", "Requests that an archiver has written to its files.", (ARCHIVE,)
)
ARCHIVE_STOPPED: Final = Family(
    "archive_stopped", "gauge", "1 while an archiver cannot write, because its disk is full.", (ARCHIVE,)
)
ARCHIVE_BYTES: Final = Family("archive_bytes", "gauge", "Size of all files of the archive.", (ARCHIVE,))
ARCHIVE_BACKLOG: Final = Family(
    "archive_backlog", "gauge", "Requests that have ended and are not archived yet, in the whole namespace.", (ARCHIVE,)
)
ARCHIVE_UNARCHIVED: Final = Family(
    "archive_requests_unarchived",
    "gauge",
    "Requests of the whole namespace that expired before an archiver had written them.",
    (ARCHIVE,),
)

# Read from the log when /metrics is requested.

LOG_UP: Final = Family("log_up", "gauge", "1 where the log answered; at 0 this process shows what it knows by itself.")
LOG_SERVER: Final = Family(
    "log_server_info",
    "gauge",
    "Always 1; the labels name the server that holds the log, Redis or Valkey, and its version.",
    labels=("server", "version"),
)
LOG_USED_BYTES: Final = Family(
    "log_used_bytes", "gauge", "Memory that the server of the log uses, with the data of others that share it."
)
LOG_LIMIT_BYTES: Final = Family(
    "log_limit_bytes",
    "gauge",
    "Memory above which new requests are refused: --max-log-bytes, or Redis' maxmemory if that is less. Not there if "
    "neither is set.",
)
WORKER_READY: Final = Family("worker_ready", "gauge", "1 for a worker that says it is ready.", labels=(SLOT,))
STREAM_LENGTH: Final = Family(
    "stream_length", "gauge", "Entries that wait or are worked on: the backlog of a stage.", labels=("stream",)
)
STREAM_PENDING: Final = Family(
    "stream_pending", "gauge", "Entries that a worker has and has not consumed.", labels=("stream",)
)
STREAM_LAG: Final = Family("stream_lag", "gauge", "Entries that no worker has read yet.", labels=("stream",))
DEAD_LETTERS: Final = Family("dead_letters", "gauge", "Dead letters that are kept.")
NUM_LIVE: Final = Family("num_requests_live", "gauge", "Requests that were accepted and have not ended.")


def _of_owner(name: str, what: str) -> Family:
    since = "since midnight UTC, by owner. Prometheus takes the restart from 0 for a counter reset."
    help = f"{what} {since} If there are keys, only the admin key sees it."
    return Family(f"owner_{name}_total", "counter", help, labels=("owner",))


OWNER_REQUESTS: Final = _of_owner("requests", "Requests that ended")
OWNER_PROMPT_TOKENS: Final = _of_owner("prompt_tokens", "Prompt tokens of requests that ended")
OWNER_OUTPUT_TOKENS: Final = _of_owner("output_tokens", "Output tokens of requests that ended")

FAMILIES: Final = tuple(value for value in list(globals().values()) if isinstance(value, Family))
"""All families, in the order in which they are shown."""


@functools.cache
def layout(families: tuple[Family, ...] = FAMILIES) -> int:
    """Return a number that changes with the buckets, so that counts of another version are not read."""
    return zlib.crc32(repr([(family.name, family.buckets) for family in families if family.buckets]).encode())
