"""`minisgl replay diff`: which requests of two files belong together, and what it says of them."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from support.histories import answered, entries_of

from minisgl import main
from ops.replay.files import write_dump
from ops.replay.redact import redacted
from pipeline.events import (
    Admitted,
    Replay,
    SamplingParams,
)
from pipeline.recording import Recording
from pipeline.views.recorded import Maker


def recording(
    uid: str, *token_ids: int, seed: int = 0, of: str = "", prompt: tuple[int, ...] = (5,), by: Maker | None = None
) -> Recording:
    maker = by or Maker()
    admitted = Admitted(engine="g", epoch=1, step=1, fingerprint=maker.weights, numerics=maker.numerics, version="1")
    asked = {"sampling": SamplingParams(seed=seed), "replay": Replay(of=of) if of else None}
    pairs = answered(*token_ids, ids=prompt, admitted=admitted if by else None, **asked)
    return Recording(uid, tuple(entries_of(pairs)))


def diff(
    folder: Path, before: list[Recording], after: list[Recording], capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, str]:
    paths = [folder / "before.zst", folder / "after.zst"]
    for path, recordings in zip(paths, (before, after), strict=True):
        path.unlink(missing_ok=True)
        write_dump(path, recordings)
    code = main(["replay", "diff", *map(str, paths), *flags])
    return code, "".join(capsys.readouterr())


def test_requests_belong_together_by_uid_by_replay_and_by_what_was_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [
        recording("a", 1, 2),
        recording("b", 1, 2, seed=1),
        recording("c", 1, 2, seed=2),
        recording("d", 9, seed=3),
    ]
    after = [
        recording("x", 1, 2, seed=2),
        recording("y", 1, 3, seed=7, of="b"),
        recording("a", 1, 2),
        recording("z", 1),
    ]
    code, said = diff(tmp_path, before, after, capsys, "--json")
    told = orjson.loads(said)
    counts = {name: told[name] for name in ("compared", "identical", "only_in_a", "only_in_b")}
    assert code == 1 and counts == {"compared": 3, "identical": 2, "only_in_a": 1, "only_in_b": 1}
    assert {each["uid"]: each["replays"] for each in told["requests"]} == {"a": ["a"], "b": ["y"], "c": ["x"]}
    code, said = diff(tmp_path, before, after, capsys)
    assert code == 1 and said.splitlines() == [
        "b: token 2 differs, of 2 tokens",
        "  recorded  token 2",
        "  now       token 3",
        "  explained by one of the histories does not say how its engine computed",
        "3 requests in both: 2 identical, 1 different",
        f"only in {tmp_path / 'before.zst'}: 1",
        f"only in {tmp_path / 'after.zst'}: 1",
    ]


def test_two_requests_that_asked_the_same_are_compared_each_with_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = diff(tmp_path, [recording("a", 1), recording("b", 1)], [recording("x", 1), recording("y", 1)], capsys)
    assert (code, said) == (0, "2 requests in both: 2 identical, 0 different\n")


def test_other_engines_are_named_once_also_where_all_answers_are_identical(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = Maker(weights="w1", numerics="float32/none/avx512/1/64/torch-2")
    new = Maker(weights="w2", numerics="bfloat16/none/avx512/1/64/torch-2")
    before = [recording(uid, 1, 2, seed=number, by=old) for number, uid in enumerate("abcd")]
    after = [recording(uid, 1, 2, seed=number, by=new) for number, uid in enumerate("abc")]
    after.append(recording("d", 1, 2, seed=3, by=old))
    changes = ["weights: recorded w1, now w2", "dtype: recorded float32, now bfloat16"]
    code, said = diff(tmp_path, before, after, capsys)
    assert code == 0 and said.splitlines() == [
        "4 requests in both: 4 identical, 0 different",
        f"3 of them by another engine: {'; '.join(changes)}",
    ]
    _, said = diff(tmp_path, before, after, capsys, "--json")
    assert orjson.loads(said)["other_engines"] == [{"requests": 3, "changes": changes}]
    after[0] = recording("a", 1, 3, by=new)
    code, said = diff(tmp_path, before, after, capsys)
    assert code == 1 and said.splitlines() == [
        "a: token 2 differs, of 2 tokens",
        "  recorded  token 2",
        "  now       token 3",
        *(f"  explained by {each}" for each in changes),
        "4 requests in both: 3 identical, 1 different",
        f"3 of them by another engine: {'; '.join(changes)}",
    ]


def test_files_that_cannot_be_compared_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = diff(tmp_path, [recording("a", 1)], [recording("b", 1, seed=1)], capsys)
    assert code == 2 and said
    path = tmp_path / "before.zst"
    (tmp_path / "torn").write_bytes(path.read_bytes()[:-9])
    for other, found in (("torn", "cut off"), ("absent", "cannot be read")):
        assert main(["replay", "diff", str(path), str(tmp_path / other)]) == 2
        assert found in capsys.readouterr().err
    write_dump(tmp_path / "redacted", [redacted(recording("a", 1), b"salt")])
    assert main(["replay", "diff", str(path), str(tmp_path / "redacted")]) == 2
    assert "redacted" in capsys.readouterr().err
    assert main(["replay", "diff", str(path), "--json"]) == 2
    assert "two files" in capsys.readouterr().err
