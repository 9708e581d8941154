"""What is left of a request in a redacted file, and that it does not depend on what was said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.replay.redact import BLOCK_TOKENS, block_hashes, made_up_tokens, redacted, stand_in
from pipeline.errors import UndecodableEvent
from pipeline.events import (
    Admitted,
    Answered,
    Event,
    Failed,
    Finished,
    Logprob,
    Presentation,
    PromptInfo,
    SamplingParams,
    Submitted,
    Templating,
    Timings,
    Tokenized,
    TokensProduced,
    TokenText,
    Usage,
    decode,
    encode,
)
from pipeline.log.protocol import Entry
from pipeline.names import SEAL, SUBMITTED_ID, TOKENIZED_ID, tokens_id
from pipeline.recording import Recording, encode_recording
from pipeline.views.history import story

SALT, OTHER_SALT = b"s" * 32, b"t" * 32
UID = "019aaf1c0000700080000000000000ff"
LETTERS = "".join(map(chr, range(0x4E00, 0x4E40)))
"""None of them is in any name that we use."""


def recorded(*events: tuple[str, Event]) -> Recording:
    return Recording(UID, tuple(Entry(entry_id, {"ms": "5"} | encode(event)) for entry_id, event in events))


def conversation(said: str, ids: Sequence[int], answer: str, answer_ids: Sequence[int]) -> Recording:
    """Return a request that has every field with words in it."""
    score = Logprob(token=answer_ids[0], text=answer, logprob=-1.0)
    submitted = Submitted(
        endpoint="/v1/chat/completions",
        frontend="web-0",
        owner=said,
        model="demo",
        messages=(
            {"role": "user", "content": said, "name": said},
            {"role": "assistant", "content": "", "tool_calls": [{"id": said}]},
            {"role": said, "content": said},
        ),
        prompt=said,
        prompt_ids=tuple(ids),
        sampling=SamplingParams(
            temperature=0.5,
            seed=7,
            stop=(said, said),
            stop_token_ids=tuple(answer_ids),
            logit_bias=((answer_ids[0], 1.0),),
            allowed_token_ids=tuple(answer_ids),
            bad_words=(said,),
            logprobs=2,
            logprob_token_ids=tuple(answer_ids),
        ),
        templating=Templating(tools=({"function": {"name": said}},), variables={said: said}),
        presentation=Presentation(stream=True, choices=2),
        labels={"user": said, "metadata": {said: said}},
        deadline_ms=600_005,
    )
    told = PromptInfo(
        num_tokens=len(ids), cached_tokens=1, token_ids=tuple(ids), text=said, first=TokenText(token=ids[0], text=said)
    )
    usage = Usage(prompt_tokens=len(ids), completion_tokens=len(answer_ids))
    return recorded(
        (SUBMITTED_ID, submitted),
        (
            TOKENIZED_ID,
            Tokenized(token_ids=tuple(ids), fingerprint="f", by="tokenize-0", bad_words=(tuple(answer_ids),)),
        ),
        ("0-3", Admitted(engine="generate-0", epoch=1, step=3, fingerprint="w", cached_tokens=1)),
        (
            tokens_id(len(answer_ids)),
            TokensProduced(
                count=len(answer_ids),
                tokens=tuple(answer_ids),
                text=answer,
                step="1-3",
                chunks=1,
                scores=(score,),
                prompt=told,
            ),
        ),
        (
            SEAL,
            Finished(
                n=len(answer_ids),
                reason="stop",
                stop_string=said,
                usage=usage,
                timings=Timings(admitted_ms=1, first_token_ms=2, total_ms=3),
            ),
        ),
    )


words = st.text(LETTERS, min_size=5, max_size=30)
token_ids = st.lists(st.integers(1000, 200_000), min_size=1, max_size=150)


@settings(max_examples=40)
@given(words, token_ids, words, token_ids)
def test_no_word_and_no_token_of_prompt_or_answer_is_left(
    said: str, ids: list[int], answer: str, answer_ids: list[int]
) -> None:
    line = encode_recording(redacted(conversation(said, ids, answer, answer_ids), SALT)).decode()
    for text in (said, answer):
        for first in range(len(text) - 4):
            assert text[first : first + 5] not in line
    assert not set(line) & set(LETTERS)
    for event in events_of(redacted(conversation(said, ids, answer, answer_ids), SALT)):
        numbers = [number for name in ("token_ids", "tokens", "prompt_ids") for number in getattr(event, name, ())]
        assert set(numbers) <= {0}


@settings(max_examples=40)
@given(words, words, st.lists(st.tuples(*[st.integers(0, 200_000)] * 2), min_size=1, max_size=150), st.data())
def test_what_is_left_depends_on_lengths_alone_but_for_the_hashes(
    said: str, answer: str, ids: list[tuple[int, int]], data: st.DataObject
) -> None:
    def other(text: str) -> str:
        return data.draw(st.text(LETTERS, min_size=len(text), max_size=len(text)))

    one = redacted(conversation(said, [id for id, _ in ids], answer, [id for id, _ in ids]), SALT)
    two = redacted(conversation(other(said), [id for _, id in ids], other(answer), [id for _, id in ids]), SALT)
    assert one.entries == two.entries
    assert without_blocks(one) == without_blocks(two)


def without_blocks(recording: Recording) -> dict[str, Any]:
    told = dict(recording.about["redacted"])
    told["blocks"] = len(told["blocks"])
    return told


def events_of(recording: Recording) -> list[Any]:
    return [decode(entry.fields) for entry in recording.entries]


def test_lengths_times_and_structure_are_left() -> None:
    before = conversation("wordword", range(1000, 1130), "answer", (5, 6, 7))
    after = redacted(before, SALT)
    submitted, tokenized, admitted, tokens, finished = events_of(after)
    assert [message["role"] for message in submitted.messages] == ["user", "assistant", "other"]
    assert (submitted.sampling.seed, submitted.sampling.temperature, submitted.sampling.logprobs) == (7, 0.5, 2)
    assert (submitted.presentation, submitted.deadline_ms, submitted.ms) == (
        Presentation(stream=True, choices=2),
        600_005,
        5,
    )
    assert (submitted.frontend, submitted.model, submitted.owner, submitted.labels) == ("web-0", "demo", "", {})
    assert tokenized.token_ids == (0,) * 130
    assert admitted == events_of(before)[2]
    assert (tokens.count, tokens.tokens, tokens.text, tokens.step) == (3, (0, 0, 0), "", "1-3")
    assert (finished.usage, finished.timings, finished.stop_string) == (
        events_of(before)[4].usage,
        Timings(admitted_ms=1, first_token_ms=2, total_ms=3),
        "",
    )
    assert after.about["redacted"] == {
        "message_chars": [8, 0, 8],
        "prompt_chars": 8,
        "answer_chars": 6,
        "left_out": {
            "stop": 2,
            "stop_token_ids": 3,
            "logit_bias": 1,
            "allowed_token_ids": 3,
            "bad_words": 1,
            "logprob_token_ids": 3,
            "tools": 1,
        },
        "block_tokens": 64,
        "blocks": block_hashes(range(1000, 1130), SALT),
    }
    assert story(UID, after.entries)["prompt_tokens"] == 130
    assert [moment["at_ms"] for moment in story(UID, after.entries)["moments"]] == [0] * 5


@pytest.mark.parametrize(
    "end",
    [
        Failed(status=400, code="invalid_value", message="wordword is wrong", param="wordword"),
        Answered(token_ids=(5000, 6000), pieces=("word", "word"), text="wordword", by="tokenize-0"),
    ],
)
def test_an_end_says_what_it_was_and_quotes_nothing(end: Event) -> None:
    submitted = Submitted(endpoint="e", frontend="web-0", prompt="wordword", sampling=SamplingParams())
    line = encode_recording(redacted(recorded((SUBMITTED_ID, submitted), (SEAL, end)), SALT))
    assert b"word" not in line and b"5000" not in line
    assert end.model_dump()["kind"].encode() in line


def test_what_cannot_be_read_is_not_redacted() -> None:
    with pytest.raises(UndecodableEvent):
        redacted(Recording(UID, (Entry(SUBMITTED_ID, {"kind": "submitted", "secret": "1"}),)), SALT)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 9), max_size=200), st.lists(st.integers(0, 9), max_size=200), st.data())
def test_blocks_are_equal_as_far_as_prompts_are_and_differ_between_files(
    first: list[int], second: list[int], data: st.DataObject
) -> None:
    shared = data.draw(st.integers(0, len(first)))
    second = first[:shared] + second
    same = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
    one, two, again = (block_hashes(ids, salt) for ids, salt in ((first, SALT), (second, SALT), (first, OTHER_SALT)))
    assert len(one) == -(-len(first) // BLOCK_TOKENS)
    whole = (min(len(first), len(second)) if same is None else same) // BLOCK_TOKENS
    assert one[:whole] == two[:whole]
    if first == second:
        assert one == two
    else:
        assert one[whole : whole + 1] != two[whole : whole + 1]
    assert not set(one) & set(again)
    assert len(set(one)) == len(one)


def test_what_came_from_a_redacted_file_keeps_its_blocks_under_another_salt() -> None:
    prompts = [[1] * 64 + [2] * 64, [1] * 64 + [3] * 64]
    once = [redacted(conversation("wordword", ids, "answer", (5,)), SALT) for ids in prompts]
    (a, b), (c, d) = (
        (each.about["redacted"]["blocks"] for each in once),
        (redacted(each, OTHER_SALT).about["redacted"]["blocks"] for each in once),
    )
    assert (a[0] == b[0], a[1] == b[1]) == (c[0] == d[0], c[1] == d[1]) == (True, False)
    assert not {*a, *b} & {*c, *d}


def test_a_redacted_request_can_be_sent_with_equal_tokens_in_equal_blocks() -> None:
    prompts = [[1] * 64 + [2] * 30, [1] * 64 + [3] * 40]
    sendable = [stand_in(redacted(conversation("wordword", ids, "answer", (5,)), SALT)) for ids in prompts]
    (one, tokenized, *_), (two, *_) = map(events_of, sendable)
    assert (len(one.prompt_ids), len(two.prompt_ids)) == (94, 104)
    assert one.prompt_ids[:64] == two.prompt_ids[:64]
    assert one.prompt_ids[64:] != two.prompt_ids[64:94]
    assert (one.endpoint, one.messages, tokenized.token_ids) == ("/v1/completions", (), one.prompt_ids)
    assert sendable[0].entries[2:] == redacted(conversation("wordword", prompts[0], "answer", (5,)), SALT).entries[2:]
    whole = conversation("wordword", prompts[0], "answer", (5,))
    assert stand_in(whole) == whole


def test_made_up_tokens_are_as_many_as_asked_for() -> None:
    assert made_up_tokens([], 64, 0) == []
    assert len(made_up_tokens(["a"], 64, 70)) == 70
    assert made_up_tokens(["a", "b"], 64, 70)[:64] == made_up_tokens(["a"], 64, 64)
