"""`minisgl dead` on a real Redis: every action, and what it says when it cannot do it."""

from __future__ import annotations

import pytest
from support.lived_requests import LivedRequests
from support.redis_servers import command
from support.tool import Tool

import ops.dead
from pipeline.events import Failed, SamplingParams, Submitted, decode, new_uid
from pipeline.log.protocol import DeadLetter, Entry, Inbox
from pipeline.log.redis import RedisLog
from pipeline.names import Names
from pipeline.views.history import copied_history, story


def letter_ids(lived: LivedRequests) -> list[str]:
    return [letter.id for letter in lived.log.dead_letters(999)]


def expire(dead: Tool, uid: str) -> None:
    command(dead.url, "DEL", Names().request(uid))


# ls


def test_ls_is_a_table_with_the_newest_first(lived: LivedRequests, dead: Tool) -> None:
    first, second = lived.dead(error="exit code -11"), lived.dead(error="a\nlong error")
    lines = dead("ls")
    assert lines[0].split() == ["when", "uid", "or", "id", "stage", "deaths", "error"]
    assert [line.split()[3:] for line in lines[1:]] == [
        [second, "generate", "3", r"a\nlong", "error"],
        [first, "generate", "3", "exit", "code", "-11"],
    ]
    assert lines[1].startswith("20") and lines[1].split()[2] == "UTC"


def test_ls_shows_all_letters_also_past_the_first_page(lived: LivedRequests, dead: Tool) -> None:
    for number in range(230):
        command(dead.url, "XADD", Names().dead, f"{number + 1}-0", "uid", f"u{number}", "ms", number)
    assert [line.split()[3] for line in dead("ls")[1:]] == [f"u{number}" for number in reversed(range(230))]


def test_ls_of_none_says_so(lived: LivedRequests, dead: Tool) -> None:
    assert dead("ls") == ["no dead letters"]
    assert dead("ls", "--json") == ["[]"]


def test_ls_as_json_has_every_field_but_the_history(lived: LivedRequests, dead: Tool) -> None:
    uid = lived.dead()
    (letter,) = dead.json("ls")
    (written,) = lived.log.dead_letters(9)
    assert letter == {
        "id": written.id,
        "uid": uid,
        "ms": int(written.fields["ms"]),
        "stage": "generate",
        "deaths": 3,
        "error": "exit code -11",
        "entry": {"uid": uid, "frontend": "web-0"},
    }


# show


def test_show_says_what_killed_whom_and_tells_the_story_also_when_the_history_has_expired(
    lived: LivedRequests, dead: Tool
) -> None:
    uid = lived.dead()
    expire(dead, uid)
    lines = dead("show", uid)
    assert lines[0].startswith(f"dead letter {letter_ids(lived)[0]}, 20")
    assert lines[1] == "killed generate 3 times; the last time: exit code -11"
    assert uid in lines[2]
    assert f"request {uid}: failed" in lines
    assert [line.split()[2] for line in lines if "taken_over" in line] == ["taken_over"] * 3
    assert lines[-1] == "text: He"


def test_show_as_json_is_the_letter_and_the_story(lived: LivedRequests, dead: Tool) -> None:
    uid = lived.dead()
    said = dead.json("show", uid)
    (written,) = lived.log.dead_letters(9)
    assert said["story"] == story(uid, copied_history(written))
    assert (said["letter"]["uid"], said["letter"]["id"]) == (uid, written.id)


def test_show_says_when_the_copy_of_the_history_was_cut(lived: LivedRequests, dead: Tool) -> None:
    uid = lived.dead(prompt="x" * 70_000)
    lines = dead("show", uid)
    assert lines[3].endswith("; entries left out there: 1")
    assert f"request {uid}: failed" in lines


def test_a_letter_is_found_by_its_id_too(lived: LivedRequests, dead: Tool) -> None:
    first, second = lived.dead(), lived.dead()
    newest, oldest = letter_ids(lived)
    assert f"request {first}: failed" in dead("show", oldest)
    assert f"request {second}: failed" in dead("show", newest)
    assert f"request {first}: failed" in dead("show", f"chatcmpl-{first}")


def test_a_damaged_letter_is_one_line_can_be_seen_and_dropped(lived: LivedRequests, dead: Tool) -> None:
    command(dead.url, "XADD", lived.log.names.dead, "5-0", "uid", "u", "deaths", "many")
    assert "5-0" in dead.failure("show", "u")
    assert dead("ls")[1].split() == ["?", "u", "?", "many", "?"]
    dead("drop", "5-0")
    assert letter_ids(lived) == []


# requeue


def test_requeue_sends_the_request_again_to_nobody_and_drops_the_letter(lived: LivedRequests, dead: Tool) -> None:
    uid = lived.dead(prompt="Again")
    before = decode(lived.log.histories([uid])[0][0].fields)
    (new,) = dead("requeue", uid, "--request-timeout", "7", "--retention", "9")
    assert letter_ids(lived) == []
    (entry,) = lived.log.histories([new])[0]
    event = decode(entry.fields)
    assert isinstance(before, Submitted) and isinstance(event, Submitted)
    assert event.deadline_ms == event.ms + 7000
    times = {"ms": event.ms, "deadline_ms": event.deadline_ms}
    assert event == before.model_copy(update={"frontend": "", "labels": {"user": "u1", "requeued_from": uid}, **times})
    assert lived.log.alive([new]) == {new}
    inbox = Inbox.submitted(lived.log.names)
    (work,) = lived.log.read(inbox, "tokenize-0", max_entries=9, block_ms=0)
    assert work.fields == {"uid": new, "frontend": ""}
    left_ms = command(dead.url, "PTTL", Names().request(new))
    assert 10_000 < left_ms <= 16_000


def test_a_letter_that_somebody_else_requeues_meanwhile_is_sent_once(
    lived: LivedRequests, dead: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid, find, sent = lived.dead(), ops.dead.find, list[str]()

    def find_then_another_sends(log: RedisLog, named: str) -> Entry:
        letter = find(log, named)
        monkeypatch.setattr(ops.dead, "find", find)
        sent.append(dead("requeue", named)[0])
        return letter

    monkeypatch.setattr(ops.dead, "find", find_then_another_sends)
    assert uid in dead.failure("requeue", uid)
    assert lived.log.living() == sent and letter_ids(lived) == []


def test_a_dead_letter_and_the_request_that_is_sent_again_have_the_owner(lived: LivedRequests, dead: Tool) -> None:
    lived.owner = "team-a"
    uid = lived.dead()
    (letter,) = lived.log.dead_letters(9)
    (new,) = dead("requeue", uid)
    for entry in (copied_history(letter)[0], lived.log.histories([new])[0][0]):
        event = decode(entry.fields)
        assert isinstance(event, Submitted) and event.owner == "team-a"


def test_a_requeued_request_goes_its_whole_way_though_nobody_listens(lived: LivedRequests, dead: Tool) -> None:
    uid = lived.dead()
    said = dead.json("requeue", uid)
    assert said["requeued_from"] == uid
    lived.frontend = ""
    lived.taken_in(said["uid"])
    lived.tokens(said["uid"], "Hello")
    lived.finished(said["uid"], 1)
    told = story(said["uid"], lived.log.histories([said["uid"]])[0])
    assert (told["state"], told["text"]) == ("finished", "Hello")


def test_a_sibling_is_shown_traced_and_requeued_with_all_that_it_shared(
    lived: LivedRequests, dead: Tool, trace: Tool
) -> None:
    base, long = new_uid(), "all work and no play " * 10
    event = Submitted(endpoint="e", frontend="web-0", prompt=long, sampling=SamplingParams(stop=(long,)))
    lived.log.submit(base, [event, event.model_copy(update={"sampling": SamplingParams(stop=(long,), seed=7)})])
    uid = f"{base}.1"
    killed = Failed(status=500, code="poisonous", message="No.")
    assert lived.log.end(uid, killed, frontend="web-0", dead=DeadLetter("tokenize", {"uid": uid}, 3, "exit code -11"))
    for told in (dead.json("show", uid)["story"], trace.json(uid)):
        assert (told["uid"], told["sampling"]["seed"], told["sampling"]["stop"]) == (uid, 7, [long])
    new = dead("requeue", uid)[0]
    (entry,) = lived.log.histories([new])[0]
    again = decode(entry.fields)
    assert isinstance(again, Submitted) and (again.siblings, again.labels) == (1, {"requeued_from": uid})
    assert (again.prompt, again.sampling) == (long, SamplingParams(stop=(long,), seed=7))


@pytest.mark.parametrize(
    ("place", "said"),
    [("history gone", ""), ("backlog full", "--max-queued-requests"), ("Redis full", "takes no new work")],
)
def test_requeue_where_it_cannot_be_keeps_the_letter(lived: LivedRequests, dead: Tool, place: str, said: str) -> None:
    uid = lived.dead()
    match place:
        case "history gone":
            expire(dead, uid)
        case "backlog full":
            lived.submitted()
        case _:
            command(dead.url, "CONFIG", "SET", "maxmemory", 1)
    told = dead.failure("requeue", uid, *(("--max-queued-requests", "1") if place == "backlog full" else ()))
    assert said in told and (uid in told or place == "Redis full")
    assert len(letter_ids(lived)) == 1


# drop


def test_drop_removes_one_letter_and_leaves_the_history(lived: LivedRequests, dead: Tool) -> None:
    first, second = lived.dead(), lived.dead()
    newest, oldest = letter_ids(lived)
    assert dead("drop", first) == [f"dropped {oldest}, {first}"]
    assert letter_ids(lived) == [newest]
    assert lived.log.histories([first])[0] != []
    assert dead.json("drop", newest) == {"id": newest, "uid": second}
    assert letter_ids(lived) == []


# what cannot work


@pytest.mark.parametrize("action", ["show", "requeue", "drop"])
@pytest.mark.parametrize("named", ["nobody", "1-0", "18446744073709551615-18446744073709551615", "0" * 32])
def test_a_letter_that_is_not_there_is_one_line(lived: LivedRequests, dead: Tool, action: str, named: str) -> None:
    lived.dead()
    assert named in dead.failure(action, named)
    assert len(letter_ids(lived)) == 1


# entries that could not be read


def buried(lived: LivedRequests, uid: str = "") -> str:
    """Have a tokenizer bury an entry that is not text; return the id of its letter."""
    log, inbox = lived.log, Inbox.submitted(lived.log.names)
    assert isinstance(log, RedisLog)
    command(log.url, "XADD", inbox.stream, "*", b"\xffrontend", b"\x1b[2J", *(("uid", uid) if uid else ()))
    (entry,) = log.read(inbox, "tokenize-0", max_entries=9, block_ms=0)
    failed = Failed(status=500, code="log_damaged", message="It is not text.")
    assert log.bury(inbox, entry, "it is not text", failed, {uid: "web-0"} if uid else {}) == ((uid,) if uid else ())
    return letter_ids(lived)[0]


def test_an_entry_that_could_not_be_read_is_listed_shown_and_dropped(lived: LivedRequests, dead: Tool) -> None:
    letter = buried(lived)
    assert dead("ls")[1].split()[3:] == [letter, "tokenize", "0", "it", "is", "not", "text"]
    lines = dead("show", letter)
    assert lines[0].startswith(f"dead letter {letter}, 20")
    assert lines[1] == f"an entry of {Names().submitted} that tokenize could not read: it is not text"
    assert r"\\xffrontend" in lines[2] and "\x1b" not in lines[2]
    assert lines[3] == "it is about no request"
    said = dead.json("show", letter)
    assert said["letter"]["entry"][1:] == [r"\xffrontend", "\x1b[2J"] and said["story"] == {}
    assert dead.json("ls") == [said["letter"]]
    assert dead.failure("requeue", letter)
    dead("drop", letter)
    assert letter_ids(lived) == []


def test_the_request_of_an_entry_that_could_not_be_read_is_told_and_sent_again(
    lived: LivedRequests, dead: Tool
) -> None:
    uid = lived.running()
    letter = buried(lived, uid)
    assert dead("show", uid)[-1] == f"its request ended; minisgl trace {uid} tells its story"
    (new,) = dead("requeue", letter)
    assert lived.log.alive([uid, new]) == {new} and letter_ids(lived) == []
