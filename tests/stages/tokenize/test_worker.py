"""The tokenizer between two commits of the log: a batch in, each request by itself out."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.contextvars import bound_contextvars

from pipeline.config import parse_command
from pipeline.errors import ConfigError, RequestError
from pipeline.events import Cancelled, Failed, SamplingParams, Submitted, Tokenized, decode, new_uid
from pipeline.log import Entry, Inbox
from pipeline.memory_log import MemoryLog
from pipeline.names import SEAL, TOKENIZED_ID, Names
from pipeline.slots import WATCHDOG_S, Announcement, Place, Status
from stages.tokenize.prompts import Rendered
from stages.tokenize.worker import LOAD_TIMEOUT_S, TokenizeWorker, run

CONTEXT = 16


class Panic(BaseException):
    """As what the Rust of a tokenizer panics with (pyo3_runtime.PanicException): no Exception."""


class LetterEncoder:
    """One token per letter; some texts are trouble."""

    fingerprint = "letters"

    def __init__(self) -> None:
        self.rendered: list[str] = []

    def render(self, event: Submitted) -> Rendered:
        self.rendered.append(event.prompt)
        if event.prompt == "refused":
            raise RequestError("roles must alternate", code="template_error", param="messages")
        if event.prompt == "explodes":
            raise ZeroDivisionError("in the template")
        if event.prompt == "interrupted":
            raise KeyboardInterrupt
        if event.prompt == "panics at once":
            raise Panic("index out of bounds")
        return Rendered(event.prompt, True, "prompt")

    def encode(self, prompts: Sequence[Rendered]) -> list[tuple[int, ...]]:
        if any(prompt.text == "poison" for prompt in prompts):
            raise RuntimeError("cannot be encoded")
        if any(prompt.text == "panics" for prompt in prompts):
            raise Panic("not a char boundary")
        if any(prompt.text == "exits" for prompt in prompts):
            raise SystemExit(1)
        return [tuple(map(ord, prompt.text.strip())) for prompt in prompts]

    def refuse_too_long(self, prompt: Rendered, context: int) -> None:
        assert context == CONTEXT


class Rig:
    def __init__(self) -> None:
        self.log = MemoryLog(Names())
        self.inbox = Inbox.submitted(self.log.names)
        self.log.prepare(self.inbox)
        self.log.prepare(Inbox.tokenized(self.log.names))
        engine = self.log.acquire("generate-0", "n", 60_000)
        owner = self.log.acquire("tokenize-0", "n", 60_000)
        assert engine is not None and owner is not None
        status = Status(slot="generate-0", owner=str(engine), pid=1, host="here", phase="ready", context=CONTEXT)
        self.log.renew(engine, 60_000, status.model_dump_json())
        self.place = Place(self.log, owner, 60_000)
        self.encoder = LetterEncoder()
        encoder: Any = self.encoder
        self.worker = TokenizeWorker(self.log, self.place, encoder, 60_000)

    def submit(self, *prompts: str) -> list[str]:
        uids = [new_uid() for _ in prompts]
        for uid, prompt in zip(uids, prompts, strict=True):
            event = Submitted(endpoint="chat", frontend="web-0", prompt=prompt, sampling=SamplingParams())
            self.log.submit(uid, event, timeout_ms=60_000, retention_ms=60_000, max_queued=100)
        return uids

    def handle(self) -> None:
        self.worker.handle(self.log.read(self.inbox, "tokenize-0", max_entries=100, block_ms=10))

    def last(self, uid: str) -> tuple[Entry, Any]:
        entry = self.log.histories([uid])[0][-1]
        return entry, decode(entry.fields)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.place.leave()


def test_each_request_of_a_batch_goes_on_with_its_tokens(rig: Rig) -> None:
    uids = rig.submit("ab", "c")
    rig.handle()
    for uid, letters in zip(uids, ("ab", "c"), strict=True):
        entry, event = rig.last(uid)
        assert entry.id == TOKENIZED_ID
        assert event == Tokenized(
            ms=event.ms, token_ids=tuple(map(ord, letters)), fingerprint="letters", by="tokenize-0"
        )
    assert rig.log.backlog(rig.inbox) == 0 and rig.log.backlog(Inbox.tokenized(rig.log.names)) == 2


@pytest.mark.parametrize(
    ("prompt", "status", "code", "words"),
    [
        ("refused", 400, "template_error", "roles must alternate"),
        ("explodes", 400, "tokenizer_error", "in the template"),
        ("poison", 400, "tokenizer_error", "cannot be encoded"),
        ("panics at once", 400, "tokenizer_error", "out of bounds"),
        ("panics", 400, "tokenizer_error", "char boundary"),
        ("x" * CONTEXT, 400, "context_length_exceeded", "16 tokens"),
        ("   ", 400, "invalid_value", "no tokens"),
    ],
)
def test_a_bad_request_fails_alone(rig: Rig, prompt: str, status: int, code: str, words: str) -> None:
    before, bad, after = rig.submit("ab", prompt, "cd")
    rig.handle()
    entry, event = rig.last(bad)
    assert entry.id == SEAL and isinstance(event, Failed)
    assert (event.status, event.code) == (status, code) and words in event.message
    assert [rig.last(uid)[0].id for uid in (before, after)] == [TOKENIZED_ID, TOKENIZED_ID]
    assert rig.log.backlog(rig.inbox) == 0


@pytest.mark.parametrize(("prompt", "error"), [("interrupted", KeyboardInterrupt), ("exits", SystemExit)])
def test_what_ends_the_process_ends_no_request(rig: Rig, prompt: str, error: type[BaseException]) -> None:
    rig.submit(prompt)
    with pytest.raises(error):
        rig.handle()
    assert rig.log.backlog(rig.inbox) == 1


def test_a_request_that_was_cancelled_meanwhile_goes_nowhere_and_is_not_even_rendered(rig: Rig) -> None:
    uid, _ = rig.submit("ab", "cd")
    cancelled = Cancelled(by="client")
    rig.log.end(uid, cancelled, frontend="web-0", retention_ms=60_000)
    rig.handle()
    entry, event = rig.last(uid)
    assert entry.id == SEAL and event == cancelled.model_copy(update={"ms": event.ms})
    assert rig.encoder.rendered == ["cd"]
    assert rig.log.backlog(rig.inbox) == 0 and rig.log.backlog(Inbox.tokenized(rig.log.names)) == 1


def test_an_entry_without_a_history_is_consumed(rig: Rig) -> None:
    rig.worker.handle([Entry("1-1", {"uid": new_uid(), "frontend": "web-0"})])
    assert rig.log.backlog(rig.inbox) == 0


def test_the_longest_prompt_that_leaves_room_for_one_token_goes_through(rig: Rig) -> None:
    (uid,) = rig.submit("x" * (CONTEXT - 1))
    rig.handle()
    assert rig.last(uid)[0].id == TOKENIZED_ID


def test_a_request_that_killed_its_tokenizers_fails_and_is_kept_among_the_dead(rig: Rig) -> None:
    poison, other = rig.submit("ab", "cd")
    first, _ = entries = rig.log.read(rig.inbox, "tokenize-0", max_entries=2, block_ms=10)
    rig.worker.bury(first, 4)
    entry, event = rig.last(poison)
    assert entry.id == SEAL and isinstance(event, Failed) and (event.status, event.code) == (500, "poisonous")
    assert "4 times" in event.message
    (letter,) = rig.log.dead_letters(9)
    assert [letter.fields[name] for name in ("uid", "stage", "deaths")] == [poison, "tokenize", "4"]
    assert rig.log.pending(rig.inbox, "tokenize-0") == [entries[1]] and rig.log.alive([poison, other]) == {other}
    assert rig.encoder.rendered == []


def test_loading_the_tokenizer_has_a_patience_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk must not have the watchdog of the loop end the process at every start."""
    given_s = []

    class Watched(Announcement):
        def came_round(self, *, patience_s: float = WATCHDOG_S) -> None:
            given_s.append(patience_s)

    def loading(folder: Path) -> LetterEncoder:
        raise ConfigError(f"loading {folder.name}")

    monkeypatch.setattr("stages.tokenize.worker.Announcement", Watched)
    monkeypatch.setattr("stages.tokenize.worker.PromptEncoder", loading)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    log = MemoryLog(Names())
    with bound_contextvars(slot=""), pytest.raises(ConfigError, match="loading"):
        run(parse_command(["stage", "tokenize"], {}), lambda: log, tmp_path)
    assert given_s == [LOAD_TIMEOUT_S]
