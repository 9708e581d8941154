"""After every death the tokens are those of a run in which nobody died: greedy and seeded, with preemptions and shared
prefixes; and whoever was cut off gets the rest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.checkpoints import make_checkpoint
from support.selection import by_night
from support.servers import Server, eventually, is_alive, serve
from support.streams import Stream, assert_nothing_is_left, events_of, family_of, num_of, token_counts, tokens_in

from pipeline.events import Admitted, AnyEvent, Finished, Preempted, TakenOver, TokensProduced
from pipeline.log.redis import RedisLog
from pipeline.names import GENERATE
from stages.generate.loop.past import TOKENS_IN_DOUBT

pytestmark = pytest.mark.slow

NUM_REQUESTS = by_night(6, 20)
NUM_TOKENS = by_night(480, 600)
"""Enough that no answer is over before a test that shares its cores has seen that all have begun."""
NUM_KILLS = 3
SHARED = "You are the log, and the log is the memory of the program. Whatever dies, you go on from where it was. " * 2
FLAGS = ("--dtype", "float32", "--page-size", "16", "--lease", "1", "--max-seq-len", "1024")
CROWDED = ("--num-pages", "256")
"""So few pages that not all requests can run to their end at once."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", max_positions=1024)


def fields_of(number: int) -> dict[str, Any]:
    """Every second request is sampled, and two of four have penalties, which look at all that was said."""
    sampled = {"temperature": 0.8, "top_p": 0.95, "seed": number} if number % 2 else {}
    penalties = {"frequency_penalty": 0.7, "repetition_penalty": 1.2} if number % 4 > 1 else {}
    return {"max_tokens": NUM_TOKENS, **sampled, **penalties}


def ask(server: Server) -> list[Stream]:
    return [Stream(server, f"{SHARED} Story {number}?", **fields_of(number)) for number in range(NUM_REQUESTS)]


def tokens_of(log: RedisLog, uid: str) -> list[int]:
    events = events_of(log, uid)
    assert isinstance(events[-1], Finished) and sum(token_counts(events)) == NUM_TOKENS
    return tokens_in(events)


def most_of(log: RedisLog, streams: list[Stream], kind: str) -> int:
    """Return how many events of *kind* the request has that has most."""
    histories = log.histories([stream.uid for stream in streams if stream.uid])
    return max((sum(entry.fields["kind"] == kind for entry in history) for history in histories), default=0)


def quiet(server: Server, log: RedisLog) -> list[tuple[str, list[int]]]:
    """Return the text and the tokens of each request when nobody dies."""
    answers = [(stream.answer[0], tokens_of(log, stream.uid)) for stream in ask(server)]
    assert len({text for text, _ in answers}) == NUM_REQUESTS
    return answers


def assert_alone_only_in_doubt(history: list[AnyEvent]) -> None:
    """A request runs alone only when it came no further than the engine before may have, which dies at any step."""
    n, last = 0, -TOKENS_IN_DOUBT
    for event in history:
        if isinstance(event, TokensProduced):
            n += event.count
        elif isinstance(event, TakenOver):
            assert event.alone == (n - last < TOKENS_IN_DOUBT)
            last = n


@pytest.mark.night
def test_the_tokens_after_each_death_of_the_engine_are_those_of_the_quiet_run(model: Path, tmp_path: Path) -> None:
    with serve(tmp_path / "quiet", "--model", str(model), *FLAGS) as server, server.log() as log:
        expected = quiet(server, log)
    with serve(tmp_path, "--model", str(model), *FLAGS, *CROWDED) as server, server.log() as log:
        streams = ask(server)
        for number in range(1, NUM_KILLS + 1):
            progress = NUM_TOKENS * number // (NUM_KILLS + 1)
            eventually(lambda progress=progress: most_of(log, streams, "tokens") > progress, "it goes on")  # type: ignore[misc]
            assert not all(stream.is_over for stream in streams)
            eventually(
                lambda number=number: most_of(log, streams, "taken_over") == number - 1,  # type: ignore[misc]
                "the engine has gone on with what the one before had",
            )
            (engine,) = server.command.workers(GENERATE)
            engine.kill()
            eventually(
                lambda number=number: len(server.command.log_lines("worker_died")) == number,  # type: ignore[misc]
                "the supervisor notices",
            )
        answers = [(stream.answer[0], tokens_of(log, stream.uid)) for stream in streams]
        histories = [events_of(log, stream.uid) for stream in streams]
        assert_nothing_is_left(log)
    assert answers == expected
    events = [event for history in histories for event in history]
    assert any(isinstance(event, Preempted) for event in events)
    assert any(isinstance(event, Admitted) and event.cached_tokens for event in events)
    assert max(num_of(history, TakenOver) for history in histories) == NUM_KILLS
    for history in histories:
        assert_alone_only_in_doubt(history)


def resumed(server: Server, stream: Stream) -> tuple[str, str]:
    """Return the whole text of a stream that was cut off and is read on from the last id that its client saw, and why
    it ended."""
    ids = [line.removeprefix("id: ") for line in stream.lines if line.startswith("id: ")]
    headers = {"last-event-id": ids[-1]} if ids else {}
    events = httpx.get(f"{server.url}/v1/requests/{stream.uid}/events", headers=headers, timeout=60)
    assert events.status_code == 200, events.text
    seen = _frames(stream.lines, until_last_id=True) if ids else []
    frames = [*seen, *_frames(events.text.splitlines())]
    text = "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames)
    return text, frames[-1]["choices"][0]["finish_reason"]


def _frames(lines: list[str], *, until_last_id: bool = False) -> list[dict[str, Any]]:
    """Return the frames in *lines*; those after the last id are sent again."""
    if until_last_id:
        last = max(index for index, line in enumerate(lines) if line.startswith("id: "))
        lines = lines[: last + 2]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def test_after_kill_9_of_the_supervisor_the_next_start_finishes_all_and_clients_get_the_rest(
    model: Path, tmp_path: Path
) -> None:
    with serve(tmp_path, "--model", str(model), *FLAGS) as server, family_of(server.command) as family:
        streams = ask(server)
        eventually(lambda: all(stream.uid for stream in streams), "every client knows its request")
        with server.log() as log:
            eventually(lambda: most_of(log, streams, "tokens") > 10, "it goes on")
        server.command.process.kill()
        server.command.process.wait()
        eventually(lambda: not any(map(is_alive, family)), "all its processes end")
        for stream in streams:
            cut_off = isinstance(stream.join().error, httpx.RemoteProtocolError | httpx.ReadError)
            assert cut_off == ("data: [DONE]" not in stream.lines)
        assert any(stream.error for stream in streams)

    with serve(tmp_path, "--model", str(model), *FLAGS) as again, again.log() as log:
        answers = [resumed(again, stream) for stream in streams]
        tokens = [tokens_of(log, stream.uid) for stream in streams]
        assert any(num_of(events_of(log, stream.uid), TakenOver) for stream in streams)
        assert_nothing_is_left(log)
        expected = quiet(again, log)
        assert answers == [(text, "length") for text, _ in expected]
        assert tokens == [tokens for _, tokens in expected]
