"""What is asked: the same for the same seed, sharing what it should share; traces, good and bad."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ops.bench import datasets
from ops.bench.datasets import Piece, Session, Span, Turn, Writer
from pipeline.errors import ConfigError

INPUTS, OUTPUTS = Span(20, 40), Span(5, 9)
WRITER = Writer(tokens_per_word=2.0, overhead_tokens=6.0)
MOONCAKE: Mapping[str, Any] = {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 5]}
QWEN: Mapping[str, Any] = {
    "chat_id": 159,
    "parent_chat_id": -1,
    "timestamp": 61.114,
    "input_length": 40,
    "output_length": 13,
    "type": "text",
    "turn": 1,
    "hash_ids": [1089, 1090, 1091],
}


def write(path: Path, rows: Sequence[Mapping[str, Any] | str]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def texts(sessions: Sequence[Session]) -> list[list[str]]:
    return [[WRITER.write(turn) for turn in session.turns] for session in sessions]


def every_kind(seed: int) -> list[list[Session]]:
    return [
        datasets.drawn(9, seed, INPUTS, OUTPUTS),
        datasets.shared_prefix(9, seed, INPUTS, OUTPUTS, groups=3, prefix_tokens=100),
        datasets.multi_turn(9, seed, INPUTS, OUTPUTS, turns=4),
        datasets.poisson(datasets.drawn(9, seed, INPUTS, OUTPUTS), 5.0, seed),
    ]


def test_the_same_seed_gives_the_same_requests_and_another_seed_others() -> None:
    for first, again, other in zip(every_kind(3), every_kind(3), every_kind(4), strict=True):
        assert first == again and texts(first) == texts(again)
        assert first != other and texts(first) != texts(other)


def test_lengths_are_within_their_spans_and_reach_both_ends() -> None:
    turns = [session.turns[0] for session in datasets.drawn(500, 0, INPUTS, OUTPUTS)]
    assert {turn.num_tokens for turn in turns} == set(range(20, 41))
    assert {turn.output_tokens for turn in turns} == set(range(5, 10))


def test_a_text_has_as_many_words_as_make_its_tokens() -> None:
    turn = Turn((Piece("a", 30), Piece("b", 46)), 1)
    assert len(WRITER.write(turn).split()) == 30 // 2 + (46 - 6) // 2
    assert WRITER.write(Turn((Piece("a", 1),), 1)).split()  # never empty: a server would refuse it


def test_of_two_pieces_with_one_name_the_shorter_is_the_start_of_the_longer() -> None:
    short, long = (Writer().write(Turn((Piece("block 7", length),), 1)) for length in (100, 512))
    assert long.startswith(short) and len(short.split()) == 100


def test_random_prompts_share_nothing() -> None:
    prompts = [text for [text] in texts(datasets.drawn(100, 0, INPUTS, OUTPUTS))]
    assert len({prompt[:25] for prompt in prompts}) == 100


def test_shared_prefixes_are_as_many_as_groups_of_equal_size() -> None:
    prompts = [text for [text] in texts(datasets.shared_prefix(10, 0, INPUTS, OUTPUTS, groups=3, prefix_tokens=100))]
    starts = [" ".join(prompt.split()[:50]) for prompt in prompts]
    assert sorted(starts.count(start) for start in set(starts)) == [3, 3, 4]
    assert len(set(prompts)) == 10


def test_conversations_have_as_many_requests_in_all_as_asked() -> None:
    sessions = datasets.multi_turn(9, 0, INPUTS, OUTPUTS, turns=4)
    assert [len(session.turns) for session in sessions] == [4, 4, 1]
    assert len({text for session in texts(sessions) for text in session}) == 9


def test_poisson_arrivals_have_the_rate_that_was_asked() -> None:
    due_s = [session.due_s for session in datasets.poisson(datasets.drawn(4000, 0, INPUTS, OUTPUTS), 8.0, 0)]
    assert due_s[0] == 0.0 and due_s == sorted(due_s)
    assert due_s[-1] / 3999 == pytest.approx(1 / 8, rel=0.1)
    gaps = [later - earlier for earlier, later in pairwise(due_s)]
    assert sum(gap < 1 / 8 for gap in gaps) / 3999 == pytest.approx(1 - 1 / 2.71828, abs=0.03)  # exponential


def test_a_mooncake_trace_is_read_with_its_times_and_its_shared_blocks(tmp_path: Path) -> None:
    other = {**MOONCAKE, "timestamp": 26482, "input_length": 600, "output_length": 0, "hash_ids": [46, 47]}
    sessions = datasets.trace("mooncake", write(tmp_path / "trace", [MOONCAKE, "", other]), 0.5)
    assert [session.due_s for session in sessions] == [0.0, 0.5]
    assert [piece.num_tokens for piece in sessions[0].turns[0].pieces] == [512, 88]
    assert [piece.num_tokens for piece in sessions[1].turns[0].pieces] == [512, 512, 76]
    assert [session.turns[0].output_tokens for session in sessions] == [1, 52]  # every server writes something
    short, long = (Writer().write(session.turns[0]) for session in sessions)
    assert long.startswith(short)
    assert len(long.split()) == 1100


def test_a_qwen_trace_has_blocks_of_16_tokens_and_seconds(tmp_path: Path) -> None:
    later = {**QWEN, "chat_id": 160, "parent_chat_id": 159, "turn": 2, "timestamp": 63.114, "input_length": 70}
    sessions = datasets.trace("qwen", write(tmp_path / "trace", [QWEN, later]), 2.0)
    assert [session.due_s for session in sessions] == [0.0, 4.0]
    first, second = (session.turns[0].pieces for session in sessions)
    assert [piece.num_tokens for piece in first] == [16, 16, 8]
    assert [piece.num_tokens for piece in second] == [16, 16, 16, 22]  # what no id is given for is text of its own
    assert second[:2] == first[:2]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "Invalid JSON"),
        ("[1]", "an object"),
        ({**MOONCAKE, "timestamp": "now"}, "timestamp of now: "),
        ({**MOONCAKE, "timestamp": -1}, "timestamp of -1: "),
        ({**MOONCAKE, "input_length": 0}, "input_length of 0: "),
        ({**MOONCAKE, "input_length": True}, "input_length of True: "),
        ({**MOONCAKE, "output_length": 1.5}, "output_length of 1.5: "),
        ({**MOONCAKE, "hash_ids": "1,2"}, "hash_ids of 1,2: "),
        ({**MOONCAKE, "hash_ids": [None]}, "hash_ids of None: "),
        ({"timestamp": 1, "input_length": 1, "output_length": 1}, "hash_ids of {'timestamp': 1"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, bad: str | Mapping[str, Any], says: str) -> None:
    path = write(tmp_path / "trace.jsonl", [MOONCAKE, MOONCAKE, bad, MOONCAKE])
    with pytest.raises(ConfigError) as caught:
        datasets.trace("mooncake", path, 1.0)
    assert str(caught.value).startswith(f"{path}, line 3: ") and says in str(caught.value)


@pytest.mark.parametrize("name", ["chat_id", "parent_chat_id", "type", "turn"])
def test_a_mooncake_trace_is_not_taken_for_a_qwen_trace(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "trace", [{key: value for key, value in QWEN.items() if key != name}])
    with pytest.raises(ConfigError, match=f"line 1: {name}"):
        datasets.trace("qwen", path, 1.0)


def test_a_trace_without_requests_or_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        datasets.trace("mooncake", write(tmp_path / "empty", ["", " "]), 1.0)
    with pytest.raises(ConfigError, match="No such file"):
        datasets.trace("mooncake", tmp_path / "absent", 1.0)
