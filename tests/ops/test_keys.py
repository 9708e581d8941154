"""`minisgl keys`: what each action prints and writes, and that a server reads it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from minisgl import main
from ops.limits_file import LimitsText, edited
from pipeline.errors import ConfigError
from web.http.keys import Caller, hash_of, read_keys

WRITTEN = """\
# Keys of the sales department

[default]
requests_per_minute = 60   # of each

# Ann, until she moves
[[key]]
key = "sk-ann"  # in plain text
name = "ann"
requests_per_minute = 5
# viewers = 3

# --- others ---

[[key]]
hash = "0123456789abcdef0123456789abcdef"
weight = 3
"""
FORM = re.compile(r"sk-[A-Za-z0-9_-]{43}\n")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "limits.toml"


@pytest.fixture
def keys(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str, str]]:
    """Run an action; return what it said on stdout and stderr."""
    monkeypatch.setenv("MINISGL_LIMITS", str(file))

    def run(*words: str, code: int = 0) -> tuple[str, str]:
        assert main(["keys", *words]) == code
        out, err = capsys.readouterr()
        return out, err

    return run


def caller(file: Path, key: str) -> Caller | None:
    return read_keys((), str(file), may_lack_keys=True).find([key.strip()])


Keys = Callable[..., tuple[str, str]]


def test_a_new_key_is_printed_alone_and_only_its_hash_is_in_the_file(file: Path, keys: Keys) -> None:
    flags = ("--limit", "requests_per_minute=60", "tokens_per_day=1000", "--weight", "3", "--priority")
    key, told = keys("add", "team-a", "--expires", "2127-01-31", *flags)
    assert FORM.fullmatch(key) and key.strip() not in told + file.read_text()
    assert told == f"added a key of team-a, hash {hash_of(key.strip())[:8]}\n"
    found = caller(file, key)
    assert found is not None and found.quota is not None
    assert (found.owner, found.weight, found.overtakes) == ("team-a", 3, True)
    assert (found.quota.requests_per_minute, found.quota.tokens_per_day) == (60, 1000)
    assert found.expires_s == datetime(2127, 2, 1, tzinfo=UTC).timestamp()
    other, _ = keys("add", "team-b")
    assert other != key and caller(file, key) == found and caller(file, other) is not None


def test_an_expiry_may_be_a_time_from_now_on(file: Path, keys: Keys) -> None:
    before_s = datetime.now(UTC).timestamp()
    found = caller(file, keys("add", "a", "--expires", "30d")[0])
    assert found is not None and -1 <= found.expires_s - before_s - 30 * 86400 < 60


def test_a_list_names_keys_and_limits_and_marks_what_has_expired(file: Path, keys: Keys) -> None:
    file.write_text(
        WRITTEN + 'expires = 2020-01-31\n[[key]]\nkey = "b"\npriority = true\nexpires = 2127-01-01T10:00:00Z\n'
    )
    out, _ = keys("ls")
    ann, other = hash_of("sk-ann")[:8], hash_of("b")[:8]
    assert [re.split(r"  +", line) for line in out.splitlines()] == [
        ["name", "hash", "expires", "weight", "limits"],
        ["ann", ann, "never", "1", "requests_per_minute=5"],
        ["-", "01234567", "2020-01-31 (expired)", "3", "requests_per_minute=60"],
        ["-", other, "2127-01-01 10:00:00+00:00", "1", "requests_per_minute=60 priority=true"],
    ]
    assert "sk-ann" not in out
    file.write_text("")
    assert keys("ls") == ("no keys\n", "")


def test_a_revoked_key_goes_with_its_comments_and_all_else_stays(file: Path, keys: Keys) -> None:
    file.write_text(WRITTEN)
    assert keys("revoke", "ann") == ("", "removed 1 key of ann\n")
    kept = WRITTEN[: WRITTEN.index("# Ann")] + WRITTEN[WRITTEN.index("# --- others") :]
    assert file.read_text() == kept
    _, told = keys("revoke", "01234567")
    assert told.startswith("removed 1 key of 01234567\nno key is left: ")
    assert file.read_text() == kept[: kept.index("[[key]]")]
    assert caller(file, "sk-ann") is None


def test_all_keys_of_a_name_are_revoked_and_others_only_by_eight_digits(file: Path, keys: Keys) -> None:
    for name in ("a", "b", "a"):
        keys("add", name)
    assert "removed 2 keys of a\n" in keys("revoke", "a")[1]
    before = file.read_text()
    for named in ("a", "c", re.findall(r"[0-9a-f]{32}", before)[0][:7]):
        assert f"{named}: no such key" in keys("revoke", named, code=2)[1]
    assert file.read_text() == before


def test_a_rotated_key_has_the_same_limits_and_the_old_one_is_removed(file: Path, keys: Keys) -> None:
    file.write_text(WRITTEN)
    key, _ = keys("rotate", "ann")
    assert file.read_text() == WRITTEN.replace('key = "sk-ann"  # in plain text', f'hash = "{hash_of(key.strip())}"')
    found = caller(file, key)
    assert found is not None and found.owner == "ann" and found.quota is not None
    assert found.quota.requests_per_minute == 5 and caller(file, "sk-ann") is None


def test_with_a_grace_old_keys_go_on_for_a_while_but_not_beyond_their_own_end(file: Path, keys: Keys) -> None:
    file.write_text(f'{WRITTEN}[[key]]\nkey = "old"\nname = "ann"\nrequests_per_minute = 5\nexpires = 2020-01-01\n')
    before_s = datetime.now(UTC).timestamp()
    key, told = keys("rotate", "ann", "--grace", "1h", "--expires", "2127-01-31")
    new, old = caller(file, key), caller(file, "sk-ann")
    assert new is not None and old is not None and new.quota == old.quota
    assert new.expires_s == datetime(2127, 2, 1, tzinfo=UTC).timestamp()
    assert -1 <= old.expires_s - before_s - 3600 < 60 and "the old ones end at 2" in told
    assert "expires = 2020-01-01" in file.read_text() and caller(file, "old") is None
    assert all(line in file.read_text() for line in WRITTEN.splitlines())
    keys("rotate", "ann")
    assert caller(file, key) is None and caller(file, "sk-ann") is None


def test_the_file_is_replaced_whole_and_readable_for_its_owner_alone(file: Path, keys: Keys) -> None:
    (file.parent / "real").mkdir()
    target = file.parent / "real" / "keys.toml"
    target.write_text(WRITTEN)
    target.chmod(0o644)
    file.symlink_to(target)
    with target.open() as before:
        keys("add", "x")
        assert before.read() == WRITTEN, "who reads it meanwhile has all of the old one"
    assert file.is_symlink() and 'name = "x"' in target.read_text()
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert [path.name for path in target.parent.iterdir()] == ["keys.toml"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_file_keeps_its_owner(file: Path, keys: Keys) -> None:
    file.write_text(WRITTEN)
    os.chown(file, 1234, 4321)
    keys("add", "x")
    assert (file.stat().st_uid, file.stat().st_gid) == (1234, 4321)


def test_several_at_once_lose_no_key(file: Path) -> None:
    hashes = [f"{number:032x}" for number in range(40)]

    def add(hashed: str) -> None:
        with edited(str(file), "here") as text:
            text.append({"hash": hashed})

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, hashes))
    assert sorted(each["hash"] for each in LimitsText(file.read_bytes(), "here").keys) == hashes


@pytest.mark.parametrize(
    "words",
    [
        ("add", "a b"),
        ("add", 'a"\nkey = "x'),
        ("add", "sk-ann"),
        ("add", "x", "--limit", "requests=1"),
        ("add", "x", "--limit", "requests_per_minute"),
        ("add", "x", "--weight", "1001"),
        ("add", "ann", "--limit", "requests_per_minute=6"),
        ("add", "x", "--expires", "tomorrow"),
        ("add", "x", "--expires", "9999999d"),
        ("rotate", "01234567"),
        ("rotate", "ann", "--grace", "x"),
        ("revoke", "nobody"),
        ("add",),
        ("forget", "ann"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_changes_nothing(file: Path, keys: Keys, words: tuple[str, ...]) -> None:
    file.write_text(WRITTEN)
    out, err = keys(*words, code=2)
    assert out == "" and err.startswith("minisgl: ") and err.count("\n") == 1
    assert file.read_text() == WRITTEN and [*file.parent.iterdir()] == [file]


def test_a_file_that_is_wrong_is_not_edited(file: Path, keys: Keys) -> None:
    for text in ("[[key]]\n", 'key = [{ key = "sk-a" }]\n', "x = "):
        file.write_text(text)
        assert f"minisgl: --limits {file}: " in keys("add", "x", code=2)[1]
        assert file.read_text() == text


def test_without_a_file_it_says_which_flag_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("keys ls", "keys add x"):
        assert main(line.split()) == 2
        assert "--limits is missing" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("tail", ["", "# the end", "\n\n# the end\n", "[default]\nviewers = 1\n", "viewers = 1"])
def test_an_edit_changes_what_it_means_and_nothing_else(file: Path, end: str, tail: str) -> None:
    text = WRITTEN.replace("[default]\nrequests_per_minute = 60   # of each\n", "") + tail
    file.write_bytes(text.replace("\n", end).encode())
    with edited(str(file), "here") as limits:
        limits.append({"name": "x", "hash": "f" * 32})
        limits.change(0, expires=datetime(2127, 1, 1, tzinfo=UTC))
        limits.change(1, hash="e" * 32, weight=None)
        limits.copy(0)
        limits.remove(1)
    after = file.read_bytes().decode()
    assert after.count("\n") == after.count(end)
    comments = re.compile(r"^#[^\r\n]*", re.MULTILINE)
    assert sorted(comments.findall(after)) == sorted(comments.findall(text))
    said = LimitsText(file.read_bytes(), "here").keys
    assert [each.get("hash", each.get("key")) for each in said] == ["sk-ann", "e" * 32, "f" * 32]


def test_an_edit_that_would_mean_something_else_is_refused(file: Path) -> None:
    file.write_text('[[key]]\nkey = "sk-a"\n')
    with pytest.raises(ConfigError, match="edit it by hand"), edited(str(file), "here") as limits:
        limits.change(0, name='other" #')
    assert file.read_text() == '[[key]]\nkey = "sk-a"\n'
    file.write_text(spread := '[[key]]\nkey = "sk-a"\nname = """\\\n  team"""\n')
    with pytest.raises(ConfigError), edited(str(file), "here") as limits:
        limits.change(0, name="other")
    assert file.read_text() == spread
