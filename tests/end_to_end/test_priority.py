"""When an engine's pages run out, priority says who gives its own back: on a real server, from submit to the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Server, eventually, serve
from streams import events_of

from pipeline.events import Finished, SamplingParams, Submitted, new_uid
from pipeline.log.protocol import Submission
from pipeline.log.redis import RedisLog

pytestmark = pytest.mark.slow

NUM_TOKENS = 120
"""One such answer fits into the pages, two do not."""


@pytest.fixture(scope="module")
def server(llama3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--model", str(llama3), "--dtype", "float32", "--page-size", "16", "--num-pages", "12")
    with serve(tmp_path_factory.mktemp("server"), *flags) as server:
        yield server


def submit(log: RedisLog, prompt: str, priority: int) -> str:
    uid = new_uid()
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    event = Submitted(endpoint="test", frontend="web-0", prompt=prompt, sampling=sampling, priority=priority)
    assert log.submit(uid, [event]).submission is Submission.ACCEPTED
    return uid


@pytest.mark.parametrize(
    ("first", "second", "preempted"), [(0, 0, "second"), (1, 0, "first"), (0, 1, "second"), (-3, -4, "first")], ids=str
)
def test_who_came_first_keeps_its_pages_unless_the_other_is_more_important(
    server: Server, first: int, second: int, preempted: str
) -> None:
    with server.log() as log:
        uids = {
            "first": submit(log, "The log is the memory.", first),
            "second": submit(log, "She sells sea shells.", second),
        }
        eventually(lambda: not log.alive(list(uids.values())), "both have ended", 120)
        stories = {name: events_of(log, uid) for name, uid in uids.items()}
    assert all(isinstance(story[-1], Finished) for story in stories.values())
    kinds = {name: [event.kind for event in story] for name, story in stories.items()}
    assert {name for name, story in kinds.items() if "preempted" in story} == {preempted}
    assert all(story.count("tokens") == NUM_TOKENS for story in kinds.values())
