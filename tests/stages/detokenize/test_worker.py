"""The detokenizer between two commits of the log: nothing twice, nothing lost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from support.calls import failing_once
from support.dialects import make_tokenizer
from support.folds import DECODER, bring, prepared, token_row
from support.log_contract import put
from support.measured import count_of
from support.memory_log.log import MemoryLog
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from pipeline.errors import LogUnavailable
from pipeline.events import (
    Cancelled,
    End,
    Failed,
    Finished,
    StepCompleted,
    TokenRow,
    TokensProduced,
    decode,
)
from pipeline.log.protocol import Entry
from pipeline.metrics.counters import Measures
from pipeline.metrics.families import (
    BETWEEN_TOKENS_SECONDS,
    COMMIT_SECONDS,
    FIRST_TOKEN_SECONDS,
    REQUEST_SUCCESS,
    UNREADABLE_ENTRIES,
)
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID, Names
from pipeline.serving import Serving
from pipeline.stage.slots import SlotLease, acquire_slot
from stages.detokenize.fold import DetokenizeFold
from stages.detokenize.worker import LEARNT_TOGETHER, DetokenizeWorker, load_decoder

LEASE_MS = 60_000
UID = "0" * 32


class Rig:
    """A log with one tokenized request, an engine's owner and a detokenizer."""

    def __init__(self) -> None:
        self.log = MemoryLog(Names())
        self.inbox = prepared(self.log)
        bring(self.log, UID)
        self.engine = acquire_slot(self.log, "generate", LEASE_MS)
        self.slot_lease = SlotLease(self.log, acquire_slot(self.log, "detokenize", LEASE_MS), LEASE_MS)
        self.measures = Measures()
        self.worker = self.another_worker()

    def another_worker(self) -> DetokenizeWorker:
        return DetokenizeWorker(self.log, self.slot_lease, DetokenizeFold(DECODER), "generate-0", self.measures)

    def counted(self) -> tuple[float, ...]:
        """Return how often there was a first token, another one, a commit, and an end in time and in error."""
        labels = {COMMIT_SECONDS: ["produced"], REQUEST_SUCCESS: ["length"]}
        families = (FIRST_TOKEN_SECONDS, BETWEEN_TOKENS_SECONDS, COMMIT_SECONDS, REQUEST_SUCCESS)
        found = [count_of(self.measures, family, *labels.get(family, [])) for family in families]
        return *found, count_of(self.measures, REQUEST_SUCCESS, "error")

    def step(self, number: int, *rows: TokenRow) -> Entry:
        event = StepCompleted(rows=rows)
        self.log.step(self.engine, {number: event}, ended=[], control_cursor="0-0", lease_ms=LEASE_MS)
        (entry,) = self.log.read(self.inbox, "detokenize-0", max_entries=1, block_ms=10)
        return entry

    def text(self, uid: str = UID) -> str:
        events = [decode(entry.fields) for entry in self.log.histories([uid])[0]]
        return "".join(event.text for event in events if isinstance(event, TokensProduced))

    def last_reply(self, uid: str = UID) -> TokensProduced | End:
        """Return what the frontend heard last of a request."""
        _, replies = self.log.read_replies("web-0", "0-0", block_ms=10)
        return [reply.event for reply in replies if reply.uid == uid][-1]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.slot_lease.leave()


def row(n: int, letter: str, *, last: bool = False, uid: str = UID) -> TokenRow:
    return token_row(uid, n, letter, "length" if last else None)


def test_an_engine_with_the_epoch_of_one_that_the_log_has_lost_is_not_taken_for_it(rig: Rig) -> None:
    """The log came back with older data, without these steps and without their owner."""
    rig.worker.handle([rig.step(1, row(1, "a")), rig.step(2, row(2, "b"))])
    older, worker = Rig(), rig.worker
    older.slot_lease.leave()
    worker._log, worker._slot_lease = older.log, older.slot_lease
    worker.handle([older.step(1, row(1, "a"))])
    assert older.text() == "a"
    worker.handle([older.step(2, row(2, "b", last=True))])
    assert older.text() == "ab" and isinstance(older.last_reply(), Finished)


def test_steps_of_one_read_reach_the_history_and_the_frontend_in_one_commit(rig: Rig) -> None:
    rig.worker.handle([rig.step(1, row(1, "a")), rig.step(2, row(2, "b", last=True))])
    assert rig.text() == "ab" and rig.log.backlog(rig.inbox) == 0
    _, replies = rig.log.read_replies("web-0", "0-0", block_ms=10)
    assert [reply.n for reply in replies] == [1, 2, 2] and isinstance(replies[-1].event, Finished)
    assert rig.counted() == (1, 1, 1, 1, 0)
    assert rig.log.alive([UID]) == set()


@pytest.mark.parametrize(("tokenizer", "text"), [("f", "a"), ("another", "")])
def test_only_tokens_of_its_own_tokenizer_become_text(rig: Rig, tokenizer: str, text: str) -> None:
    rig.slot_lease.serving = Serving(tokenizer=tokenizer)
    rig.worker.handle([rig.step(1, row(1, "a"))])
    assert rig.text() == text and rig.log.backlog(rig.inbox) == 0
    assert (rig.log.alive([UID]) == set()) is (tokenizer == "another")
    if tokenizer == "another":
        failed = rig.last_reply()
        assert isinstance(failed, Failed) and failed.code == "other_model"
        assert "tokenizer f" in failed.message


def test_a_successor_continues_from_the_histories(rig: Rig) -> None:
    rig.worker.handle([rig.step(1, row(1, "a"))])
    rig.another_worker().handle([rig.step(2, row(2, "b"))])
    assert rig.text() == "ab" and rig.counted() == (1, 1, 2, 0, 0)


def test_of_steps_of_which_one_was_consumed_before_the_others_are_said(rig: Rig) -> None:
    """As when Redis stood still, and the commit of one of them took place after its caller had given up."""
    entries = [rig.step(number, row(number, letter)) for number, letter in enumerate("abc", 1)]
    rig.another_worker().handle(entries[:1])
    rig.worker.handle(entries)
    assert rig.text() == "abc" and rig.log.backlog(rig.inbox) == 0
    _, replies = rig.log.read_replies("web-0", "0-0", block_ms=10)
    assert [reply.n for reply in replies] == [1, 2, 3]
    assert rig.counted()[2] == 1 + 1 + 3, "the first alone, all in vain, each alone"


def test_a_step_that_needs_a_history_is_not_committed_with_those_before(rig: Rig) -> None:
    """The history of a request that comes in the second step may be written by the first."""
    other = "1" * 32
    bring(rig.log, other)
    entries = [rig.step(1, row(1, "a")), rig.step(2, row(2, "b"), row(1, "x", uid=other)), rig.step(3, row(3, "c"))]
    rig.worker.handle(entries)
    assert (rig.text(), rig.text(other)) == ("abc", "x") and rig.counted()[2] == 2


def test_steps_with_many_rows_are_not_committed_together(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.detokenize.worker.MOST_ROWS_TOGETHER", 2)
    rig.worker.handle([rig.step(number, row(number, letter)) for number, letter in enumerate("abcde", 1)])
    assert rig.text() == "abcde" and rig.counted()[2] == 3


def test_steps_before_one_that_cannot_be_told_are_said(rig: Rig) -> None:
    rig.worker.handle([rig.step(1, row(1, "a"))])
    entries = [rig.step(2, row(2, "b")), rig.step(3, TokenRow(uid=UID, n=3, token=-1)), rig.step(4, row(4, "d"))]
    rig.worker.handle(entries)
    assert rig.text() == "ab" and rig.log.backlog(rig.inbox) == 0
    (letter,) = rig.log.dead_letters(9)
    assert "3" in letter.fields["entry"]


@pytest.mark.parametrize("is_done", [True, False], ids=["its reply was lost", "it never took place"])
def test_a_step_whose_commit_failed_is_said_once(rig: Rig, is_done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = rig.step(1, row(1, "a"))
    failing_once(monkeypatch, rig.log, "produced", LogUnavailable("connection reset"), is_done=is_done)
    with pytest.raises(LogUnavailable):
        rig.worker.handle([entry])
    rig.worker.handle([entry] if is_done else rig.log.pending(rig.inbox, "detokenize-0"))
    rig.worker.handle([rig.step(2, row(2, "b"))])
    assert rig.text() == "ab"
    # What somebody else may have counted is not counted again: then the second token has no time to the one before.
    assert rig.counted()[:2] == ((0, 0) if is_done else (1, 1))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "cancelled", "v": "1", "by": "x"}, "a cancelled among its steps"),
        ({"kind": "step", "v": "1", "rows": "[{"}, "a step entry does not decode"),
        ({"kind": "of tomorrow"}, "unknown kind"),
    ],
)
def test_an_entry_that_is_no_step_is_named_and_consumed(rig: Rig, fields: dict[str, str], words: str) -> None:
    first = rig.step(1, row(1, "a"))
    damaged = rig.step(2)
    with capture_logs() as lines:
        rig.worker.handle([first, Entry(damaged.id, fields), rig.step(3, row(2, "b"))])
    (line,) = [line for line in lines if line["event"] == "entry_buried"]
    assert (line["log_level"], line["stream"], line["id"]) == ("error", rig.inbox.stream, damaged.id)
    assert words in line["reason"] and [letter.fields["stage"] for letter in rig.log.dead_letters(9)] == ["detokenize"]
    assert rig.text() == "ab" and rig.log.backlog(rig.inbox) == 0


def test_the_tokens_of_a_step_that_was_lost_end_their_request(rig: Rig) -> None:
    rig.worker.handle([rig.step(1, row(1, "a"))])
    lost = rig.step(2, row(2, "b"))
    rig.worker.handle([Entry(lost.id, {"kind": "step"}), rig.step(3, row(3, "c")), rig.step(4, row(4, "d"))])
    event = rig.last_reply()
    assert rig.text() == "a" and isinstance(event, Failed) and event.code == "log_lost"
    assert rig.counted()[-2:] == (0, 1)
    assert rig.log.alive([UID]) == set() and rig.log.backlog(rig.inbox) == 0


@pytest.mark.parametrize("damaged", [SUBMITTED_ID, TOKENIZED_ID])
def test_a_history_that_does_not_decode_fails_its_request_alone(
    rig: Rig, damaged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = "1" * 32
    bring(rig.log, other)
    histories = rig.log.histories

    def broken(uids: Sequence[str]) -> list[list[Entry]]:
        return [
            [
                Entry(entry.id, {**entry.fields, "v": "{"}) if uid == UID and entry.id == damaged else entry
                for entry in history
            ]
            for uid, history in zip(uids, histories(uids), strict=True)
        ]

    monkeypatch.setattr(rig.log, "histories", broken)
    rig.worker.handle([rig.step(1, row(1, "a"), row(1, "b", uid=other)), rig.step(2, row(2, "c"))])
    monkeypatch.undo()
    event = rig.last_reply(UID)
    assert isinstance(event, Failed) and (event.status, event.code) == (500, "log_damaged")
    assert "does not decode" in event.message
    assert rig.text() == "" and rig.text(other) == "b" and rig.log.alive([UID, other]) == {other}
    assert rig.counted()[-2:] == (0, 1)
    assert rig.log.backlog(rig.inbox) == 0


def test_a_damaged_history_that_names_no_frontend_ends_too(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.log, "histories", lambda uids: [[Entry(SUBMITTED_ID, {"kind": "submitted"})] for _ in uids])
    rig.worker.handle([rig.step(1, row(1, "a"))])
    monkeypatch.undo()
    assert rig.log.histories([UID])[0][-1].id == SEAL and rig.log.alive([UID]) == set()


# entries that cannot be read


def test_a_step_of_a_newer_version_is_left_in_its_slot_until_its_requests_have_ended(rig: Rig) -> None:
    written = rig.step(1, row(1, "a"))
    newer = Entry(written.id, {**written.fields, "v": "3"})
    with capture_logs() as lines:
        for _ in range(3):
            rig.worker.handle([newer])
            assert rig.log.pending(rig.inbox, "detokenize-0") == [written]
        rig.worker.bury(newer, 4)
        assert rig.log.dead_letters(9) == [] and rig.log.alive([UID]) == {UID}
        assert [line["event"] for line in lines] == ["left_to_newer_worker"]
        rig.log.end(UID, Cancelled(by="client"), frontend="web-0")
        rig.worker.handle([newer])
    assert [line["event"] for line in lines] == ["left_to_newer_worker", "entry_buried"]
    assert rig.log.backlog(rig.inbox) == 0 and count_of(rig.measures, UNREADABLE_ENTRIES, "steps") == 1


@pytest.mark.parametrize("epoch", [1, 2, 2**64 - 1])
def test_what_its_engine_cannot_have_written_is_left_to_nobody(rig: Rig, epoch: int) -> None:
    """An engine does not change its version within an epoch, and there is no epoch after that of its owner."""
    rig.worker.handle([rig.step(1, row(1, "a"))])
    foreign = put(rig.log, rig.inbox.stream, {"v": "3", "rows": "[]"}, f"{epoch}-7")
    rig.worker.handle(rig.log.read(rig.inbox, "detokenize-0", max_entries=9, block_ms=10))
    assert [json.loads(letter.fields["entry"])[0] for letter in rig.log.dead_letters(9)] == [foreign]
    rig.worker.handle([rig.step(2, row(2, "b"))])
    assert rig.text() == "ab"


def test_a_row_that_cannot_be_told_ends_its_request_and_no_other_of_its_step(rig: Rig) -> None:
    other, strange = "1" * 32, TokenRow(uid=UID, n=1, token=-1)
    bring(rig.log, other)
    with capture_logs() as lines:
        for number in (1, 2, 3):
            rows = [strange, row(2, "b", uid=other)] if number == 2 else [row(number, "abc"[number - 1], uid=other)]
            rig.worker.handle([rig.step(number, *rows)])
    failed = rig.last_reply()
    assert isinstance(failed, Failed) and failed.code == "log_damaged"
    assert rig.text(other) == "abc" and rig.log.alive([UID, other]) == {other} and rig.log.backlog(rig.inbox) == 0
    assert count_of(rig.measures, UNREADABLE_ENTRIES, "steps") == 1 == rig.counted()[-1]
    (line,) = [line for line in lines if line["event"] == "entry_buried"]
    (letter,) = rig.log.dead_letters(9)
    assert line["ended"] == [UID] == [letter.fields["uid"]]


def test_who_learns_long_histories_shows_progress_all_the_time(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token costs two calls of the decoder, and each turn between two signs of progress has a bound."""
    monkeypatch.setattr("stages.detokenize.worker.TURN", 100)
    uids = [f"{number:032x}" for number in range(1, 20)]
    tokens = {"kind": "tokens", "v": "1", "ms": "1", "count": "1", "tokens": "97", "text": "a", "step": "1-1"}
    for uid in uids:
        bring(rig.log, uid)
        for n in range(1, 1 + 500 * (uid == uids[0])):
            put(rig.log, rig.log.names.request(uid), tokens, f"{n}-0")
    work: list[str] = []
    histories = rig.log.histories

    def read(some: Sequence[str]) -> list[list[Entry]]:
        work.append("histories")
        assert len(some) <= LEARNT_TOGETHER
        return histories(some)

    def plain(token_ids: Sequence[int]) -> str:
        work.append("decode")
        assert len(token_ids) < 20
        return DECODER.plain(token_ids)

    monkeypatch.setattr(rig.log, "histories", read)
    monkeypatch.setattr(rig.slot_lease, "report_progress", lambda **_: work.append("round"))
    fold = DetokenizeFold(dataclasses.replace(DECODER, plain=plain))
    worker = DetokenizeWorker(rig.log, rig.slot_lease, fold, "generate-0")
    worker.handle([rig.step(1, *(row(501 if uid == uids[0] else 1, "x", uid=uid) for uid in uids))])
    turns = "".join(word[0] for word in work).split("r")
    assert max(turn.count("d") for turn in turns) <= 2 * 100 + 2 * len(uids) and work.count("decode") <= 2 * 600
    assert max(turn.count("h") for turn in turns) == 1 and rig.text(uids[0]) == "a" * 500 + "x"


def test_the_history_of_a_request_that_has_ended_is_not_folded(rig: Rig) -> None:
    """It may be what killed a worker before."""
    rig.worker.handle([rig.step(1, row(1, "a"))])
    rig.log.end(UID, Cancelled(by="client"), frontend="web-0")

    def never(token_ids: Sequence[int]) -> str:
        raise AssertionError(token_ids)

    fold = DetokenizeFold(dataclasses.replace(DECODER, plain=never))
    DetokenizeWorker(rig.log, rig.slot_lease, fold, "generate-0").handle([rig.step(2, row(2, "b"))])
    assert rig.text() == "a" and rig.log.backlog(rig.inbox) == 0 and fold.num_known == 1


def test_a_history_with_an_id_that_no_number_of_tokens_is_ends_its_request_alone(rig: Rig) -> None:
    tokens = {"kind": "tokens", "count": "1", "tokens": "5", "text": "x", "step": "1-1"}
    put(rig.log, rig.log.names.request(UID), tokens, f"{2**64 - 1}-0")
    rig.worker.handle([rig.step(1, row(1, "a"))])
    failed = rig.last_reply()
    assert isinstance(failed, Failed) and failed.code == "log_damaged" and f"{2**64 - 1}-0" in failed.message
    assert rig.log.dead_letters(9) == []


def test_a_decoder_keeps_the_special_tokens_that_it_is_told_to(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, "mistral_names")
    tokenizer, decoder = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), load_decoder(tmp_path)
    ids = tokenizer.encode("so [TOOL_CALLS]look[ARGS]{}<|im_end|> <think>é</think>", add_special_tokens=False).ids
    assert decoder.plain(ids) == "so look{} <think>é</think>"
    calls, args = tokenizer.encode("[TOOL_CALLS][ARGS]", add_special_tokens=False).ids
    assert decoder.keeping({calls, args})(ids) == "so [TOOL_CALLS]look[ARGS]{} <think>é</think>"
    assert decoder.keeping({calls})(ids) == "so [TOOL_CALLS]look{} <think>é</think>"
    assert decoder.keeping(())(ids) == decoder.plain(ids)


def test_a_decoder_writes_the_tokens_that_only_the_tokenizer_config_adds(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, "mistral_names")
    file, tokenizer = tmp_path / "tokenizer_config.json", Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tool, secret = tokenizer.get_vocab_size(), tokenizer.get_vocab_size() + 1
    (think,) = tokenizer.encode("<think>").ids
    added = {
        tool: {"content": "<my_tool>"},
        secret: {"content": "<s>", "special": True},
        think: {"content": "<think>", "special": True},
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | {"added_tokens_decoder": added}))
    decoder, ids = load_decoder(tmp_path), [think, tool, secret]
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert decoder.special(ids) == theirs.decode(ids) == "<think><my_tool><s>"
    assert decoder.plain(ids) == theirs.decode(ids, skip_special_tokens=True) == "<my_tool>"
    assert decoder.keeping({secret})(ids) == "<my_tool><s>"
    assert [decoder.piece(token) for token in ids] == ["<think>", "<my_tool>", "<s>"]
