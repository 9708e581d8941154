"""Requests that were dumped, lost and imported: clients, tools and walks find them as they were."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.redis_servers import command
from support.stand_in_stages import StandIn
from support.web_site import CHAT, chat, site

from minisgl import main
from ops.replay.files import read_dump
from pipeline.events import decode
from pipeline.log.redis import RedisLog
from pipeline.names import Names
from pipeline.recording import encode_recording
from pipeline.views.history import story

SERVED = Path(__file__).parents[2] / "ops" / "replay" / "served-1.zst"
"""Requests that a server of version 1 of the format answered with the demo model. It is never written again."""
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, chat(stream=True, stream_options={"include_usage": True}, user="ann")),
    (CHAT, chat("break", stream=True)),
    (CHAT, chat("refuse", stream=True)),
    (CHAT, chat("long words " * 20, n=2)),
    ("/v1/completions", {"prompt": "hello", "echo": True, "max_tokens": 9}),
    ("/generate", {"text": "hello", "stream": True}),
    ("/tokenize", {"prompt": "hello"}),
)


def printed(url: str, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Return what a command prints with --json."""
    capsys.readouterr()  # what the web process has logged
    assert main([*words, "--json", "--redis-url", url]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


async def told(
    url: str, uids: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> dict[str, tuple[Any, bytes, bytes, list[Any]]]:
    """Return what `trace` says of each request, its frames, its events, and what `show` says of it at each token."""
    found = {}
    async with site(url, "web-5", ready=False) as there:
        for uid in uids:
            base = f"/v1/requests/{uid}/events"
            frames = await (await there.get(base)).get_data(as_text=False)
            events = await (await there.get(f"{base}?format=events")).get_data(as_text=False)
            _, _, others = events.partition(b"\n\n")  # the first event has the label
            traced = printed(url, capsys, "trace", uid)
            traced["labels"].pop("imported_from", None)
            ns = range(traced["completion_tokens"] + 1)
            shown = [printed(url, capsys, "replay", "show", uid, "--at", str(n)) for n in ns]
            found[uid] = (traced, frames, others, shown)
    return found


async def test_what_was_dumped_lost_and_imported_is_as_it_was(
    redis_url: str, stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "dump.zst")
    assert main(["replay", "import", str(SERVED), "--redis-url", redis_url]) == 0
    async with site(redis_url) as there:
        for path, body in ASKED:
            await there.client.post(path, json=body)
    log = RedisLog(redis_url, Names())
    stand_in.close()
    assert main(["replay", "dump", file, "--redis-url", redis_url]) == 0
    uids = [recording.uid for recording in read_dump(Path(file))]
    before = await told(redis_url, uids, capsys)
    command(redis_url, "FLUSHALL")
    assert log.histories(uids) == [[]] * len(uids)
    assert main(["replay", "import", file, "--redis-url", redis_url]) == 0
    assert await told(redis_url, uids, capsys) == before
    assert len(uids) == len(ASKED) + 1 + 9  # two choices, and all but the probe
    of_asked = list(before.values())[-len(ASKED) - 1 :]
    assert all(b"data: [DONE]" in frames for _, frames, _, _ in of_asked[:2])
    assert [len(shown) for _, _, _, shown in of_asked] == [4, 2, 1, 4, 4, 4, 4, 1]
    assert any("scores" in state for _, _, _, shown in before.values() for state in shown)
    log.close()


async def test_a_file_of_an_older_version_is_read(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    recordings = list(read_dump(SERVED))
    texts = [story(recording.uid, recording.entries)["text"] for recording in recordings]
    assert texts[1:6] == ["1 2 3 4 5", "h o u s e", *["Hello! How can I help you?"] * 2, "7 4"]
    ends = [decode(recording.entries[-1].fields).kind for recording in recordings]
    assert ends == ["finished"] * 8 + ["failed", "cancelled"]
    assert all(recording.is_sealed and encode_recording(recording) for recording in recordings)
    assert main(["replay", "import", str(SERVED), "--redis-url", redis_url]) == 0
    assert capsys.readouterr().out == f"{SERVED}: 10 requests imported\n"
    found = await told(redis_url, [recording.uid for recording in recordings[1:]], capsys)
    _, frames, _, shown = found[recordings[1].uid]
    pieces = [frame.partition(b"data: ")[2] for frame in frames.split(b"\n\n")[:-2]]
    deltas = [json.loads(piece)["choices"][0]["delta"].get("content") or "" for piece in pieces]
    assert "".join(deltas) == "1 2 3 4 5"
    assert (len(shown), shown[-1]["text"]) == (11, "1 2 3 4 5")
