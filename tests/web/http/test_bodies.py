"""Whatever a body holds: it is answered, it holds nobody up, and it takes little memory, here and in the log. On a real
web process.

What counts is the CPU time of the loop's thread in one callback: the clock would also count what other processes do.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.bodies_within_limits import ALONE, any_body, body
from support.raw_client import connect, head, request
from support.redis_servers import Servers, command, running_server
from support.selection import by_night, rest_at_night
from support.stand_in_stages import StandIn
from support.web_process import Server, serving
from support.web_site import CHAT

from web.config import DEFAULT_BODY_BYTES
from web.wire.openai.schemas import MOST_LABEL_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(by_night(120, 900))]

LONGEST_MS = 50.0
"""Most CPU time of a callback; on a slow core more, see `longest_ms`."""
LONGEST_PARSINGS = 8
LONGEST_REFUSAL_S = 1.0
MOST_TIMES = 10
"""Most memory that the largest body may take, in times its size. A smaller one may take as much."""
MOST_LOG_TIMES = 2
"""Most memory that the histories of a request may take in Redis, in times the size of its body, beside the answer that
its client gets .."""
ANSWER_BYTES = 10_000
""".. and for each answer. A stream alone takes 4 KiB."""


def longest_ms() -> float:
    """Return the bound on this core, now: a slow one may take as long as so many times the mere parsing of a large
    body."""
    body = orjson.dumps('"' * (DEFAULT_BODY_BYTES // 2))
    took_s = []
    for _ in range(3):
        began_s = time.thread_time()
        orjson.loads(body)
        took_s.append(time.thread_time() - began_s)
    return max(LONGEST_MS, LONGEST_PARSINGS * 1000 * statistics.median(took_s))


@dataclass(frozen=True, slots=True)
class Cost:
    """What a body has cost the web process."""

    status: int
    longest_ms: float
    """CPU time of the loop's thread in its longest callback."""
    what: str
    """That callback, if it was long."""
    memory_bytes: int
    seconds: float
    """How long the answer took, by the clock."""
    num_answers: int
    """Histories in the log."""
    log_bytes: int
    """What they take there, with what siblings share."""
    most_log_bytes: int
    text: bytes

    @property
    def is_too_much(self) -> bool:
        return (
            self.log_bytes > self.most_log_bytes
            or self.longest_ms >= longest_ms()
            or self.memory_bytes >= MOST_TIMES * DEFAULT_BODY_BYTES
            or (self.status != 200 and self.seconds >= LONGEST_REFUSAL_S)
        )


@dataclass(frozen=True, slots=True)
class Scene:
    server: Server
    stand_in: StandIn
    redis_url: str

    def check(self, body: bytes, path: str = CHAT, *, chunk_bytes: int = 0) -> Cost:
        """Send it, and see what it has cost. What costs too much may do so again, four times: a core that others share
        takes twice its time at moments.
        """
        cost = self.post(body, path, chunk_bytes=chunk_bytes)
        for _ in range(4):
            if not cost.is_too_much:
                break
            cost = self.post(body, path, chunk_bytes=chunk_bytes)
        assert cost.status == 200 or 400 <= cost.status < 500, cost
        assert not cost.is_too_much, cost
        return cost

    def post(self, body: bytes, path: str = CHAT, *, chunk_bytes: int = 0) -> Cost:
        process = psutil.Process(self.server.process.pid)
        self.longest()
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # forget the largest size so far
        before = process.memory_info().rss
        began_s = time.monotonic()
        with closing(connect(self.server.port)) as client:
            if chunk_bytes:
                client.send(head(f"POST {path} HTTP/1.1", "Host: localhost", "Transfer-Encoding: chunked"))
                chunk = b"%x\r\n%s\r\n" % (chunk_bytes, body[:chunk_bytes])
                with suppress(OSError):
                    client.send(chunk * (len(body) // chunk_bytes) + b"0\r\n\r\n")
            else:
                client.send(request(body, path=path))
            answer = client.answer()
        seconds = time.monotonic() - began_s
        took = self.longest()
        self.stand_in.seen.clear()
        num_answers, log_bytes = self._in_log(answer.headers.get("x-minisgl-uid", "none"))
        most_log_bytes = MOST_LOG_TIMES * len(body) + len(answer.body) + num_answers * ANSWER_BYTES
        costs = (self._largest() - before, seconds, num_answers, log_bytes, most_log_bytes)
        return Cost(answer.status, took[0], took[1], *costs, answer.body)

    def _in_log(self, uid: str) -> tuple[int, int]:
        """Return how many histories a request has, and what all its keys take; and remove them."""
        keys = [key for key in command(self.redis_url, "KEYS", "*") if uid.encode() in key]
        num_bytes = sum(int(command(self.redis_url, "MEMORY", "USAGE", key, "SAMPLES", 0)) for key in keys)
        for key in keys:
            command(self.redis_url, "DEL", key)
        return sum(b":request:" in key for key in keys), num_bytes

    def longest(self) -> tuple[float, str]:
        with closing(connect(self.server.port)) as client:
            client.send(request(path="/longest"))
            told = json.loads(client.answer().body)
        return told["ms"], told["what"]

    def _largest(self) -> int:
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


@pytest.fixture(scope="module")
def scene(redis_servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("bodies")
    with ExitStack() as stack:
        redis_url = stack.enter_context(running_server(redis_servers.binary("embedded"), folder)).url
        stand_in = stack.enter_context(closing(StandIn(redis_url, renews=True)))
        server = stack.enter_context(serving(redis_url, output=folder / "printed.log"))
        scene = Scene(server, stand_in, redis_url)
        for path in PATHS:  # what the first request of a kind imports and compiles is no cost of its body
            scene.post(b'{"prompt":"a","text":"a","tokens":[1],"rid":"a"}', path)
            scene.post(b'{"prompt":"%s"}' % (b"a" * 1_000_000), path)
        yield scene


PATHS = (CHAT, "/v1/completions", "/generate", "/tokenize", "/detokenize", "/abort_request")


def filled(before: bytes, unit: bytes, after: bytes, most: int = DEFAULT_BODY_BYTES) -> bytes:
    """Return a body of the largest size, or with *unit* at *most* so often."""
    room = DEFAULT_BODY_BYTES - len(before) - len(after)
    return before + unit * min(most, room // len(unit)) + after


def numbered(before: bytes, unit: bytes, num: int, after: bytes) -> bytes:
    return before + b",".join(unit % number for number in range(num)) + after


USER = b'{"messages":[{"role":"user","content":"Hi"}],'
TEXT = b'{"messages":[{"role":"user","content":"'
TOOL_CALL = (
    b'{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","tool_calls":[{"id":"a","type":"function",'
    b'"function":{"name":"f","arguments":"'
)
BODIES: dict[str, tuple[str, bytes]] = {
    "wrong messages": (CHAT, filled(b'{"max_tokens":1,"messages":[', b"1,", b"1]}")),
    "as many wrong messages as are looked at": (CHAT, filled(b'{"messages":[', b"1,", b"1]}", 262_000)),
    "empty messages": (CHAT, filled(b'{"messages":[', b'{"role":"user","content":""},', b"1]}")),
    "the most messages": (
        CHAT,
        filled(b'{"messages":[', b'{"role":"user","content":"%s"},' % (b"a" * 900), b'{"role":"user"}]}', 4095),
    ),
    "an unknown list of lists": (CHAT, filled(USER + b'"x":[', b"[],", b"1]}")),
    "an unknown list of the most lists": (CHAT, filled(USER + b'"x":[', b"[],", b"1]}", 49_900)),
    "an unknown list of the most numbers": (CHAT, filled(USER + b'"x":[', b"1.25e-17,", b"1]}", 262_000)),
    "the most unknown fields": (CHAT, numbered(USER, b'"k%%05d%s":1' % (b"x" * 40), 49_900, b"}")),
    "numbers of 4,290 digits": (CHAT, filled(USER + b'"x":[', b"1" * 4290 + b",", b"1]}")),
    "a number of 4 million digits": (CHAT, USER + b'"x":' + b"1" * 4_000_000 + b"}"),
    "deep lists": (CHAT, b"[" * DEFAULT_BODY_BYTES),
    "the most wrong members": (CHAT, numbered(USER + b'"logit_bias":{', b'"k%d":1', 49_900, b"}}")),
    "a long text": (CHAT, filled(TEXT, b"all work, and no [play] ", b'"}]}')),
    "a long text of new lines": (CHAT, filled(TEXT, b"\\n", b'"}]}')),
    "a long text of quotes": (CHAT, filled(TEXT, b'\\"', b'"}]}')),
    "a long text with one wide character": (CHAT, filled(TEXT, b"a", '\U0001f600"}]}'.encode())),
    "a long text of Chinese": (CHAT, filled(TEXT, "中".encode(), b'"}]}')),
    "a long text twice": (CHAT, filled(b'{"n":2,' + TEXT[1:], b"[1,", b'"}]}', 1_390_000)),
    "a long text as arguments": (CHAT, filled(TOOL_CALL + b'{\\"a\\":\\"', b"if (a[i], b) {\\\\n", b'\\"}"}}]}]}')),
    "a long list as arguments": (CHAT, filled(TOOL_CALL + b"[", b"1,", b'1]"}}]}]}')),
    "variables of a template": (CHAT, USER + b'"chat_template_kwargs":{"x":[' + b"[]," * 49_900 + b"1]}}"),
    "a long prompt": ("/v1/completions", filled(b'{"prompt":"', b"all work, and no [play] ", b'"}')),
    "a prompt of the most tokens": ("/v1/completions", filled(b'{"prompt":[', b"12345,", b"1]}", 262_000)),
    "five times a prompt of the most tokens": (
        "/v1/completions",
        filled(b'{"n":5,"prompt":[', b"12345,", b"1]}", 262_000),
    ),
    "the most prompts": ("/v1/completions", filled(b'{"prompt":[', b'"%s",' % (b"a" * 3000), b'"b"]}', 1000)),
    "parameters that are too large for many answers": (
        "/v1/completions",
        filled(
            b'{"bad_words":[' + b",".join([b'"%s"' % (b"x" * 256)] * 256) + b'],"prompt":[', b'"a",', b'"a"]}', 1000
        ),
    ),
    "too many prompts": ("/v1/completions", filled(b'{"prompt":[', b'"ab",', b'"b"]}', 49_900)),
    "SGLang's form": ("/generate", filled(b'{"text":"', b"all work, and no [play] ", b'"}')),
    "SGLang's form with tokens": ("/generate", filled(b'{"input_ids":[', b"12345,", b"1]}", 262_000)),
    "a text to tokenize": ("/tokenize", filled(b'{"return_token_strs":true,"prompt":"', b"word ", b'"}')),
    "tokens to detokenize": ("/detokenize", filled(b'{"tokens":[', b"12345,", b"1]}", 262_000)),
}
ON_EVERY_CHANGE = (
    "wrong messages",
    "as many wrong messages as are looked at",
    "the most messages",
    "the most unknown fields",
    "an unknown list of the most lists",
    "a long text of quotes",
    "a long text with one wide character",
    "five times a prompt of the most tokens",
    "a long text of Chinese",
    "a text to tokenize",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ON_EVERY_CHANGE else [pytest.mark.night]) for name in BODIES]
)
def test_the_worst_bodies_hold_nobody_up_and_take_little_memory(scene: Scene, name: str) -> None:
    path, body = BODIES[name]
    scene.check(body, path)


NUM_ANSWERS = by_night(16, 128)
SHARED: dict[str, tuple[str, bytes]] = {
    "choices of a long text": (CHAT, filled(b'{"n":%d,' % NUM_ANSWERS + TEXT[1:], b"[1, ", b'"}]}')),
    "choices of the most messages": (
        CHAT,
        filled(
            b'{"n":%d,"messages":[' % NUM_ANSWERS,
            b'{"role":"user","content":"%s"},' % (b"a" * 900),
            b'{"role":"user","content":"a"}]}',
            4095,
        ),
    ),
    "choices in SGLang's form": (
        "/generate",
        filled(b'{"sampling_params":{"n":%d},"text":"' % NUM_ANSWERS, b"a b ", b'"}'),
    ),
    "prompts with much in common": (
        "/v1/completions",
        filled(b'{"prompt":[%s],"user":"' % b",".join([b'"a"'] * NUM_ANSWERS), b"x", b'"}', MOST_LABEL_BYTES - 100),
    ),
    "choices of long prompts": (
        "/v1/completions",
        numbered(b'{"n":%d,"prompt":[' % (NUM_ANSWERS // 4), b'"%%d%s"' % (b"a" * 1_000_000), 4, b"]}"),
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if "text" in name or "common" in name else [pytest.mark.night]) for name in SHARED],
)
def test_many_answers_to_a_large_body_take_little_more_than_one(scene: Scene, name: str) -> None:
    path, body = SHARED[name]
    cost = scene.check(body, path)
    assert cost.status == 200, cost
    assert cost.num_answers == NUM_ANSWERS, cost


@pytest.mark.parametrize("chunk_bytes", [1, 65_536])
def test_a_body_in_tiny_chunks_is_refused_before_they_take_long(scene: Scene, chunk_bytes: int) -> None:
    cost = scene.check(b" " * 1_000_000, chunk_bytes=chunk_bytes)
    code = json.loads(cost.text)["error"]["code"]
    assert (cost.status, code) == (400, "invalid_http" if chunk_bytes == 1 else "invalid_json")


FIELDS = """
    messages prompt text input_ids tokens stop stop_token_ids logit_bias metadata tools bad_words allowed_token_ids
    sampling_params stream_options chat_template_kwargs user model n max_tokens rid x
"""
NAMES = st.sampled_from(FIELDS.split())
SMALL = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**25), 10**25)
    | st.floats()
    | st.text(alphabet='ab,[]{}"\\\n\x00é\U0001f600', max_size=20)
    | st.sampled_from(
        (
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]},
            {"type": "text", "text": "a"},
            {"type": "function", "function": {"name": "f", "parameters": {}}},
            {"include_usage": True},
        )
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)


STARTS: tuple[dict[str, Any], ...] = (
    {},
    {"prompt": "a"},
    {"text": "a"},
    {"messages": [{"role": "user", "content": "a"}]},
)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Draw a body of any size up to the limit: small JSON, and one field with something that is repeated."""
    fields: dict[str, Any] = draw(st.dictionaries(NAMES, SMALL, max_size=4))
    start: dict[str, Any] = draw(st.sampled_from(STARTS))
    unit = json.dumps(draw(SMALL)).encode()
    if draw(st.booleans()):  # several answers
        choices = draw(st.sampled_from((2, 5)))
        fields |= {"n": choices, "sampling_params": {"n": choices}}
    name = draw(NAMES).encode()
    num_bytes = draw(st.sampled_from((100, 10_000, 400_000, DEFAULT_BODY_BYTES - 10_000)))
    num = max(num_bytes // (len(unit) + 12), 1)
    match draw(st.sampled_from(("wide", "object", "deep", "text", "fields"))):
        case "wide":
            value = b"[" + (unit + b",") * num + unit + b"]"
        case "object":
            value = numbered(b"{", b'"k%d":' + unit.replace(b"%", b"%%"), num, b"}")
        case "deep":
            depth = draw(st.sampled_from((10, 100, 190, num)))
            value = b"[" * depth + unit + b"]" * depth
        case "text":
            inner = json.dumps(unit.decode())[1:-1].encode()
            value = b'"' + inner * max(num_bytes // (len(inner) or 1), 1) + b'"'
        case _:
            value = numbered(b"", b'"k%d":' + unit.replace(b"%", b"%%"), num, b"")[5:]
    small = json.dumps({**start, **fields}).encode()
    return small[:-1] + (b"," if len(small) > 2 else b"") + b'"%b":%b}' % (name, value)


@settings(
    max_examples=by_night(10, 400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(bodies(), st.sampled_from(PATHS))
def test_any_body_is_answered_holds_nobody_up_and_takes_little_memory(scene: Scene, body: bytes, path: str) -> None:
    if len(body) <= DEFAULT_BODY_BYTES:
        scene.check(body, path)


@pytest.mark.parametrize("names", rest_at_night(ALONE, first=0), ids=" + ".join)
def test_each_extreme_within_the_limits_holds_nobody_up_and_takes_little_memory(
    scene: Scene, names: tuple[str, ...]
) -> None:
    drawn = body(random.Random(1), *names)
    scene.check(drawn.body, drawn.path)


@pytest.mark.parametrize("seed", range(by_night(2, 100)))
def test_any_extremes_within_the_limits_hold_nobody_up_and_take_little_memory(scene: Scene, seed: int) -> None:
    drawn = any_body(random.Random(seed))
    scene.check(drawn.body, drawn.path)
