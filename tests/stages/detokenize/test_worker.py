"""The detokenizer between two commits of the log: nothing twice, nothing lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipeline.errors import LogUnavailable, UndecodableEvent
from pipeline.events import (
    Finished,
    SamplingParams,
    StepCompleted,
    Submitted,
    Tokenized,
    TokenRow,
    TokensProduced,
    decode,
)
from pipeline.log import Entry, Inbox, Owner
from pipeline.memory_log import MemoryLog
from pipeline.names import Names
from pipeline.slots import Place
from stages.detokenize.fold import DetokenizeFold
from stages.detokenize.worker import DetokenizeWorker

LEASE_MS = 60_000
UID = "0" * 32


class Rig:
    """A log with one tokenized request, an engine's owner and a detokenizer."""

    def __init__(self) -> None:
        self.log = MemoryLog(Names())
        self.inbox = Inbox.steps(self.log.names, "generate-0")
        for inbox in (Inbox.submitted(self.log.names), Inbox.tokenized(self.log.names), self.inbox):
            self.log.prepare(inbox)
        self.log.open_replies("web-0")
        event = Submitted(endpoint="chat", frontend="web-0", prompt="x", sampling=SamplingParams())
        self.log.submit(UID, event, timeout_ms=60_000, retention_ms=60_000, max_queued=10)
        (entry,) = self.log.read(Inbox.submitted(self.log.names), "tokenize-0", max_entries=1, block_ms=10)
        self.log.tokenized(entry, Tokenized(token_ids=(1,), fingerprint="f", by="tokenize-0"))
        self.engine = self.acquire("generate-0")
        self.place = Place(self.log, self.acquire("detokenize-0"), LEASE_MS)
        self.worker = self.another_worker()

    def acquire(self, slot: str) -> Owner:
        owner = self.log.acquire(slot, "nonce", LEASE_MS)
        assert owner is not None
        return owner

    def another_worker(self) -> DetokenizeWorker:
        fold = DetokenizeFold(lambda ids: "".join(map(chr, ids)))
        return DetokenizeWorker(self.log, self.place, fold, "generate-0", 60_000)

    def step(self, number: int, *rows: TokenRow) -> Entry:
        event = StepCompleted(rows=rows)
        self.log.step(self.engine, number, event, ended=[], control_cursor="0-0", lease_ms=LEASE_MS)
        (entry,) = self.log.read(self.inbox, "detokenize-0", max_entries=1, block_ms=10)
        return entry

    def text(self) -> str:
        events = [decode(entry.fields) for entry in self.log.histories([UID])[0]]
        return "".join(event.text for event in events if isinstance(event, TokensProduced))


@pytest.fixture
def rig() -> Rig:
    return Rig()


def row(n: int, letter: str, *, last: bool = False) -> TokenRow:
    return TokenRow(uid=UID, n=n, token=ord(letter), end="length" if last else None)


def test_a_step_reaches_the_history_and_the_frontend_in_one_commit(rig: Rig) -> None:
    rig.worker.handle([rig.step(1, row(1, "a")), rig.step(2, row(2, "b", last=True))])
    assert rig.text() == "ab" and rig.log.backlog(rig.inbox) == 0
    _, replies = rig.log.read_replies("web-0", "0-0", block_ms=10)
    assert [reply.n for reply in replies] == [1, 2, 2] and isinstance(replies[-1].event, Finished)
    assert rig.log.alive([UID]) == set()
    rig.place.leave()


def test_a_successor_continues_from_the_histories(rig: Rig) -> None:
    rig.worker.handle([rig.step(1, row(1, "a"))])
    rig.another_worker().handle([rig.step(2, row(2, "b"))])
    assert rig.text() == "ab"
    rig.place.leave()


def test_a_step_whose_commit_was_lost_on_the_way_is_said_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit took place, but its reply did not come: the step is given again."""
    entry = rig.step(1, row(1, "a"))
    produced = rig.log.produced

    def reply_lost(*arguments: object, **options: object) -> bool:
        produced(*arguments, **options)  # type: ignore[arg-type]  # passed on as they came
        raise LogUnavailable("connection reset")

    monkeypatch.setattr(rig.log, "produced", reply_lost)
    with pytest.raises(LogUnavailable):
        rig.worker.handle([entry])
    monkeypatch.undo()
    rig.worker.handle([entry])
    rig.worker.handle([rig.step(2, row(2, "b"))])
    assert rig.text() == "ab"
    rig.place.leave()


def test_a_step_whose_commit_never_took_place_is_not_lost(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = rig.step(1, row(1, "a"))

    def refused(*arguments: object, **options: object) -> bool:
        raise LogUnavailable("connection refused")

    monkeypatch.setattr(rig.log, "produced", refused)
    with pytest.raises(LogUnavailable):
        rig.worker.handle([entry])
    monkeypatch.undo()
    rig.worker.handle(rig.log.pending(rig.inbox, "detokenize-0"))
    assert rig.text() == "a"
    rig.place.leave()


def test_an_entry_that_is_no_step_is_named(rig: Rig) -> None:
    fields: Sequence[tuple[str, str]] = [("kind", "cancelled"), ("v", "1"), ("by", "x")]
    with pytest.raises(UndecodableEvent, match="a cancelled among its steps"):
        rig.worker.handle([Entry("1-9", dict(fields))])
    rig.place.leave()
