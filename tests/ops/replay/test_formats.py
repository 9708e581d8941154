"""OpenAI's batch files and Mooncake's traces, in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from support.redis_servers import command
from support.tool import Tool

from ops.replay.files import DamagedFile, read_dump
from ops.replay.formats import from_mooncake, from_openai, to_mooncake, to_openai
from ops.replay.redact import redacted, stand_in
from pipeline.events import SamplingParams, Submitted, Tokenized, TokensProduced, decode, encode
from pipeline.log.protocol import Entry
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID
from pipeline.recording import Recording, UnreadableRecording
from pipeline.views.history import story
from pipeline.walk import walk

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BATCH: tuple[dict[str, Any], ...] = (
    {
        "custom_id": "first",
        "method": "POST",
        "url": CHAT,
        "body": {
            "model": "demo",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hällo!"}],
            "max_completion_tokens": 9,
            "temperature": 0.5,
            "stop": ["\n"],
            "logit_bias": {"42": -1.0},
            "n": 2,
            "user": "ann",
        },
    },
    {
        "custom_id": "second",
        "method": "POST",
        "url": COMPLETIONS,
        "body": {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 3, "seed": 4, "logprobs": 2},
    },
)
TRACE = (
    {"timestamp": 0, "input_length": 2287, "output_length": 316, "hash_ids": [0, 1, 2, 3, 4]},
    {"timestamp": 3052, "input_length": 1200, "output_length": 0, "hash_ids": [0, 1, 5]},
    {"timestamp": 3052, "input_length": 600, "output_length": 7, "hash_ids": [0, 6]},
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


def write(path: Path, *lines: Any) -> Path:
    path.write_bytes(b"".join(line if isinstance(line, bytes) else orjson.dumps(line) + b"\n" for line in lines))
    return path


def parsed(lines: Any) -> list[Any]:
    return [orjson.loads(line) for line in lines]


def test_a_batch_becomes_requests_that_nobody_has_computed_and_comes_back(path: Path) -> None:
    found = list(read_dump(write(path, *BATCH)))
    assert [recording.uid.partition(".")[2] for recording in found] == ["0", "1", ""]
    for recording in found:
        told = story(recording.uid, recording.entries)
        assert (told["state"], told["error"]["code"]) == ("failed", "not_computed")
    again = parsed(to_openai(found))
    assert [line | {"body": BATCH[at]["body"] | line["body"]} for at, line in enumerate(again)] == again
    for line, before in zip(again, BATCH, strict=True):
        assert line | {"body": 0} == before | {"body": 0}
        assert line["body"].items() >= before["body"].items()
    assert list(read_dump(path)) == found  # the same uids and seeds each time


def test_each_sibling_whose_others_are_missing_is_a_line_of_its_own(path: Path) -> None:
    both = list(read_dump(write(path, BATCH[0])))
    (line,) = parsed(to_openai(both[1:]))
    assert "n" not in line["body"]
    events = [decode(one.entries[0].fields) for one in both]
    assert line["body"]["seed"] == events[1].sampling.seed != events[0].sampling.seed  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"url": "/v1/embeddings"}, "url '/v1/embeddings': expected /v1/chat/completions or /v1/completions"),
        ({"body": []}, "expected a custom_id, a url and a body"),
        ({"body": {"messages": []}}, "body: "),
    ],
)
def test_a_line_that_no_server_would_take_is_named(path: Path, change: dict[str, Any], said: str) -> None:
    recordings = read_dump(write(path, BATCH[1], BATCH[1] | change))
    assert next(recordings).is_sealed
    with pytest.raises(DamagedFile) as error:
        next(recordings)
    assert str(error.value).startswith(f"{path}, line 2: {said}")


def test_a_trace_becomes_requests_of_its_lengths_and_comes_back(path: Path) -> None:
    found = list(read_dump(write(path, *TRACE)))
    stories = [story(recording.uid, recording.entries) for recording in found]
    assert [(told["prompt_tokens"], told["completion_tokens"]) for told in stories] == [
        (2287, 316),
        (1200, 0),
        (600, 7),
    ]
    assert [told["submitted_ms"] for told in stories] == [0, 3052, 3052]
    assert all(told["state"] == "finished" for told in stories)
    assert parsed(to_mooncake(found)) == list(TRACE)


def test_requests_of_a_trace_can_be_sent_with_the_blocks_that_they_share() -> None:
    one, two, three = (decode(stand_in(from_mooncake(1, orjson.dumps(line))[0]).entries[0].fields) for line in TRACE)
    assert isinstance(one, Submitted) and isinstance(two, Submitted) and isinstance(three, Submitted)
    assert [len(event.prompt_ids) for event in (one, two, three)] == [2287, 1200, 600]
    assert one.prompt_ids[:1024] == two.prompt_ids[:1024]
    assert one.prompt_ids[:512] == three.prompt_ids[:512]
    assert one.prompt_ids[512:600] != three.prompt_ids[512:600]


def test_lines_without_hashes_share_nothing() -> None:
    plain = {name: value for name, value in TRACE[0].items() if name != "hash_ids"}
    rows = parsed(to_mooncake([*from_mooncake(1, orjson.dumps(plain)), *from_mooncake(2, orjson.dumps(plain))]))
    assert [row["hash_ids"] for row in rows] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize(
    "change",
    [{"timestamp": None}, {"input_length": "7"}, {"output_length": -1}, {"hash_ids": 7}, {"input_length": 10**12}],
)
def test_a_line_of_a_trace_that_is_wrong_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnreadableRecording, match="expected"):
        from_mooncake(1, orjson.dumps(TRACE[0] | change))


@pytest.mark.parametrize("line", [b"{", b"[1]", b'{"custom_id": "a", "url": "/v1/completions", "body": 1}'])
def test_what_is_no_line_of_a_batch_or_trace_is_refused(line: bytes) -> None:
    for read in (from_openai, from_mooncake):
        with pytest.raises(UnreadableRecording):
            read(1, line)


def served(number: int, ids: list[int], num_output: int = 3, **asked: Any) -> Recording:
    submitted = Submitted.model_validate(
        {"endpoint": CHAT, "frontend": "w", "sampling": SamplingParams(seed=number)}
        | (asked or {"messages": ({"role": "user", "content": "Hi"},)})
    )
    made = TokensProduced(count=num_output, tokens=(1,) * num_output, text="x", step="1-1")
    events = [
        (SUBMITTED_ID, submitted),
        (TOKENIZED_ID, Tokenized(token_ids=tuple(ids), fingerprint="f", by="t")),
        (f"{num_output}-0", made),
    ]
    entries = [Entry(entry_id, {"ms": str(1000 + number)} | encode(event)) for entry_id, event in events]
    end = Entry(SEAL, {"ms": "2000", "kind": "cancelled", "n": "3", "by": "client"})
    return Recording(f"{number:012x}7000800000000000{number:04x}", (*entries, end))


PROMPTS = ([7] * 1024 + [8] * 10, [7] * 1024 + [9] * 10, [7] * 700, [7] * 1024 + [8] * 10)
HASHES = [[0, 1, 2], [0, 1, 3], [0, 4], [0, 1, 2]]


def test_served_requests_become_a_trace_redacted_or_not() -> None:
    recordings = [served(number, prompt) for number, prompt in enumerate(PROMPTS)]
    rows = parsed(to_mooncake(recordings))
    assert [row["hash_ids"] for row in rows] == HASHES
    assert [(row["timestamp"], row["input_length"], row["output_length"]) for row in rows] == [
        (0, 1034, 3),
        (1, 1034, 3),
        (2, 700, 3),
        (3, 1034, 3),
    ]
    assert parsed(to_mooncake([redacted(each, b"salt") for each in reversed(recordings)])) == rows


def test_served_requests_of_every_endpoint_become_a_batch() -> None:
    asked: list[dict[str, Any]] = [
        {"messages": ({"role": "user", "content": "Hi"},)},
        {"prompt": "Hi"},
        {"endpoint": "/generate", "prompt": "Hi", "limit": "sampling_params.max_new_tokens"},
        {"endpoint": COMPLETIONS, "prompt_ids": (5, 6), "presentation": {"stream": True, "include_usage": True}},
        {"endpoint": "/tokenize", "task": "tokenize", "prompt": "Hi"},
    ]
    skipped: list[str] = []
    recordings = [served(number, ids=[5], **each) for number, each in enumerate(asked)]
    rows = parsed(to_openai(recordings, skipped.append))
    assert [row["url"] for row in rows] == [CHAT, *[COMPLETIONS] * 3]
    assert [row["custom_id"] for row in rows] == [recording.uid for recording in recordings[:4]]
    assert not any("stream" in row["body"] or "stream_options" in row["body"] for row in rows)
    assert [row["body"].get("prompt") for row in rows] == [None, "Hi", "Hi", [5, 6]]
    assert skipped == ["for the tokenizer alone"]
    for number, row in enumerate(rows, 1):
        assert from_openai(number, orjson.dumps(row))


def test_what_computed_another_request_again_is_no_traffic() -> None:
    sent = served(0, ids=[5])
    again = served(1, ids=[5], prompt="Hi", replay={"of": sent.uid}, priority=2**31)
    skipped: list[str] = []
    for number, write in enumerate((to_openai, to_mooncake), 1):
        assert len(parsed(write([sent, again], skipped.append))) == 1
        assert skipped == ["that computed another one again (replay run)"] * number


def test_both_go_through_a_log(redis_url: str, log: RedisLog, path: Path, bring_in: Tool, dump: Tool) -> None:
    for name, lines in (("openai", BATCH), ("mooncake", TRACE)):
        file, again = write(path.with_name(name), *lines), path.with_name(f"{name}-again")
        num = len(list(read_dump(file)))
        assert bring_in(str(file)) == [f"{file}: {num} requests imported"]
        assert bring_in.json(str(file))["there"] == num
        uids = log.made_between(0, 2**48)
        assert all(list(walk(history)) for history in log.histories(uids))
        assert dump("--format", name, str(again)) == [f"{again}: {len(lines)} requests, {again.stat().st_size:,} bytes"]
        assert again.stat().st_mode & 0o777 == 0o600
        if name == "mooncake":
            assert parsed(again.read_bytes().splitlines()) == list(lines)
        command(redis_url, "FLUSHALL")
