"""Incremental text and stop strings, on two tokenizers that are hard cases: one whose tokens are single bytes, and one
of the SentencePiece kind, whose decoder takes away the first space and lets one wrong byte spoil all bytes beside it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.measured import lines_run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import stages.detokenize.text
from stages.detokenize.text import (
    PROMPT_TAIL,
    Decode,
    IncrementalText,
    StopAutomaton,
    StopStrings,
    TokenText,
    fixed_text_of,
    no_text,
)

SPECIAL = "<|im_end|>"
WORDS = ("▁", "▁the", "▁a", "a", "b", "\ufffd")


@functools.cache
def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def decode(token_ids: Sequence[int]) -> str:
    return str(byte_tokenizer().decode(list(token_ids), skip_special_tokens=True))


def encode(text: str) -> list[int]:
    return list(byte_tokenizer().encode(text).ids)


@functools.cache
def piece_tokenizer() -> Tokenizer:
    """The decoder of Llama 2: a word begins with its space, and bytes stand for what is in no word."""
    pieces = ["<unk>", *WORDS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def decode_pieces(token_ids: Sequence[int]) -> str:
    return str(piece_tokenizer().decode(list(token_ids), skip_special_tokens=True))


def pieces(*names: str) -> list[int]:
    vocab = piece_tokenizer().get_vocab()
    return [vocab[name] for name in names]


def byte_pieces(data: bytes) -> list[int]:
    return pieces(*(f"<0x{byte:02X}>" for byte in data))


FIXED = {
    decode: functools.cache(lambda: fixed_text_of(byte_tokenizer())),
    decode_pieces: functools.cache(lambda: fixed_text_of(piece_tokenizer())),
}
"""Decoders in which most tokens have a fixed text, and what returns the function that knows it."""


def deltas(token_ids: Sequence[int], prompt: Sequence[int] = (), decode: Decode = decode) -> list[str]:
    """Return what each token shows, and the rest. Fixed texts must not change that."""

    def shown(fixed: TokenText) -> list[str]:
        text = IncrementalText(decode, prompt, fixed)
        return [*(text.push(token) for token in token_ids), text.flush()]

    found = shown(no_text)
    assert decode not in FIXED or shown(FIXED[decode]()) == found
    return found


def test_a_character_of_several_tokens_appears_with_its_last_one() -> None:
    assert deltas(encode("a你🙂")) == ["a", "", "", "你", "", "", "", "🙂", ""]


def decode_chunks(chunks: Sequence[bytes]) -> Decode:
    """Return the decoder of a vocabulary whose tokens are these bytes, as byte-level BPE cuts texts anywhere."""
    return lambda token_ids: b"".join(chunks[token] for token in token_ids).decode("utf-8", "replace")


def test_tokens_that_each_end_inside_a_character_lose_none() -> None:
    chunk = "하섕".encode()[-3:-1]  # the first two bytes of the second one
    chunks = ["섕".encode()[-1:] + "하".encode() + chunk]  # which the next token completes
    shown = deltas([0] * 6, decode=decode_chunks(chunks))
    assert "".join(shown) == decode_chunks(chunks)([0] * 6) == "\ufffd하섕하섕하섕하섕하섕하\ufffd"
    assert sum(map(bool, shown)) > 1, "it comes piece by piece, not all at the end"


@given(data=st.data(), text=st.text(alphabet="a é你하섕🙂", min_size=1, max_size=12), noise=st.binary(max_size=3))
def test_a_text_cut_into_tokens_anywhere_comes_back_whole(data: st.DataObject, text: str, noise: bytes) -> None:
    content = text.encode() + noise + text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(content) - 1), max_size=len(content))))
    chunks = [content[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    shown = deltas(range(len(chunks)), decode=decode_chunks(chunks))
    assert "".join(shown) == content.decode("utf-8", "replace")


def test_a_token_with_a_fixed_text_is_not_decoded_with_those_before_it() -> None:
    asked: list[Sequence[int]] = []

    def measured(token_ids: Sequence[int]) -> str:
        asked.append(token_ids)
        return decode(token_ids)

    text = IncrementalText(measured, [], fixed_text_of(byte_tokenizer()))
    assert "".join(map(text.push, encode("ab" * 50))) == "ab" * 50
    assert len(asked) == 2, "the first token alone"
    fixed = fixed_text_of(piece_tokenizer())
    assert [fixed(token) for token in pieces("▁", "▁the", "a")] == [" ", " the", "a"]
    assert {fixed(token) for token in pieces(SPECIAL, "<0x41>", "<0xE4>", "\ufffd")} == {""}


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Replace("aa", "b")]),
        decoders.Sequence(
            [decoders.Replace("a", "b"), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("b", 0, 1)]
        ),
    ],
)
def test_no_text_is_fixed_where_it_may_depend_on_the_tokens_beside_it(decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.decoder = decoder
    assert fixed_text_of(tokenizer)(0) == ""


def test_half_a_character_at_the_end_is_flushed_and_not_lost() -> None:
    assert deltas(encode("a你")[:-1]) == ["a", "", "", "\ufffd"]


def test_a_special_token_has_no_text_and_delays_none() -> None:
    special = byte_tokenizer().get_vocab()[SPECIAL]
    assert deltas([*encode("ab"), special, *encode("c")]) == ["a", "b", "", "c", ""]


def test_bytes_that_are_no_text_do_not_hold_back_what_follows() -> None:
    broken = [encode("你")[1]] * 8
    shown = deltas([*broken, *encode("a")])
    assert "".join(shown) == decode([*broken, *encode("a")])
    assert "".join(shown[:6]) != ""


def test_a_space_that_belongs_between_words_is_kept_after_the_prompt() -> None:
    """Decoders of the SentencePiece kind drop the space before the first word of what they are given."""

    def words(token_ids: Sequence[int]) -> str:
        return " ".join(f"w{token}" for token in token_ids)

    text = IncrementalText(words, [1, 2])
    assert text.push(3) == " w3" and text.push(4) == " w4"


def test_the_space_after_a_special_token_is_kept() -> None:
    assert deltas(pieces("a", SPECIAL, "▁the"), decode=decode_pieces) == ["a", "", " the", ""]
    assert deltas(pieces(SPECIAL, SPECIAL, "▁the"), pieces("a"), decode_pieces) == ["", "", " the", ""]


def test_a_character_after_a_prompt_that_ends_in_one_is_whole() -> None:
    """The tokens before the first one begin in the middle of the first of these characters."""
    smiles = byte_pieces("🙂🙂".encode())
    assert deltas(byte_pieces("🙂".encode()), smiles, decode_pieces) == ["", "", "", "🙂", ""]


UNSHOWN = byte_pieces("你".encode())[:1]
"""The beginning of a character. It is held back."""


@pytest.mark.parametrize("prompt", [pieces("a") * 100, []])
@pytest.mark.parametrize(
    ("run", "most"),
    [
        (pieces("▁the"), 8),
        (byte_pieces("你".encode()), 8),
        (pieces(SPECIAL), 8),
        (byte_pieces(b"\x80"), 48),
        (byte_pieces(b"\xe4 "), 48),
        (pieces("\ufffd"), 48),
        ([*UNSHOWN, *pieces(SPECIAL) * 99], 48),
    ],
)
def test_the_work_for_a_token_does_not_grow_with_the_text(run: list[int], most: int, prompt: list[int]) -> None:
    """Also where no token is a character."""
    calls: list[int] = []

    def measured(token_ids: Sequence[int]) -> str:
        calls.append(len(token_ids))
        return decode_pieces(token_ids)

    text = IncrementalText(measured, prompt)
    for token in (run * 500)[:500]:
        calls.clear()
        text.push(token)
        assert len(calls) <= 4 and max(calls) <= PROMPT_TAIL + most


def test_bytes_that_are_no_text_are_told_as_their_decoder_tells_them_however_many_they_are() -> None:
    """One wrong byte spoils all bytes beside it here, also if what follows would be text on its own."""
    spoilt = [*pieces("a"), *byte_pieces(b"\x80" + "你".encode() * 200), *pieces("b")]
    assert "".join(deltas(spoilt, decode=decode_pieces)) == decode_pieces(spoilt) == "a" + "\ufffd" * 601 + "b"
    assert deltas(byte_pieces(b"\x81>\0"), byte_pieces(b"<\xcc"), decode_pieces) == ["", ">", "", "\ufffd"]
    broken = encode("a") + encode("你")[1:] * 200 + encode("🙂b")
    assert "".join(deltas(broken)) == decode(broken)


@given(
    st.lists(st.one_of(st.integers(0, 256), st.sampled_from(encode("é你🙂\ufffd\u2028"))), max_size=40),
    st.text(max_size=6),
)
@example(encode("\ufffd\ufffd你"), "")
@example(encode("🙂🙂\ufffd")[2:], "你")
def test_the_sum_of_the_deltas_is_the_text_of_all_tokens(token_ids: list[int], prompt: str) -> None:
    before = encode(prompt)
    assert "".join(deltas(token_ids, before)) == decode([*before, *token_ids])[len(decode(before)) :]


def _spoils_no_text(data: bytes) -> bool:
    """No beginning of *data* is text. One that is has been shown when the decoder finds a wrong byte behind it."""
    return all("\ufffd" in data[:end].decode(errors="replace") for end in range(1, len(data) + 1))


words = st.sampled_from([pieces(word) for word in WORDS])
characters = st.text("é你🙂\n", min_size=1, max_size=4).map(lambda text: byte_pieces(text.encode()))
specials = st.just(pieces(SPECIAL))
broken = (
    st.lists(st.integers(0x80, 0xFF), min_size=1, max_size=9)
    .map(bytes)
    .filter(_spoils_no_text)
    .map(lambda data: [*pieces("a"), *byte_pieces(data), *pieces("b")])
)


def joined(parts: st.SearchStrategy[list[int]], max_size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(parts, max_size=max_size).map(lambda parts: [token for part in parts for token in part])


@given(joined(words | characters | specials | broken, 20), joined(words | characters | specials, 8), st.data())
@example(pieces("a", SPECIAL, "▁the"), [], None)
@example(pieces(SPECIAL, "▁", SPECIAL, "▁the"), pieces("▁"), None)
def test_the_sum_of_the_deltas_is_the_text_of_all_pieces(
    token_ids: list[int], prompt: list[int], data: st.DataObject | None
) -> None:
    """Also where special tokens stand inside characters."""
    if data is not None:
        for _ in range(data.draw(st.integers(0, 2))):
            token_ids.insert(data.draw(st.integers(0, len(token_ids))), pieces(SPECIAL)[0])
    special = set(pieces(SPECIAL))
    assume(set(prompt[-PROMPT_TAIL:]) != special or set(prompt) == special)  # so many in a row end no real prompt
    shown = "".join(deltas(token_ids, prompt, decode_pieces))
    assert shown == decode_pieces([*prompt, *token_ids])[len(decode_pieces(prompt)) :]


@given(st.text(min_size=1, max_size=20))
def test_no_delta_of_a_whole_text_holds_half_a_character(text: str) -> None:
    shown = deltas(encode(text))
    assert "".join(shown) == text
    assert all("\ufffd" not in delta for delta in shown) or "\ufffd" in text


class PlainStops:
    """StopStrings as it is defined: looks at all that is held back and at every stop string, each time."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self.stops, self.include, self.held, self.met = stops, include, "", ""

    def push(self, delta: str, *, armed: bool) -> tuple[str, bool]:
        text, self.held = self.held + delta, ""
        found = [(place, len(stop), stop) for stop in self.stops if (place := text.find(stop)) >= 0]
        if armed and found:
            place, length, self.met = min(found)
            return text[: place + length * self.include], True
        begun = [size for stop in self.stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
        shown = len(text) - max(begun, default=0)
        self.held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        held, self.held = self.held, ""
        return held


@given(
    st.lists(st.tuples(st.text("ab🙂", max_size=7), st.sampled_from([True, True, False])), max_size=12),
    st.lists(st.text("ab🙂", min_size=1, max_size=6), max_size=5),
    st.booleans(),
)
@example([("xab", False), ("", True)], ["ab", "abc"], False)
@example([("ab", True), ("c", True)], ["abcd", "bc"], False)
@example([("one STOP two", True)], ["STOP"], False)
@example([("one S", True), ("TO", True), ("P two", True)], ["STOP"], False)
@example([("a ST", True), ("A", True), ("STO", True)], ["STOP"], False)
@example([("a b c", True)], ["c", "b"], False)
@example([("abc", True)], ["bc", "b"], False)
@example([("xENDy", False), ("END", True)], ["END"], False)
def test_a_text_is_cut_as_the_plain_definition_cuts_it(
    parts: list[tuple[str, bool]], stops: list[str], include: bool
) -> None:
    """In whichever parts it comes, whichever of them may be cut, and also in a text that goes on after a cut."""
    strings, plain = StopStrings(stops, include=include), PlainStops(stops, include=include)
    for part, armed in parts:
        assert strings.push(part, armed=armed) == plain.push(part, armed=armed)
        assert (strings.met, strings.holds) == (plain.met, plain.held != "")
    assert strings.flush() == plain.flush()


LONG_STOPS = ["a" * 1023 + "X", *("a" * 20 + chr(98 + number) + "a" * 1003 for number in range(15))]
"""The first one is nearly met by a text of nothing but `a`. The others have its length."""


def test_a_character_costs_a_few_steps_however_long_and_many_stop_strings_are() -> None:
    automaton = StopAutomaton(LONG_STOPS)
    strings = StopStrings(automaton)
    shown: list[str] = []

    def push(texts: Sequence[str]) -> None:
        shown.extend(strings.push(text)[0] for text in texts)

    assert lines_run(lambda: push(["a" * 16] * 1000), stages.detokenize.text) < 20 * 16_000
    assert "".join(shown) == "a" * (16_000 - 1023)
    assert lines_run(lambda: push(["aY"] * 1000), stages.detokenize.text) < 60 * 1000
    assert lines_run(lambda: push(["hello"] * 1000), stages.detokenize.text) < 10 * 1000


def test_an_automaton_is_made_in_steps_and_memory_that_grow_with_its_characters() -> None:
    made: list[StopAutomaton] = []
    lines = lines_run(lambda: made.append(StopAutomaton(LONG_STOPS)), stages.detokenize.text)
    assert lines < 16 * 1024 // 4
    assert sum(map(sys.getsizeof, vars(made[0]).values())) < 14 * 16 * 1024


def stopped(parts: Sequence[str], stops: Sequence[str]) -> tuple[str, bool]:
    """Return all that is shown of *parts*, and whether a stop string was met."""
    strings = StopStrings(stops)
    shown = ""
    for part in parts:
        delta, met = strings.push(part)
        shown += delta
        if met:
            return shown, True
    return shown + strings.flush(), False


@given(
    st.text(alphabet="ab", max_size=30), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3), st.data()
)
def test_cutting_piece_by_piece_is_cutting_the_whole_where_one_stop_is_complete_first(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """However a text is split, what is shown is a beginning of it that holds no stop string."""
    parts = []
    rest = text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        parts.append(rest[:size])
        rest = rest[size:]
    shown, met = stopped(parts, stops)
    assert text.startswith(shown)
    assert met == any(stop in text for stop in stops)
    assert met or shown == text
    assert all(stop not in shown for stop in stops)
