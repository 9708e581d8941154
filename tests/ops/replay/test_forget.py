"""`minisgl replay forget`: nothing of a request is left, in Redis, its files and the archive; all else is as it was."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zstandard
from structlog.testing import capture_logs
from support.lived_requests import LivedRequests
from support.log_contract import KILLED, put
from support.redis_servers import command, until
from support.selection import by_night

from minisgl import main
from ops.connection import counted
from ops.replay import forget
from pipeline.archive.folder import make_archive
from pipeline.archive.reader import Archive
from pipeline.archive.writer import Writer
from pipeline.events import Cancelled, Replay, SamplingParams, Submitted, new_uid
from pipeline.log.config import LogConfig
from pipeline.log.drivers import Driver
from pipeline.log.forgetting import Unconsumed, ended_inbox
from pipeline.log.protocol import DeadLetter, RequestLimits
from pipeline.log.redis import RedisLog
from pipeline.names import ARCHIVE, WEB, Names, base_uid, sibling_uids
from pipeline.process.config import WorkerConfig
from pipeline.process.failpoints import FOLDER_VARIABLE, POINTS, VARIABLE, arm
from pipeline.process.redis_server import EmbeddedRedis
from pipeline.recording import Recording
from pipeline.stage.slots import SlotLease, acquire_slot, read_statuses
from pipeline.stage.worker import Stop
from stages.archive.config import ArchiveConfig, FilesConfig
from stages.archive.worker import open_archive, serve
from web.wire.copies import COPY_OF

NAMES = Names()
LIMITS = RequestLimits(timeout_s=60, retention_s=900)
SECRET, OTHER = "annsecret", "bobstext"
"""In every text of what is to be forgotten, and of all else."""
POINTS_OF_FORGET = [name for name in POINTS if name.startswith("forget.")]


class Killed(Exception):
    """The command died here."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("data"))
    command(server.url, "CONFIG", "SET", "rdbcompression", "no")  # so that bytes can be searched
    yield server
    server.stop()


class Archiver:
    """An archiver in a thread of its own."""

    def __init__(self, url: str, folder: Path) -> None:
        self._logs = [RedisLog(url, NAMES, LIMITS) for _ in range(2)]
        log, lease_log = self._logs
        archive = make_archive(folder, NAMES.namespace)
        open_archive(log, archive)
        self._stop, self._lease = Stop(), SlotLease(lease_log, acquire_slot(log, ARCHIVE, 60_000), 60_000)
        self._lease.say(phase="ready")
        config = ArchiveConfig(WorkerConfig(), LogConfig(), FilesConfig(str(folder)))
        self._thread = threading.Thread(target=serve, args=(log, self._lease, config, archive, self._stop))
        self._thread.start()

    def close(self) -> None:
        if self._stop:
            return
        self._stop.set()
        self._thread.join()
        self._lease.leave()
        self._logs[0].release(self._lease.owner)
        for log in self._logs:
            log.close()


@dataclass
class Scene:
    """Two people's requests, wherever requests can be."""

    url: str
    data: Path
    folder: Path
    log: RedisLog
    lived: LivedRequests
    archiver: Archiver
    anns: list[str]
    bobs: list[str]

    def forget(self, *arguments: str, elsewhere: bool = False) -> int:
        """Run the command, beside the server or, *elsewhere*, as if its Redis were not embedded."""
        where = ["--redis-url", self.url] if elsewhere else ["--data-dir", str(self.data)]
        return main(["replay", "forget", *arguments, *where, "--archive", str(self.folder)])

    def redis(self) -> bytes:
        """Return all that Redis holds, with what is deleted and not yet overwritten."""
        keys = command(self.url, "KEYS", "*")
        return b"".join(key + (command(self.url, "DUMP", key) or b"") for key in keys)

    def files(self) -> bytes:
        """Return what is in the files of Redis."""
        return b"".join(path.read_bytes() for path in sorted(self.data.rglob("*aof*")) if path.is_file())

    def archive(self) -> bytes:
        """Return what is in all files of the archive, frames and texts."""
        found = b""
        for path in (each for each in self.folder.iterdir() if each.is_file()):
            found += path.name.encode() + path.read_bytes()
            if path.suffix == ".sqlite":
                with contextlib.closing(sqlite3.connect(path)) as database:
                    for (frame,) in database.execute("SELECT frame FROM requests"):
                        found += zstandard.ZstdDecompressor().decompress(frame)
        return found

    def of_others(self) -> list[Any]:
        """Return all of what is not to be forgotten, as bytes where it has bytes of its own."""
        names, bases = self.log.names, {base_uid(uid).encode() for uid in self.anns}
        histories = [command(self.url, "DUMP", names.request(uid)) for uid in self.bobs]
        shared = [command(self.url, "DUMP", names.shared(base_uid(uid))) for uid in self.bobs if "." in uid]

        def is_theirs(entry: Any) -> bool:
            return entry[1][0] == b"flush" or any(base in word for base in bases for word in entry[1])

        keys = (names.dead, names.journal("generate-0"), names.replies("web-0"), names.control)
        streams = [[each for each in command(self.url, "XRANGE", key, "-", "+") if not is_theirs(each)] for key in keys]
        return [histories, shared, streams, Archive(self.folder).read(self.bobs)]


def live(log: RedisLog, lived: LivedRequests, user: str, text: str) -> list[str]:
    """Make requests of one person: finished, computed again, dead, requeued, siblings; return their uids."""

    def body(**more: Any) -> Submitted:
        prompt = f"{text} asks " * 20
        fields: dict[str, Any] = {"endpoint": "e", "frontend": "web-0", "prompt": prompt, "sampling": SamplingParams()}
        return Submitted(**(fields | more))

    first, dead, again, requeued, copy, family = (new_uid() for _ in range(6))
    bodies = {
        first: [body(labels={"user": user})],
        dead: [body(labels={"user": user})],
        again: [body(replay=Replay(of=first))],
        requeued: [body(labels={"requeued_from": dead})],
        copy: [body(labels={COPY_OF: first})],
        family: [body(labels={"user": user}, sampling=SamplingParams(seed=seed)) for seed in range(3)],
    }
    uids = list[str]()
    for base, events in bodies.items():
        log.submit(base, events)
        for uid in sibling_uids(base, len(events)):
            lived.taken_in(uid)
            lived.tokens(uid, f"{text} says", f"{text} more")
            uids.append(uid)
    for uid in uids[:-1]:  # one of the siblings goes on
        if uid == dead:
            lived.ended(uid, KILLED, dead=DeadLetter("generate", {"uid": uid}, 3, f"{text} kills"))
        else:
            lived.finished(uid, 2)
    return uids


@pytest.fixture
def scene(server: EmbeddedRedis, tmp_path: Path) -> Iterator[Scene]:
    command(server.url, "FLUSHALL")
    url, folder = server.url, tmp_path / "archive"
    archiver = Archiver(url, folder)
    with contextlib.closing(RedisLog(url, NAMES, LIMITS)) as log, capture_logs():
        log.open_replies("web-0")
        lived, people = LivedRequests(log), {"ann": list[str](), "bob": list[str]()}
        for user, text in (("bob", OTHER), ("ann", SECRET), ("bob", OTHER)):
            people[user] += live(log, lived, user, text)
        for number, (user, text) in enumerate((("bob", OTHER), ("ann", SECRET), ("bob", OTHER)), 1):
            old = lived.running(prompt=f"{text} once", labels={"user": user})
            lived.ended(old, Cancelled(by="client"))
            Writer(folder, "archive-7", 1).write([Recording(old, tuple(log.histories([old])[0]))])
            command(url, "DEL", NAMES.request(old))  # it has expired
            people[user].append(old)
            fields = {"bytes": "9", "ms": "1", "tokens": "1", "rows": f"1:{old}", "events": text}
            put(log, NAMES.journal("generate-0"), fields, f"1-{number}")
        letters = {letter.fields["uid"]: letter.id for letter in log.dead_letters(10)}
        log.drop_dead(letters[people["bob"][1]])
        put(log, NAMES.dead, {"uid": "x", "error": SECRET})
        log.drop_dead(log.dead_letters(1)[0].id)  # its bytes stay beside the others
        lived.released()
        until(lambda: log.backlog(ended_inbox(NAMES)) == 0)
        folder_of_redis = Path(server.url.removeprefix("unix://")).parent
        yield Scene(url, folder_of_redis, folder, log, lived, archiver, people["ann"], people["bob"])
    archiver.close()


def nothing_is_left(scene: Scene, uids: Sequence[str]) -> bool:
    """Return whether no byte of a text of *uids* is left, and no uid but where a tombstone keeps it."""
    log, secret = scene.log, SECRET.encode()
    keys = [key for key in command(scene.url, "KEYS", "*") if not key.startswith(NAMES.request("").encode())]
    values = b"".join(command(scene.url, "DUMP", key) or b"" for key in keys if b":ended" not in key)
    found = {
        "redis": secret in scene.redis(),
        "uids": any(uid.encode() in values for uid in uids),
        "archive": secret in scene.archive() or any(uid.encode() in scene.archive() for uid in uids),
        "histories": any(log.histories(uids)),
        "tombstones": {log.begins([uid])[uid].fields["by"] for uid in uids} != {"forget"},
        "copies": bool(command(scene.url, "KEYS", NAMES.copy("*"))),
    }
    assert not any(found.values()), found
    return True


def test_nothing_of_a_user_is_left_and_all_others_are_as_they_were(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    before = scene.of_others()
    assert all(SECRET.encode() in held() for held in (scene.redis, scene.files, scene.archive))
    assert scene.forget("--user", "ann", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["requests"] == sorted(scene.anns) and told["left"] == [] and told["notes"] == []
    counts = {"cancelled": 1, "histories": 8, "dead_letters": 1, "steps": 1, "archived": 8}
    assert told["removed"] == counts | {"replies": told["removed"]["replies"]} and told["removed"]["replies"] > 10
    nothing_is_left(scene, scene.anns)
    until(lambda: SECRET.encode() not in scene.files())
    assert scene.of_others() == before
    assert OTHER.encode() in scene.files() and scene.log.alive(scene.bobs) == {scene.bobs[7], scene.bobs[15]}
    assert scene.forget("--user", "ann") == 1
    assert "--user ann" in capsys.readouterr().err


def test_with_a_request_go_its_siblings_its_copies_and_what_computes_it_again(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    first, dead, again, requeued, copy, *family, old = scene.anns
    for asked, gone in (
        (dead, [dead, requeued]),
        (family[1], family),
        (f"cmpl-{first}", [first, again, copy]),
        (old, [old]),
    ):
        assert scene.forget(asked, elsewhere=True) == 0
        out = capsys.readouterr().out.splitlines()
        assert out[: len(gone)] == sorted(gone) and f"{counted(len(gone), 'request')} forgotten" == out[len(gone)]
        assert "BGREWRITEAOF" in out[-1]
        assert ("1 dead letter" in out[-2]) is (asked == dead) and "archived request" in out[-2]
    nothing_is_left(scene, scene.anns)


def test_a_copy_of_a_request_that_another_server_has_is_removed(scene: Scene) -> None:
    elsewhere = new_uid()
    copy = scene.lived.running(labels={COPY_OF: f"{elsewhere}.1"})
    scene.lived.ended(copy, Cancelled(by="client"))
    scene.lived.released()
    assert scene.forget(elsewhere, elsewhere=True) == 0
    assert scene.log.begins([copy])[copy].fields["by"] == "forget"


def test_a_tombstone_stays_as_long_as_the_server_keeps_requests(scene: Scene) -> None:
    with contextlib.closing(RedisLog(scene.url, NAMES, RequestLimits(retention_s=100))) as log:
        web = SlotLease(log, acquire_slot(log, WEB, 60_000), 60_000)
        until(lambda: read_statuses(scene.log, WEB))
        for uid, flags, kept_s in ((scene.anns[0], [], 100), (scene.anns[1], ["--retention", "70"], 70)):
            assert scene.forget(uid, *flags, elsewhere=True) == 0
            assert kept_s - 20 < command(scene.url, "PTTL", NAMES.request(uid)) / 1000 <= kept_s
        web.leave()


def test_what_is_not_there_is_said_and_what_is_there_goes(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    unknown, before = new_uid(), scene.of_others()
    assert scene.forget(unknown, scene.anns[0], elsewhere=True) == 1
    out, err = capsys.readouterr()
    assert scene.anns[0] in out and err.startswith(f"minisgl: {unknown}: no such request")
    assert scene.forget(unknown, elsewhere=True) == 1
    assert capsys.readouterr().out == ""
    assert scene.of_others() == before and any(scene.log.histories([scene.anns[1]]))


# killed half-way


@pytest.mark.parametrize("point", POINTS_OF_FORGET)
def test_killed_at_a_fail_point_and_run_again(scene: Scene, point: str, tmp_path: Path) -> None:
    before = scene.of_others()
    arm({VARIABLE: f"{point}=raise", FOLDER_VARIABLE: str(tmp_path)})
    with pytest.raises(RuntimeError, match=point):
        scene.forget("--user", "ann", elsewhere=True)
    arm({})
    assert scene.forget("--user", "ann", elsewhere=True) == 0
    nothing_is_left(scene, scene.anns)
    assert scene.of_others() == before


@pytest.mark.parametrize("part", range(by_night(1, 8)))
def test_killed_between_any_two_commands_and_run_again(
    scene: Scene, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies after each of its commands in turn: so each run gets one command further than the last."""
    before, send, thread = scene.of_others(), Driver._send, threading.current_thread()
    left, code = 0, -1

    def dying(driver: Driver, operation: Any) -> Any:
        nonlocal left
        if threading.current_thread() is thread:
            left -= 1
            if left == 0:
                send(driver, operation)
                raise Killed
        return send(driver, operation)

    with monkeypatch.context() as patched:
        patched.setattr(Driver, "_send", dying)
        for number in range(1 + part, 500, by_night(5, 8)):
            left = number
            with contextlib.suppress(Killed):
                code = scene.forget("--user", "ann", elsewhere=True)
                break
    assert code in (0, 1), "1: it died behind its last command, and nothing was left to do"
    nothing_is_left(scene, scene.anns)
    assert scene.of_others() == before


# who stands in the way


def test_while_a_worker_has_a_request_something_may_be_left_and_it_is_run_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forget, "PATIENCE_S", 0.05)
    uid = scene.lived.running(prompt=SECRET)
    assert scene.forget(uid, elsewhere=True) == 1
    out, err = capsys.readouterr()
    assert "left: tokenized: " in err and "1 request forgotten in part" in out
    scene.lived.released()
    assert scene.forget(uid, elsewhere=True) == 0
    assert scene.log.begins([uid])[uid].fields["by"] == "forget"


def test_without_a_detokenizer_steps_are_left(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forget, "PATIENCE_S", 0.05)
    put(scene.log, NAMES.steps("generate-0"), {"kind": "step"}, "9-1")
    assert scene.forget(scene.anns[0], elsewhere=True) == 1
    err = capsys.readouterr().err
    assert "left: steps:generate-0: " in err


def test_a_busy_server_has_always_steps_and_only_those_from_before_are_waited_for(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, unread = 0, RedisLog.unread_steps

    def always_some(log: RedisLog) -> dict[str, tuple[str, str]]:
        nonlocal number
        number += 1
        put(scene.log, NAMES.steps("generate-0"), {"kind": "step"}, f"9-{number}")
        command(scene.url, "XTRIM", NAMES.steps("generate-0"), "MAXLEN", "1")
        return unread(log)

    monkeypatch.setattr(RedisLog, "unread_steps", always_some)
    assert scene.forget(scene.anns[0], elsewhere=True) == 0


def test_while_a_sibling_goes_on_nothing_of_its_body_is_removed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    family = scene.anns[5:8]
    before = scene.log.histories(family)
    with monkeypatch.context() as patched:
        patched.setattr(RedisLog, "end", lambda *_, **__: False)
        assert scene.forget(family[0], elsewhere=True) == 1
    assert f"{family[1]}: " in capsys.readouterr().err
    assert scene.log.histories(family) == before
    assert scene.forget(family[0], elsewhere=True) == 0


def test_letters_that_do_not_say_whose_they_are_are_named(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    uid = scene.lived.dead(prompt="large " * 20_000)
    scene.lived.released()
    until(lambda: scene.log.backlog(ended_inbox(NAMES)) == 0)
    Writer(scene.folder, "archive-7", 1).forget({uid})
    command(scene.url, "DEL", NAMES.request(uid))  # only the letter is left
    told = put(scene.log, NAMES.dead, {"stage": "tokenize", "stream": "s", "entry": "nonsense", "error": "no"})
    assert scene.forget("--user", "u1", elsewhere=True) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{uid}\n1 request forgotten\nremoved: 1 dead letter, ")
    assert f"without a known user: 1 dead letter: {told}. minisgl dead show says" in out
    assert not [letter for letter in scene.log.dead_letters(9) if letter.fields.get("uid") == uid]
    assert scene.forget("--user", "nobody", elsewhere=True) == 1
    assert f"without a known user: 1 dead letter: {told}. " in capsys.readouterr().err


def test_as_long_as_the_archiver_gets_on_it_is_waited_for_and_then_it_is_said(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(forget, "ARCHIVE_PATIENCE_S", 0.2)
    answers = [Unconsumed("1-1", 2), Unconsumed("1-1", 1), Unconsumed("2-1", 1)]
    monkeypatch.setattr(RedisLog, "told", lambda *_: answers.pop(0) if len(answers) > 1 else answers[0])
    assert scene.forget(scene.anns[0], elsewhere=True) == 1
    assert "left: ended: 1 request" in capsys.readouterr().err
    assert len(answers) == 1


def test_what_the_archive_still_has_does_not_count_as_removed(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    scene.archiver.close()
    assert scene.forget(scene.anns[0], elsewhere=True) == 1
    out, err = capsys.readouterr()
    assert "archived requests" not in out and "which only archivers remove; start minisgl stage archive --to" in err


def test_without_an_archiver_its_files_are_left_and_it_is_said(
    scene: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uid, other = scene.lived.running(), tmp_path / "other"
    scene.lived.ended(uid, Cancelled(by="client"))
    scene.lived.released()
    make_archive(other, "minisgl")
    Writer(other, "archive-0", 1).write([Recording(uid, tuple(scene.log.histories([uid])[0]))])
    until(lambda: scene.log.backlog(ended_inbox(NAMES)) == 0)
    where = ["--redis-url", scene.url]
    for flags, said in (
        (["--archive", str(other)], "is another archive than that of the namespace minisgl"),
        ([], "has an archive; name its folder with --archive"),
        (["--user", "ann"], "name UIDs, or whose requests with --user, one of both"),
    ):
        assert main(["replay", "forget", uid, *flags, *where]) == 2
        assert said in capsys.readouterr().err
    scene.archiver.close()
    scene.log.close_archive()
    assert main(["replay", "forget", uid, "--archive", str(other), *where]) == 1
    assert (
        f"1 request, which only archivers remove; start minisgl stage archive --to {other}" in capsys.readouterr().err
    )
    assert main(["replay", "forget", uid, *where]) == 0


def test_trace_says_that_a_request_was_removed(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    uid = scene.anns[0]
    assert scene.forget(uid, elsewhere=True) == 0
    assert main(["trace", uid, "--redis-url", scene.url, "--archive", str(scene.folder)]) == 1
    assert f"{uid}: it was removed with minisgl replay forget" in capsys.readouterr().err
