"""The Redis of the log dies, comes back as a replica, and its successor dies: streams go on, no process restarts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.redis_servers import Clustered, Servers, Watched, clustered, is_synced, wait_until_replicated, watched
from support.selection import rest_at_night
from support.servers import Server, eventually, serve
from support.streams import Stream, assert_nothing_is_left, events_of, no_process_restarts, num_of, token_counts

from pipeline.events import Finished, TakenOver
from pipeline.names import Names

pytestmark = pytest.mark.slow

NUM_STREAMS = 8
Answers = Sequence[tuple[str, str]]
MAX_TOKENS = 2000


def ask_each(server: Server) -> list[Stream]:
    prompts = (f"Tell me story number {number}." for number in range(NUM_STREAMS))
    return [Stream(server, prompt, max_tokens=MAX_TOKENS) for prompt in prompts]


def fail_over(group: Clustered | Watched) -> None:
    """Kill the server that has the log, when a replica has what it holds now, and start it again as the new replica."""
    port = group.owner()
    node = group.nodes[port]
    wait_until_replicated(node)
    node.process.kill()
    node.process.wait()
    eventually(lambda: group.owner() not in (0, port), "another one has the log")
    group.start(port)
    eventually(lambda: is_synced(group.nodes[port]), "it is a replica")


def assert_streams_survive(server: Server, undisturbed: Answers, *disturbances: Callable[[], None]) -> None:
    """Disturb streams once and again. Each client has its whole answer once, and each history each token once."""
    streams = [stream.begun() for stream in ask_each(server)]
    for disturb in disturbances:
        for stream in streams:
            stream.begun(stream.num_frames)
        assert not any(stream.is_over for stream in streams)
        disturb()
    assert [stream.answer for stream in streams] == undisturbed
    pauses_s = sorted(stream.longest_pause_s for stream in streams)
    logging.getLogger(__name__).info("longest pauses: %.2f to %.2f s", pauses_s[0], pauses_s[-1])
    with server.log() as log:
        for stream in streams:
            events = events_of(log, stream.uid)
            assert sum(token_counts(events)) == MAX_TOKENS and isinstance(events[-1], Finished)
            assert num_of(events, TakenOver) >= 1
        assert_nothing_is_left(log)


@pytest.mark.parametrize("place", rest_at_night(["embedded", "path", "oldest"]))
def test_streams_survive_the_death_of_a_node_of_the_cluster_and_of_its_successor(
    redis_servers: Servers, place: str, tmp_path: Path
) -> None:
    with (
        clustered(redis_servers.binary(place), tmp_path / "redis", Names().live) as cluster,
        serve(tmp_path, redis_url=cluster.url) as server,
    ):
        undisturbed = [stream.answer for stream in ask_each(server)]
        with no_process_restarts(server):
            assert_streams_survive(server, undisturbed, lambda: fail_over(cluster), lambda: fail_over(cluster))


@pytest.mark.night
@pytest.mark.parametrize("place", ["embedded", "path", "oldest"])
def test_streams_survive_the_death_of_the_server_that_sentinels_name_and_of_its_successor(
    redis_servers: Servers, place: str, tmp_path: Path
) -> None:
    """The dead one is a master of its own for ten seconds after its start: streams do not last that long."""
    with (
        watched(redis_servers.binary(place), tmp_path / "redis") as group,
        serve(tmp_path, redis_url=group.url) as server,
    ):
        undisturbed = [stream.answer for stream in ask_each(server)]
        with no_process_restarts(server):
            assert_streams_survive(server, undisturbed, lambda: fail_over(group))
            assert_streams_survive(server, undisturbed, lambda: fail_over(group))
