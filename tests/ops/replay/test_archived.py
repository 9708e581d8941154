"""Tools find requests in an archive, and in dead letters, as if they were in Redis."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.lived_requests import LivedRequests
from support.log_contract import submitted
from support.openai_stand_in import OpenAIStandIn
from support.redis_servers import command
from support.tool import Tool

from ops.replay.files import read_dump, write_dump
from ops.replay.source import History
from ops.trace import why_absent
from pipeline.archive.folder import make_archive
from pipeline.archive.reader import Archive
from pipeline.archive.writer import Writer
from pipeline.events import Cancelled, new_uid
from pipeline.log.redis import RedisLog
from pipeline.names import Names
from pipeline.recording import Recording

HOUR_S = 3600
URL = "--url http://127.0.0.1:9"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_archive(tmp_path / "archive", "minisgl")
    return tmp_path / "archive"


def archive(lived: LivedRequests, folder: Path, *uids: str, now_s: float = 0.0) -> None:
    """Do what an archiver does, and what time does then."""
    writer = Writer(folder, "archive-0", 1, clock_s=lambda: now_s or time.time())
    writer.write([Recording(uid, tuple(lived.log.histories([uid])[0])) for uid in uids])
    expire(lived, *uids)


def expire(lived: LivedRequests, *uids: str) -> None:
    assert isinstance(lived.log, RedisLog)
    assert command(lived.log.url, "DEL", *map(Names().request, uids)) == len(uids)


def dumped(dump: Tool, folder: Path, *arguments: str) -> list[str]:
    """Return the uids in a dump."""
    path = folder.parent / f"dump-{len(list(folder.parent.iterdir()))}.zst"
    dump(*arguments, "--archive", str(folder), str(path))
    return [recording.uid for recording in read_dump(path)]


@pytest.mark.parametrize("command", ["trace", "replay show --at 2"])
def test_an_archived_request_is_told_as_before_with_and_without_a_server(
    command: str, lived: LivedRequests, folder: Path, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tool, archived = Tool(command, redis_url, capsys), ("--archive", str(folder))
    name = lived.answered("He", "ll", "o")
    before, (entries,) = tool(name), lived.log.histories([name])
    Writer(folder, "archive-1", 1).write([Recording(name, tuple(entries))])
    assert tool(name, *archived) == before
    expire(lived, name)
    assert tool(name, *archived) == before
    assert "unknown here" in tool.failure(name)
    assert "unknown here" in tool.failure(new_uid(), *archived)
    nowhere = str(folder.parent / "no server")
    code, out, err = Tool(command, "", capsys).run(name, "--data-dir", nowhere, *archived)
    assert (code, out.splitlines()) == (0, before)
    assert err == (
        f"minisgl: only the archive is read, because no server runs in {nowhere}; "
        "name it with --port or --data-dir, or its Redis with --redis-url\n"
    )
    opened = History.open(name, data_dir=nowhere, archive=str(folder))
    assert (opened.uid, opened.text) == (name, "Hello")


def test_the_uid_of_archived_siblings_means_all_of_them(
    lived: LivedRequests, dump: Tool, show: Tool, folder: Path
) -> None:
    base = new_uid()
    lived.log.submit(base, [submitted(number=number) for number in range(3)])
    uids = [f"{base}.{number}" for number in range(3)]
    for each in uids:
        lived.ended(each, Cancelled(by="client"))
    archive(lived, folder, *uids[:2])
    assert dumped(dump, folder, base) == uids
    assert "3 requests" in show.failure(base, "--archive", str(folder))


def test_a_dump_by_time_has_what_redis_and_the_archive_have_each_once(
    lived: LivedRequests, dump: Tool, folder: Path
) -> None:
    uids = [lived.answered("He", "ll", "o") for _ in range(5)]
    before = lived.log.histories(uids)
    archive(lived, folder, uids[0], uids[3])
    lived.running()
    Writer(folder, "archive-1", 1).write([Recording(uids[1], tuple(before[1]))])  # and Redis has it still
    assert dumped(dump, folder) == uids
    assert dumped(dump, folder, "--since", uids[1], "--until", uids[3]) == uids[1:4]
    assert dumped(dump, folder, "--where", "state=finished") == uids
    path = folder.parent / "last.zst"
    told = dump.json("--archive", str(folder), str(path))
    assert told["left_out"] == {"running": 1, "expired": 0, "unfit": 0, "reasons": {}}
    assert [list(recording.entries) for recording in read_dump(path)] == before


def test_a_dump_has_dead_letters_whose_histories_have_expired(lived: LivedRequests, dump: Tool, folder: Path) -> None:
    dead = lived.dead()
    (before,) = lived.log.histories([dead])
    expire(lived, dead)
    for arguments in ((dead,), ("--since", dead, "--until", dead)):
        path = folder.parent / f"{len(arguments)}.zst"
        dump(*arguments, str(path))
        (recording,) = read_dump(path)
        assert (recording.uid, list(recording.entries)) == (dead, before)


def test_an_absent_request_says_which_flags_would_have_kept_it(lived: LivedRequests, show: Tool, folder: Path) -> None:
    files = Archive(folder)
    old, now_s = new_uid(), time.time()
    expired = f"{old}: expired; it was made 1,000 s ago, and after its end a request is kept for 900 s (--retention); "
    said = "an archive keeps it longer (minisgl serve --archive DIR), and --archive DIR finds it there"
    assert why_absent(old, now_s + 1000, 900) == expired + said
    assert why_absent(old, now_s + 1000, 900, files) == f"{expired}the archive does not have it either"
    archive(lived, folder, lived.answered("He", "ll", "o"), now_s=now_s - 2 * HOUR_S)
    assert why_absent(old, now_s + 1000, 900, files) == f"{expired}the archive does not have it either"
    older = f"{int((now_s - 4 * HOUR_S) * 1000):012x}{old[12:]}"
    assert "the archive begins at 20" in why_absent(older, now_s, 900, files)
    assert show.failure(older, "--archive", str(folder)).endswith(
        ":00:00.000 UTC (--retain and --max-bytes of its stage)\n"
    )
    assert "unknown here" in show.failure(old, "--archive", str(folder))


@pytest.mark.parametrize(
    "line", ["trace UID", "replay show UID", "replay run UID", "replay dump file", f"replay drive --since -1h {URL}"]
)
def test_a_folder_that_is_no_archive_is_an_error_of_the_command_line(
    line: str, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = Tool(line.replace("UID", new_uid()), redis_url, capsys)
    assert f"--archive: {tmp_path}" in tool.refusal("--archive", str(tmp_path))


def test_a_request_that_no_engine_can_compute_is_told_without_a_server_too(
    lived: LivedRequests, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = lived.answered("He", "ll", "o")
    archive(lived, folder, name)
    run = Tool("replay run", "", capsys)
    assert "engine" in run.refusal(name, "--data-dir", str(tmp_path / "no"), "--archive", str(folder))


def test_a_request_that_was_forgotten_is_not_shown_from_files_that_no_archiver_has_written_anew_yet(
    lived: LivedRequests, dump: Tool, show: Tool, trace: Tool, folder: Path
) -> None:
    gone, kept, dead, base = lived.answered("He", "ll", "o"), lived.answered("He", "ll", "o"), lived.dead(), new_uid()
    lived.log.submit(base, [submitted(number=number) for number in range(2)])
    family = [f"{base}.{number}" for number in range(2)]
    for each in family:
        lived.ended(each, Cancelled(by="client"))
    archive(lived, folder, gone, kept, dead, *family)
    assert set(dumped(dump, folder)) == {gone, kept, dead, *family}
    assert isinstance(lived.log, RedisLog)
    assert all(lived.log.erase(each) for each in (gone, dead, *family))
    for name, tool in ((gone, show), (gone, trace), (family[1], trace), (base, show), (dead, show)):
        assert tool.failure(name, "--archive", str(folder)) == (
            f"minisgl: {name}: it was removed with minisgl replay forget\n"
        )
    path = folder.parent / "last.zst"
    told = dump.json("--archive", str(folder), str(path))
    assert [each.uid for each in read_dump(path)] == [kept]
    assert told["left_out"] == {"running": 0, "expired": 0, "unfit": 0, "reasons": {}}


def test_an_archive_does_not_stand_in_for_a_redis_that_refuses_the_user(
    lived: LivedRequests, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = lived.answered("He", "ll", "o")
    archive(lived, folder, name)
    assert isinstance(lived.log, RedisLog)
    scheme, _, place = lived.log.url.partition("://")
    path = folder.parent / "file"

    def dumped_from(url: str) -> tuple[int, str, str]:
        return Tool("replay dump", url, capsys).run(str(path), "--archive", str(folder))

    code, _, err = dumped_from(f"{scheme}://:wrong@{place.rpartition('@')[2]}")
    assert (code, path.exists()) == (1, False)
    assert err.startswith("minisgl: the Redis of --redis-url cannot be used: ") and len(err.splitlines()) == 1
    code, _, err = dumped_from(f"unix://{folder.parent}/none.sock")
    assert (code, path.exists()) == (0, True)
    assert err.startswith("minisgl: only the archive is read, because the Redis of --redis-url cannot be used: ")


# the folder of an archive as a file


def test_a_dump_is_compared_with_an_archive(
    lived: LivedRequests, dump: Tool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uids, path = [lived.answered("He", "ll", "o") for _ in range(40)], folder.parent / "some.zst"
    dump(*uids[:2], str(path))
    archive(lived, folder, *uids)
    assert [each.uid for each in read_dump(folder)] == uids
    diff = Tool("replay diff", "", capsys)
    lines = ["2 requests in both: 2 identical, 0 different", f"only in {folder}: 38"]
    assert diff(str(path), str(folder)) == lines
    assert str(folder.parent) in diff.refusal(str(path), str(folder.parent))


def test_an_archive_is_put_into_a_log_that_lost_everything(lived: LivedRequests, folder: Path, bring_in: Tool) -> None:
    names = [lived.answered("He", "ll", "o"), lived.answered("He", "ll", "o")]
    before = lived.log.histories(names)
    archive(lived, folder, *names)
    assert bring_in(str(folder)) == [f"{folder}: 2 requests imported"]
    assert [history[1:] for history in lived.log.histories(names)] == [history[1:] for history in before]


# drive


@pytest.mark.parametrize("where", ["log", "log and archive", "file"])
def test_requests_are_driven_from_where_they_are(
    where: str,
    lived: LivedRequests,
    stand_in: OpenAIStandIn,
    folder: Path,
    tmp_path: Path,
    redis_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ("first", "second", "third")
    uids = [lived.submitted(prompt=prompt, labels={"user": prompt}) for prompt in asked]
    for each in uids:
        lived.ended(each, Cancelled(by="deadline"))
    lived.submitted(prompt="it runs")
    if where == "file":
        write_dump(tmp_path / "dump.zst", [Recording(each, tuple(lived.log.histories([each])[0])) for each in uids])
        source: Sequence[str] = (str(tmp_path / "dump.zst"),)
    else:
        source = ("--since", "-10m", "--redis-url", redis_url)
    if where == "log and archive":
        archive(lived, folder, *uids[:2])
        source = (*source, "--archive", str(folder))
    drive, flags = Tool("replay drive", "", capsys), ("--url", stand_in.url, "--speed", "10")
    printed = drive(*source, *flags)
    assert sorted(body["prompt"] for body in stand_in.bodies) == list(asked)  # at this pace in any order
    name = source[0] if where == "file" else where
    assert printed[0].startswith(f"{name}: 3 requests, recorded within ")
    assert ("left out: 1 request without an end" in printed) == (where != "file")
    drive(*source, "--where", "user=second", *flags, "--set", "temperature=0")
    assert [(body["prompt"], body["temperature"]) for body in stand_in.bodies[3:]] == [("second", 0)]
