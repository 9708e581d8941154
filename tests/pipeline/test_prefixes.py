"""Digests of prompts: equal beginnings have equal digests, up to where they differ."""

from __future__ import annotations

from pipeline.prefixes import packed, prompt_digests, unpacked


def test_digests_say_how_far_two_prompts_are_alike() -> None:
    first, second = list(range(100)), [*range(50), *range(1000, 1050)]
    one, other = (prompt_digests(tokens, 16, "ns") for tokens in (first, second))
    assert len(one) == len(other) == 6
    assert [a == b for a, b in zip(one, other, strict=True)] == [True] * 3 + [False] * 3
    assert prompt_digests(first[:33], 16, "ns") == one[:2]


def test_the_last_token_is_no_part_of_a_cached_prefix() -> None:
    assert [len(prompt_digests(list(range(n)), 4, "ns")) for n in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_another_namespace_has_other_digests() -> None:
    assert not set(prompt_digests(list(range(100)), 4, "blue")) & set(prompt_digests(list(range(100)), 4, "green"))
    assert prompt_digests(list(range(9)), 4, "n" * 500) != prompt_digests(list(range(9)), 4, "n" * 501)


def test_a_status_holds_them_as_text() -> None:
    digests = prompt_digests(list(range(500)), 4, "ns")
    assert unpacked(packed(digests)) == set(digests)
    assert len(packed([b"1234"] * 1024)) == 5464
    assert unpacked("") == unpacked("no digests!") == set()
