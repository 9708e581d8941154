"""`minisgl replay dump` and `import` on a real Redis: what goes out comes in again, here or elsewhere."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import zstandard
from support.lived_requests import LivedRequests
from support.log_contract import submitted
from support.redis_servers import command, until
from support.tool import Tool

from ops.replay.files import open_dump, read_dump, write_dump
from pipeline.events import Cancelled, Failed, new_uid
from pipeline.log.protocol import Entry
from pipeline.log.redis import RedisLog
from pipeline.names import SEAL, Names
from pipeline.recording import Recording
from pipeline.walk import walk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.zst"


def uids_in(path: Path) -> list[str]:
    return [recording.uid for recording in read_dump(path)]


# dump


def test_a_dump_has_every_request_that_has_ended_and_counts_those_that_run(
    lived: LivedRequests, dump: Tool, path: Path
) -> None:
    uids = [lived.answered("Hel", "lo"), lived.submitted(), lived.running()]
    lived.ended(uids[1], Cancelled(by="client"))
    lines = dump(str(path))
    assert lines == [
        f"{path}: 2 requests, {path.stat().st_size:,} bytes",
        "left out: 1 request without an end (--wait waits for it)",
    ]
    found = list(read_dump(path))
    assert [recording.uid for recording in found] == uids[:2]
    assert [list(recording.entries) for recording in found] == lived.log.histories(uids[:2])
    assert open_dump(path).header["namespace"] == "minisgl"
    path.unlink()
    left_out = {"running": 1, "expired": 0, "unfit": 0, "reasons": {}}
    told = {"file": str(path), "requests": 2, "left_out": left_out}
    assert dump.json(str(path)) == told | {"bytes": path.stat().st_size}


def test_requests_are_chosen_by_uid_moment_and_what_was_asked(lived: LivedRequests, dump: Tool, tmp_path: Path) -> None:
    uids = []
    for user in ("ann", "bob", "ann", "ann"):
        uids.append(lived.answered("Hel", "lo", labels={"user": user}))
    chosen = {
        (uids[2], f"cmpl-{uids[0]}"): [uids[2], uids[0]],
        ("--since", uids[1]): uids[1:],
        ("--until", uids[1]): uids[:2],
        ("--since", uids[1], "--until", uids[2]): uids[1:3],
        ("--since", "-10m", "--where", "user=ann"): [uids[0], *uids[2:]],
        ("--where", "model=nonsense,state=finished"): uids,
        (uids[0], uids[1], "--where", "user=bob"): uids[1:2],
    }
    for number, (arguments, expected) in enumerate(chosen.items()):
        file = tmp_path / str(number)
        dump(*arguments, str(file))
        assert uids_in(file) == expected, arguments


def test_the_uid_of_siblings_means_all_of_them(log: RedisLog, lived: LivedRequests, dump: Tool, path: Path) -> None:
    uid = new_uid()
    log.submit(uid, [submitted(number=number, prompt="long " * 50) for number in range(3)])
    for number in range(3):
        lived.ended(f"{uid}.{number}", Cancelled(by="client"))
    dump(uid, str(path))
    assert uids_in(path) == [f"{uid}.{number}" for number in range(3)]
    assert all("prompt" in recording.entries[0].fields for recording in read_dump(path))


def test_wait_waits_for_those_that_run(lived: LivedRequests, dump: Tool, path: Path) -> None:
    first, last = lived.answered("Hel", "lo"), lived.running()

    def end_later() -> None:
        until(lambda: any(path.parent.iterdir()))
        lived.finished(last, 0)

    thread = threading.Thread(target=end_later)
    thread.start()
    lines = dump("--wait", str(path))
    thread.join()
    assert lines == [f"{path}: 2 requests, {path.stat().st_size:,} bytes"]
    assert uids_in(path) == [first, last]


@pytest.mark.parametrize("form", ["minisgl", "openai", "mooncake"])
def test_where_no_request_is_chosen_no_file_is_made(lived: LivedRequests, dump: Tool, path: Path, form: str) -> None:
    lived.answered("Hel", "lo")
    lived.running()
    lived.ended(lived.submitted(), Cancelled(by="client"))
    nothing = f"minisgl: no request to write, so {path} is not there"
    for arguments, left_out in {
        ("--where", "user=nobody"): "",
        ("--until", "-10m"): "",
        ("--where", "state=cancelled"): "; left out: 1 request that ended before the prompt was tokenized",
    }.items():
        if form == "mooncake" or not left_out:
            assert dump.failure("--format", form, *arguments, str(path)) == f"{nothing}{left_out}\n"
    assert list(path.parent.iterdir()) == []


def test_a_request_that_is_not_there_says_why_and_no_file_is_made(lived: LivedRequests, dump: Tool, path: Path) -> None:
    assert "unknown here" in dump.failure(lived.answered("Hel", "lo"), new_uid(), str(path))
    assert not path.exists()


def test_flags_that_cannot_work_are_told(dump: Tool, path: Path) -> None:
    uid = new_uid()
    for arguments, said in {
        (): "expected a FILE to write",
        (uid, "--since", "-10m", str(path)): "name UIDs, or moments with --since and --until, not both",
        ("--since", "soon", str(path)): "'soon': must be a moment: 2026-11-23T09:00 (UTC",
        ("--where", "model", str(path)): "must be NAME=VALUE",
        (str(path.parent),): "there is such a file already",
    }.items():
        assert said in dump.refusal(*arguments)


def test_a_redacted_dump_has_no_word_of_what_was_said(lived: LivedRequests, dump: Tool, path: Path) -> None:
    lived.owner = "somebody"
    uid = lived.answered("wordwords", prompt="secrecy", labels={"user": "anybody"})
    broken = lived.answered("Hel", "lo")
    command(dump.url, "DEL", Names().request(broken))
    for entry_id, kind in (("0-1", "odd"), (SEAL, "finished")):
        command(dump.url, "XADD", Names().request(broken), entry_id, "kind", kind)
    lines = dump("--redact", str(path))
    assert lines[1:] == ["left out: 1 request that cannot be read, and so not redacted"]
    (recording,) = read_dump(path)
    text = json.dumps([recording.about, [dict(entry.fields) for entry in recording.entries]])
    assert not any(word in text for word in ("wordw", "secre", "somebody", "anybody"))
    assert recording.uid == uid
    assert open_dump(path).header["redacted"]
    second = path.with_name("second")
    dump("--redact", str(second))
    (again,) = read_dump(second)
    assert again.entries == recording.entries
    assert again.about["redacted"]["blocks"] != recording.about["redacted"]["blocks"]


# import


def test_what_was_dumped_is_there_again_after_the_log_was_lost(
    lived: LivedRequests, dump: Tool, bring_in: Tool, trace: Tool, path: Path
) -> None:
    uids = [lived.answered("Hel", "lo"), lived.answered("ü", '"\x00', "", prompt="\U0001f600"), lived.submitted()]
    lived.ended(uids[2], Failed(status=400, code="invalid_value", message="No."))
    told, histories = [trace.json(uid) for uid in uids], lived.log.histories(uids)
    dump(str(path))
    command(dump.url, "FLUSHALL")
    assert bring_in(str(path)) == [f"{path}: 3 requests imported"]
    again = [trace.json(uid) for uid in uids]
    origins = [story["labels"].pop("imported_from") for story in again]
    assert again == told
    header = open_dump(path).header
    origin = {"file": path.name} | {name: header[name] for name in ("made_ms", "namespace", "version")}
    assert origins == [origin] * 3
    for before, after in zip(histories, lived.log.histories(uids), strict=True):
        assert after[1:] == before[1:]
        assert [moment[1:] for moment in walk(after[1:])] == [moment[1:] for moment in walk(before[1:])]
    assert lived.log.living() == []
    (line,) = [line for line in trace(uids[0]) if "imported_from" in line]
    assert path.name in line


def test_an_import_leaves_what_is_there_and_can_be_repeated(
    lived: LivedRequests, dump: Tool, bring_in: Tool, path: Path
) -> None:
    uids = [lived.answered("Hel", "lo"), lived.answered("Hel", "lo")]
    dump(str(path))
    command(dump.url, "DEL", Names().request(uids[1]))
    before = lived.log.histories(uids[:1])
    lines = [f"{path}: 1 request imported", "there already, and left as it is: 1 request"]
    assert bring_in(str(path)) == lines
    assert lived.log.histories(uids[:1]) == before
    assert bring_in.json(str(path)) == {"file": str(path), "imported": 0, "there": 2, "refused": []}


def test_what_was_removed_with_forget_stays_away_until_it_is_asked_for_again(
    lived: LivedRequests, dump: Tool, bring_in: Tool, path: Path
) -> None:
    uids = [lived.answered("Hel", "lo"), lived.answered("Hel", "lo")]
    dump(str(path))
    before = lived.log.histories(uids[:1])
    assert lived.log.erase(uids[0])
    head, there, removed = bring_in(str(path))
    assert (head, there) == (f"{path}: 0 requests imported", "there already, and left as it is: 1 request")
    assert "removed with `minisgl replay forget`" in removed and "--again" in removed and " UTC: 1 request" in removed
    assert bring_in(str(path), "--again")[0] == f"{path}: 1 request imported"
    (after,) = lived.log.histories(uids[:1])
    assert after[1:] == before[0][1:]


def test_the_owner_comes_in_only_if_it_is_asked_for(
    lived: LivedRequests, dump: Tool, bring_in: Tool, path: Path
) -> None:
    lived.owner = "team"
    uid = lived.answered("Hel", "lo")
    dump(str(path))
    for flags, owner in (((), ""), (("--keep-owner",), "team")):
        command(dump.url, "DEL", Names().request(uid))
        bring_in(*flags, str(path))
        assert lived.log.histories([uid])[0][0].fields.get("owner", "") == owner


def test_imported_requests_have_a_retention_of_their_own(
    lived: LivedRequests, dump: Tool, bring_in: Tool, path: Path
) -> None:
    uid = lived.answered("Hel", "lo")
    dump(str(path))
    for flags, expected_s in (((), 86400), (("--retention", "100"), 100)):
        command(dump.url, "DEL", Names().request(uid))
        bring_in(str(path), *flags)
        assert expected_s - 30 < command(dump.url, "PTTL", Names().request(uid)) / 1000 <= expected_s


def test_an_imported_request_that_is_dumped_again_says_where_it_was_first(
    lived: LivedRequests, dump: Tool, bring_in: Tool, path: Path
) -> None:
    uid = lived.answered("Hel", "lo")
    dump("--redact", str(path))
    command(dump.url, "FLUSHALL")
    bring_in(str(path))
    (first,) = lived.log.histories([uid])
    second = path.with_name("second")
    dump(str(second))
    command(dump.url, "FLUSHALL")
    bring_in(str(second))
    assert lived.log.histories([uid]) == [first]
    assert [one.about for one in read_dump(second)] == [one.about for one in read_dump(path)]


def recorded(uid: str, *entries: tuple[str, dict[str, str]]) -> Recording:
    return Recording(uid, tuple(Entry(*entry) for entry in entries))


BEGUN = ("0-1", {"kind": "submitted", "ms": "1", "endpoint": "e", "frontend": "w", "sampling": "{}"})
OVER = (SEAL, {"kind": "cancelled", "ms": "2", "by": "client"})


def test_requests_that_cannot_come_in_are_named_and_the_others_come_in(dump: Tool, bring_in: Tool, path: Path) -> None:
    uids = [new_uid() for _ in range(6)]
    odd = (OVER[0], OVER[1] | {"v": "3"})
    write_dump(
        path,
        [
            recorded(uids[0], BEGUN),
            recorded(uids[1], BEGUN, odd),
            recorded("../live", BEGUN, OVER),
            recorded(uids[2], OVER),
            recorded(uids[3], BEGUN, ("0-2", {"kind": "odd"}), OVER),
            recorded(uids[4], BEGUN, BEGUN, OVER),
            recorded(uids[5], BEGUN, OVER),
        ],
    )
    code, out, err = bring_in.run(str(path))
    assert (code, out) == (1, f"{path}: 1 request imported\n")
    reasons = [line.removeprefix("minisgl: not imported: ") for line in err.splitlines()]
    for line, uid, reason, said in zip(
        range(2, 8),
        [uids[0], uids[1], "../live", uids[2], uids[3], uids[4]],
        ["it has not ended", "version 3", "not a uid", "expected submitted", "unknown kind", "rising order"],
        reasons,
        strict=True,
    ):
        assert said.startswith(f"line {line}, {uid}: ") and reason in said
    assert command(dump.url, "KEYS", "*") == [Names().request(uids[5]).encode()]


def test_what_comes_before_a_damage_is_imported(lived: LivedRequests, dump: Tool, bring_in: Tool, path: Path) -> None:
    uids = [lived.answered("Hel", "lo"), lived.answered("Hel", "lo")]
    dump(str(path))
    command(dump.url, "FLUSHALL")
    text = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes())
    path.write_bytes(text[: text.index(uids[1].encode()) + 50])
    code, out, err = bring_in.run(str(path))
    assert (code, out) == (1, f"{path}: 1 request imported\n")
    assert err.startswith(f"minisgl: {path}, line 3: not JSON")
    assert lived.log.made_between(0, 2**48) == uids[:1]


def test_a_file_that_is_no_dump_changes_nothing(bring_in: Tool, path: Path) -> None:
    path.write_text("what?\n")
    assert f"{path}, line 1: " in bring_in.failure(str(path))


def test_import_takes_one_file_that_is_there(bring_in: Tool, path: Path) -> None:
    assert "expected one FILE, got 0" in bring_in.refusal()
    assert "cannot be read: No such file" in bring_in.refusal(str(path))


TOKEN = ("1-0", {"kind": "tokens", "ms": "1", "tokens": "5", "text": "a", "step": "1-1"})


@pytest.mark.parametrize(
    ("entries", "field"),
    [
        ((BEGUN, (SEAL, OVER[1] | {"ms": "900000000000000000"})), "ms"),
        (((BEGUN[0], BEGUN[1] | {"ms": "-1"}), OVER), "ms"),
        (((BEGUN[0], BEGUN[1] | {"deadline_ms": "1e17"}), OVER), "deadline_ms"),
        ((BEGUN, (TOKEN[0], TOKEN[1] | {"age_ms": "900000000000000000"}), OVER), "age_ms"),
        ((BEGUN, (TOKEN[0], TOKEN[1] | {"step": "soon"}), OVER), "step"),
        ((BEGUN, ("1000000000-0", TOKEN[1] | {"count": "1000000000"}), OVER), "counts 1000000000 tokens and has 1"),
        ((BEGUN, ("9999999999999999999-0", TOKEN[1]), OVER), "9999999999999999999-0"),
        ((BEGUN, ("one-0", TOKEN[1]), OVER), "one-0"),
        ((BEGUN, (SEAL, OVER[1] | {"n": "9" * 20})), "n"),
    ],
)
def test_times_counts_and_ids_that_no_tool_can_show_are_not_imported(
    bring_in: Tool, dump: Tool, path: Path, entries: Any, field: str
) -> None:
    uid = new_uid()
    write_dump(path, [recorded(uid, *entries)])
    code, out, err = bring_in.run(str(path))
    assert (code, out) == (1, f"{path}: 0 requests imported\n")
    assert err.startswith(f"minisgl: not imported: line 2, {uid}: ") and len(err.splitlines()) == 1
    assert field in err
    assert command(dump.url, "KEYS", "*") == []


def test_a_uid_of_a_moment_without_a_date_is_not_imported(bring_in: Tool, path: Path) -> None:
    write_dump(path, [recorded("f" * 12 + new_uid()[12:], BEGUN, OVER)])
    code, _, err = bring_in.run(str(path))
    assert code == 1 and "uid: " in err


def test_of_many_requests_that_cannot_come_in_some_are_named(
    bring_in: Tool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.replay.dump.MOST_TOLD", 2)
    write_dump(path, [recorded(f"{number}", BEGUN, OVER) for number in range(5)])
    code, _, err = bring_in.run(str(path))
    assert code == 1 and err.splitlines()[2:] == ["minisgl: not imported: 3 more"]
