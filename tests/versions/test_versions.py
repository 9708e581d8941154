"""What an earlier version wrote is read by this one: the data of its Redis, its archive and its dumps."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
import zstandard
from support.lived_requests import LivedRequests
from support.redis_servers import embedded
from versions.record import WRITTEN, fields_of_events

from ops.replay.files import read_dump
from pipeline import VERSION
from pipeline.archive.reader import open_archive
from pipeline.events import INFORMATIVE, Finished, PromptInfo, Submitted, TokensProduced, decode
from pipeline.log.protocol import Entry
from pipeline.log.redis import RedisLog
from pipeline.names import Names, sibling_uids

HERE: Final = Path(__file__).parent
RECORDED: Final = sorted(path.name for path in HERE.iterdir() if (path / WRITTEN).exists())


class Recorded:
    """What a version wrote, unpacked."""

    def __init__(self, version: str, folder: Path) -> None:
        seen = json.loads((HERE / version / "seen.json").read_text())
        self.answered: dict[str, dict[str, Any]] = seen["answered"]
        self.begun: list[str] = seen["begun"]
        self.data, self.archive, self.dump = folder, folder / "archive", folder / "dump.zst"
        with zstandard.open(HERE / version / WRITTEN, "rb") as packed, tarfile.open(fileobj=packed, mode="r|") as tar:
            tar.extractall(folder, filter="data")

    def texts(self) -> dict[str, str]:
        """Return the text of each request that ended."""
        found = dict[str, str]()
        for each in self.answered.values():
            found |= dict(zip(sibling_uids(each["uid"], len(each["texts"])), each["texts"], strict=True))
        return found


@pytest.fixture(params=RECORDED)
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> Recorded:
    return Recorded(request.param, tmp_path)


def text_of(entries: Sequence[Entry]) -> str:
    """Return the text of an answer that has no call."""
    events = [decode(entry.fields) for entry in entries]
    assert isinstance(events[0], Submitted) and isinstance(events[-1], Finished)
    text = "".join(event.text for event in events if isinstance(event, TokensProduced))
    return "" if text.startswith("<tool_call>") else text


def test_this_version_is_recorded() -> None:
    assert VERSION in RECORDED


def test_a_new_field_is_informative_or_its_event_has_a_higher_version() -> None:
    """An older worker leaves it out. Where that can change an answer, the event has to raise `v`."""
    for path in HERE.glob("*/fields.json"):  # from 0.2.0 on
        recorded = json.loads(path.read_text())
        for name, fields in fields_of_events().items():
            new = {f"{name}.{field}" for field in set(fields) - set(recorded.get(name, fields))}
            assert new <= INFORMATIVE, f"since {path.parent.name}"


def test_its_requests_are_read_and_those_that_it_had_begun_are_finished(recorded: Recorded) -> None:
    texts = recorded.texts()
    with embedded(recorded.data) as server, closing(RedisLog(server.url, Names())) as log:
        histories = dict(zip(texts, log.histories([*texts]), strict=True))
        assert {uid: text_of(history) for uid, history in histories.items()} == texts
        scored = histories[recorded.answered["scores"]["uid"]]
        tokens = [event for event in (decode(each.fields) for each in scored) if isinstance(event, TokensProduced)]
        assert isinstance(tokens[0].prompt, PromptInfo) and sum(len(event.scores) for event in tokens) == 4
        assert set(log.living()) == set(recorded.begun)
        lived = LivedRequests(log)
        for uid, history in zip(recorded.begun, log.histories(recorded.begun), strict=True):
            events = [decode(each.fields) for each in history]
            num_tokens = sum(len(event.tokens) for event in events if isinstance(event, TokensProduced))
            assert num_tokens
            lived.tokens(uid, "c", after=num_tokens)
            lived.finished(uid, num_tokens + 1)
            assert text_of(log.histories([uid])[0]).endswith("c")
        assert log.living() == []


def test_its_archive_and_its_dump_are_read(recorded: Recorded) -> None:
    texts, archive = recorded.texts(), open_archive(str(recorded.archive))
    for recordings in (archive.recordings(), read_dump(recorded.dump)):
        assert {each.uid: text_of(each.entries) for each in recordings} == texts
    assert archive.read([*texts]).keys() == texts.keys()
