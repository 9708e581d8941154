"""Which tokens would complete a forbidden sequence, and at which cost."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from support.measured import lines_run

import stages.generate.schedule.bad_words
from stages.generate.schedule.bad_words import BadWords

tokens = st.integers(0, 2)


@given(st.lists(st.lists(tokens, min_size=1, max_size=5), max_size=12), st.lists(tokens, max_size=8))
def test_the_last_tokens_of_the_sequences_that_the_output_has_begun_are_forbidden(
    words: list[list[int]], output_ids: list[int]
) -> None:
    bad_words = BadWords(words)
    begun = [word for word in words if output_ids[len(output_ids) - len(word) + 1 :] == word[:-1]]
    last = output_ids[len(output_ids) - min(bad_words.reach, len(output_ids)) :]
    assert sorted(bad_words.completed_by(last)) == sorted(word[-1] for word in begun)
    assert bool(bad_words) == bool(words)


def test_a_look_up_costs_a_few_steps_for_each_token_however_many_sequences_there_are() -> None:
    """All of these are the last tokens of the output but for their first one, or all of it."""

    def lines(words: Sequence[Sequence[int]]) -> int:
        bad_words = BadWords(words)
        return lines_run(lambda: bad_words.completed_by([7] * bad_words.reach), stages.generate.schedule.bad_words)

    assert lines([[9 + number, *[7] * 253, number] for number in range(512)]) < 20 * 255
    assert lines([[*[7] * 254, number] for number in range(512)]) < 20 * 255
    assert lines([[*[7] * number, 1] for number in range(256)]) < 20 * 256
