"""The contract of the log: what is erased leaves a tombstone and stays ended; what is purged is gone from streams."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
import redis.exceptions
from support.log_contract import FINISHED, Detokenizer, Scene, limits, put, say_end, say_tokens, submitted
from support.redis_servers import until

from pipeline.events import StepCompleted, TokenRow, encode, new_uid
from pipeline.log.forgetting import FORGETTING, FORGOTTEN, Purged, Unconsumed, ended_inbox
from pipeline.log.journal import JournalWriter
from pipeline.log.protocol import Entry, Forgotten, Submission
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, SUBMITTED_ID, sibling_uids

A, B, C = (f"0190000000007000800000000000000{digit}" for digit in "abc")


@pytest.fixture
def forgetting(log: RedisLog) -> RedisLog:
    return log


def by(log: RedisLog, *uids: str) -> list[str]:
    """Return whose tombstones there are."""
    begins = log.begins(uids)
    return [begins[uid].fields["by"] if uid in begins and begins[uid].id == SEAL else "" for uid in uids]


# erase


def test_an_erased_request_is_nothing_but_a_tombstone_and_begins_never_again(
    forgetting: RedisLog, scene: Scene, detokenizer: Detokenizer
) -> None:
    scene.accept(A, B)
    detokenizer.say(say_tokens(A, 1), say_end(A, FINISHED), say_tokens(B, 1))
    others = scene.history(B)
    for _ in range(2):
        assert forgetting.erase(A)
        assert by(forgetting, A) == [FORGETTING]
        assert forgetting.histories([A]) == [[]]
        assert forgetting.histories([A], after="1-0") == [[forgetting.begins([A])[A]]]
    assert scene.submit(A) is Submission.DUPLICATE
    assert forgetting.submit(A, [submitted()], left_ms=5000).submission is Submission.DUPLICATE
    assert not scene.end(A)
    copy = [Entry(SUBMITTED_ID, {"a": "b"}), Entry(SEAL, {"a": "b"})]
    with pytest.raises(Forgotten) as gone:
        forgetting.import_history(A, copy)
    assert 0 < gone.value.left_ms <= forgetting.limits.retention_ms
    detokenizer.say(say_tokens(A, 2), say_end(A, FINISHED), say_tokens(B, 2))
    assert forgetting.histories([A]) == [[]]
    assert scene.history(B)[: len(others)] == others and len(scene.history(B)) == len(others) + 1
    assert forgetting.alive([A, B]) == {B}


def test_who_was_erased_can_be_imported_again(forgetting: RedisLog, scene: Scene, detokenizer: Detokenizer) -> None:
    scene.accept(A)
    detokenizer.say(say_end(A, FINISHED))
    assert forgetting.erase(A)
    copy = [Entry(SUBMITTED_ID, {"a": "b"}), Entry(SEAL, {"a": "b"})]
    assert forgetting.import_history(A, copy, again=True)
    assert scene.history(A) == copy
    assert not forgetting.import_history(A, copy, again=True)


def test_who_has_not_ended_is_not_erased(forgetting: RedisLog, scene: Scene) -> None:
    scene.accept(A)
    before = scene.history(A)
    assert not forgetting.erase(A)
    assert scene.history(A) == before and forgetting.alive([A]) == {A}
    scene.end(A)
    assert forgetting.erase(A)


def test_what_expired_gets_a_tombstone_too_for_the_retention(forgetting: RedisLog, scene: Scene) -> None:
    scene.log.limits = limits(retention_ms=60)
    assert forgetting.erase(A)
    assert by(forgetting, A, B) == [FORGETTING, ""]
    until(lambda: not forgetting.begins([A]))


def test_a_finished_tombstone_says_so_and_tells_no_archiver(forgetting: RedisLog, scene: Scene) -> None:
    assert forgetting.archive_id() == ""
    forgetting.open_archive("one")
    assert forgetting.archive_id() == "one"
    scene.accept(A)
    scene.end(A)
    inbox = ended_inbox(forgetting.names)
    assert [forgetting.erase(A), forgetting.backlog(inbox)] == [True, 2]
    assert [forgetting.erase(A, finished=True), forgetting.backlog(inbox)] == [True, 2]
    assert by(forgetting, A) == [FORGOTTEN]
    assert [entry.fields["uid"] for entry in forgetting.read(inbox, "archive-0", max_entries=9, block_ms=0)] == [A, A]


def test_what_siblings_share_goes_with_the_first_of_them(forgetting: RedisLog, scene: Scene) -> None:
    forgetting.submit(A, [submitted(number=number, prompt="long " * 50) for number in range(3)])
    uids = sibling_uids(A, 3)
    for uid in uids:
        scene.end(uid)
    assert "prompt" in forgetting.begins(uids)[uids[2]].fields
    forgetting.erase(uids[0])
    assert by(forgetting, *uids) == [FORGETTING, "", ""]
    forgetting.erase(uids[1])
    forgetting.erase(uids[2])
    assert by(forgetting, *uids) == [FORGETTING] * 3


def test_how_requests_begin(forgetting: RedisLog, scene: Scene) -> None:
    scene.accept(A)
    scene.end(A)
    assert forgetting.begins([A, B]) == {A: scene.history(A)[0]}
    assert forgetting.begins([]) == {}


# who has it in hand


def test_where_workers_find_a_request(forgetting: RedisLog, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.log.operations.forgetting.KEYS_PER_LOOK", 1)
    forgetting.open_archive("one")
    assert (
        forgetting.at_work([A]) == [] and forgetting.told([A]) == Unconsumed("", 0) and forgetting.unread_steps() == {}
    )
    scene.submit(A)
    scene.submit(B)
    assert forgetting.at_work([C, A]) == ["submitted"]
    assert scene.tokenize(scene.read_one(scene.submitted, "tokenize-0"))
    assert forgetting.at_work([A]) == ["tokenized"]
    engine = scene.own("generate-0")
    (entry,) = scene.take(engine)
    scene.step(engine, 1)
    assert forgetting.at_work([A]) == ["tokenized"]
    assert forgetting.unread_steps() == {"generate-0": ("1-1", "1-1")}
    scene.end(A)
    scene.step(engine, 2, entry.id)
    assert forgetting.at_work([A]) == []
    assert forgetting.unread_steps() == {"generate-0": ("1-1", "1-2")}
    assert forgetting.at_work([B]) == ["submitted"]


def test_what_archivers_have_not_consumed_of_a_request(
    forgetting: RedisLog, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.log.operations.forgetting.KEYS_PER_LOOK", 1)
    forgetting.open_archive("one")
    scene.accept(A, B)
    for uid in (B, A):
        scene.end(uid)
    inbox = ended_inbox(forgetting.names)
    first, second = forgetting.read(inbox, "archive-0", max_entries=9, block_ms=0)
    assert forgetting.told([A, C]) == (first.id, 1)
    assert forgetting.told([A, B]) == (first.id, 2)
    forgetting.archived(scene.own("archive-0"), [first])
    assert forgetting.told([A, B]) == (second.id, 1)


# purge


def journal(log: RedisLog) -> JournalWriter:
    """Write steps of a, then of a and b, then of b; return who would write the next."""
    writer, steps = JournalWriter(), [(A, 1, 71), (A, 2, 72), (B, 1, 81), (B, 2, 82), (B, 3, 83)]
    rows = [TokenRow(uid=uid, n=n, token=token) for uid, n, token in steps]
    last = rows[1].model_copy(update={"end": "stop"})
    for number, made in enumerate([[rows[0]], [last, rows[2]], [rows[3]], [rows[4]]], 1):
        step = StepCompleted(rows=tuple(made), schedule="{}" if number == 4 else "")
        entry = Entry(f"1-{number}", {"ms": "1"} | encode(step))
        put(log, log.names.journal("generate-0"), {"bytes": "1"} | writer.fields(entry, step), entry.id)
    return writer


def letter(uid: str, **more: str) -> Mapping[str, str]:
    return {"uid": uid, "ms": "1", "stage": "generate", "error": f"It is like {A}.", **more}


def test_what_is_purged_is_gone_and_all_else_is_as_it_was(
    forgetting: RedisLog, scene: Scene, detokenizer: Detokenizer
) -> None:
    log, names = forgetting, forgetting.names
    log.open_replies("web-0")
    scene.accept(A, f"{B}.0")
    for _ in range(3):
        detokenizer.say(say_tokens(A, 1))
        detokenizer.say(say_tokens(f"{B}.0", 1))
    scene.end(f"{B}.0")
    for fields in (letter(A), letter(B), letter(f"{A}.3"), {"stream": "s", "entry": f'["1-1","x","..{A}.1.."]'}):
        put(log, names.dead, fields)
    journal(log)
    letters, steps = log.dead_letters(10), log.journal("generate-0")
    replies = scene.replies_after("0-0")
    assert log.purge([C]) == Purged()
    assert (log.dead_letters(10), log.journal("generate-0"), scene.replies_after("0-0")) == (letters, steps, replies)
    assert log.purge([A]) == Purged(letters=3, replies=3, steps=3)
    assert log.dead_letters(10) == [each for each in letters if each.fields.get("uid") == B]
    assert log.journal("generate-0") == [steps[2]], "the last one has hashes of the prompt"
    assert scene.replies_after("0-0") == [reply for reply in replies if reply.uid == f"{B}.0"]
    assert scene.told() == (f"{B}.0",)
    assert log.purge([f"{B}.0"]) == Purged(letters=1, replies=4, steps=1)
    assert scene.told() == () and log.dead_letters(10) == []


def test_a_step_of_which_nobody_can_tell_what_it_had_is_purged(forgetting: RedisLog) -> None:
    journal(forgetting)
    for entry_id in ("2-1", "2-2"):
        put(forgetting, forgetting.names.journal("generate-0"), {"bytes": "1", "ms": "1", "tokens": "9"}, entry_id)
    put(forgetting, forgetting.names.journal("generate-0"), {"bytes": "1", "tokens": "9", "rows": f"1:{B}"}, "2-3")
    assert forgetting.purge([C]).steps == 2
    assert [entry.id for entry in forgetting.journal("generate-0")] == ["1-1", "1-2", "1-3", "1-4", "2-3"]


@pytest.mark.parametrize(("later_ms", "left"), [(-1, ["1-1", "1-2"]), (0, ["1-1"])])
def test_snapshots_go_whose_journal_has_lost_what_came_before(
    forgetting: RedisLog, later_ms: int, left: list[str]
) -> None:
    ms = str(int(C[:12], 16) + later_ms)
    for entry_id, more in (("1-1", {}), ("1-2", {"schedule": "{}"})):
        put(
            forgetting,
            forgetting.names.journal("generate-0"),
            {"bytes": "1", "ms": ms, "rows": f"1:{B}"} | more,
            entry_id,
        )
    forgetting.purge([C])
    assert [entry.id for entry in forgetting.journal("generate-0")] == left


def test_a_stream_goes_on_after_a_purge_as_if_nothing_had_been_taken_out(forgetting: RedisLog) -> None:
    log, names = forgetting, forgetting.names
    journal(log)
    log.purge([A, B])
    assert log.journal("generate-0") == []
    with pytest.raises((AssertionError, redis.exceptions.ResponseError)):
        put(log, names.journal("generate-0"), {"a": "b"}, "1-4")
    put(log, names.journal("generate-0"), {"a": "b"}, "1-5")


def test_many_entries_are_purged_piece_by_piece_beside_those_who_write_and_purge(
    forgetting: RedisLog, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.log.operations.forgetting.ENTRIES_PER_LOOK", 7)
    uids = [new_uid() for _ in range(12)]
    for number in range(48):
        put(forgetting, forgetting.names.dead, {"uid": uids[number % 12], "number": str(number)})

    def purge(each: Scene, place: str) -> None:
        log = each.log
        for uid in uids[int(place) : 8 : 2]:
            log.purge([uid])

    stop = threading.Event()
    writer, written = scene.another().log, list[str]()

    def write() -> None:
        while not stop.wait(0.002):
            written.append(put(writer, writer.names.dead, {"uid": "new", "number": "new"}))

    thread = threading.Thread(target=write)
    thread.start()
    scene.at_once(purge, "01")
    stop.set()
    thread.join()
    left = [each.fields["number"] for each in forgetting.dead_letters(100_000)][::-1]
    assert [number for number in left if number != "new"] == [str(at) for at in range(48) if at % 12 >= 8]
    assert left.count("new") == len(written)


def test_files_are_written_anew(forgetting: RedisLog) -> None:
    until(forgetting.rewrite_files)
    until(forgetting.are_rewritten)


def test_nobody_gets_a_dead_letter_of_what_was_erased(forgetting: RedisLog, scene: Scene) -> None:
    scene.accept(A)
    scene.end(A)
    forgetting.erase(A)
    assert not scene.bury(A)
    assert not scene.abandon(A)
    assert forgetting.dead_letters(9) == []
    assert by(forgetting, A) == [FORGETTING]
