"""The grammars of an engine: who waits for one, who fails because of one, and what may come next."""

from __future__ import annotations

import dataclasses
import json
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from support.calls import noted
from support.schedules import request
from support.servers import eventually

import stages.generate.loop.grammars
from pipeline.events import Failed
from stages.generate.loop.grammars import GrammarMatcher, Grammars, _Spelled
from stages.generate.loop.updates import Arrived
from stages.generate.sampling.masks import unpacked
from stages.generate.schedule.plan import Matcher

DEMO = Path(stages.generate.__file__).resolve().parent / "model" / "demo"
VOCAB = 1056
"""A few more than the tokenizer has: the model's embeddings are padded."""
EOS = (1045, 1043)


def lark(text: str) -> str:
    """Return a grammar as the tokenizer writes it."""
    return f'{text}\n%llguidance {{"no_forcing": true}}'


LETTERS = lark("start: /[ab]{2,3}/")
EVIL = lark(r"start: /(\p{L}{1,50}){50}/")
"""Its first masks are within the limits, and later ones are not."""
EVIL_AT_ONCE = lark("start: T\nT: /.{0,300}/ & /(.*a.{8}b.*)/ & ~/(.*c.{9}d.*)/ & /.*(e.{10}f).*/")


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(str(DEMO / "tokenizer.json"), VOCAB, list(EOS))


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(DEMO, EOS, VOCAB)
    yield made
    made.close()


def arrived(uid: str, grammar: str, output: Sequence[int] = ()) -> Arrived:
    return Arrived(
        dataclasses.replace(request(uid, output=output), grammar=grammar, grammar_param="regex"), resumed=bool(output)
    )


def ready(grammars: Grammars, count: int = 1) -> dict[str, GrammarMatcher | Failed]:
    """Wait until *count* requests are ready."""
    found: dict[str, GrammarMatcher | Failed] = {}
    for _ in range(10_000):
        found |= {one.request.uid: result for one, result in grammars.ready()}
        if len(found) >= count:
            return found
        grammars.wait(0.01)
    raise AssertionError(f"only {sorted(found)} are ready")


def matcher_of(grammars: Grammars, grammar: str, output: Sequence[int] = ()) -> GrammarMatcher:
    grammars.begin(arrived("a", grammar, output))
    (matcher,) = ready(grammars).values()
    assert isinstance(matcher, GrammarMatcher), matcher
    return matcher


def tokens(matcher: Matcher, vocab_size: int = VOCAB) -> list[int]:
    """Return the tokens that may come next."""
    allowed = matcher.allowed()
    assert allowed is not None
    found: list[int] = np.flatnonzero(unpacked(allowed, vocab_size)).tolist()
    return found


def texts(tokenizer: LLTokenizer, matcher: Matcher) -> set[bytes]:
    """Return the tokens that may come next, as texts."""
    found = tokens(matcher)
    assert max(found) < 1052, "the tokenizer has no more tokens"
    return {tokenizer.decode_bytes([token]) for token in found}


def test_a_matcher_allows_what_may_come_next_and_the_models_own_end(grammars: Grammars, tokenizer: LLTokenizer) -> None:
    matcher = matcher_of(grammars, LETTERS)
    ends = {tokenizer.decode_bytes([token]) for token in EOS}
    (a,) = tokenizer.tokenize_str("a")
    first = texts(tokenizer, matcher)
    assert {b"a", b"b"} <= first and all(set(text) <= set(b"ab") for text in first)
    matcher.advance(a)
    assert not ends & texts(tokenizer, matcher)
    matcher.advance(a)
    assert ends < texts(tokenizer, matcher)
    matcher.advance(a)
    assert texts(tokenizer, matcher) == ends


def test_the_output_of_another_engine_is_taken_in(grammars: Grammars, tokenizer: LLTokenizer) -> None:
    output = tokenizer.tokenize_str("ab")
    matcher = matcher_of(grammars, LETTERS)
    for token in output:
        matcher.advance(token)
    assert texts(tokenizer, matcher_of(grammars, LETTERS, output)) == texts(tokenizer, matcher) > {b"a"}


@pytest.mark.parametrize(
    ("grammar", "code"),
    [
        (EVIL_AT_ONCE, "grammar_too_complex"),
        (lark("start: <no_such_token>"), "invalid_grammar"),
        (lark(r"start: /[^\s\S]/"), "invalid_grammar"),
    ],
    ids=["complex", "token", "empty"],
)
def test_a_request_fails_before_it_runs_if_its_grammar_cannot_be_followed(
    grammars: Grammars, grammar: str, code: str
) -> None:
    grammars.begin(arrived("bad", grammar))
    grammars.begin(arrived("good", LETTERS))
    found = ready(grammars, 2)
    failed = found["bad"]
    assert isinstance(failed, Failed) and (failed.status, failed.code, failed.param) == (400, code, "regex")
    assert isinstance(found["good"], GrammarMatcher) and len(grammars) == 0


def test_a_matcher_that_passes_a_limit_gives_up_and_says_why(grammars: Grammars, tokenizer: LLTokenizer) -> None:
    matcher = matcher_of(grammars, EVIL)
    assert matcher.allowed() is not None and matcher.error == ""
    (a,) = tokenizer.tokenize_str("a")
    for _ in range(60):
        matcher.advance(a)
        if matcher.allowed() is None:
            break
    assert "too many" in matcher.error
    matcher.advance(a)
    assert matcher.allowed() is None


def test_a_matcher_begins_again_with_states_of_its_own_before_it_gives_up(
    grammars: Grammars, tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tokenizer.tokenize_str("ab")
    expected = texts(tokenizer, matcher_of(grammars, LETTERS, output))
    taken_in: list[Sequence[int]] = []
    computed = GrammarMatcher._is_computed

    def computed_at_last(self: GrammarMatcher, token_ids: Sequence[int]) -> bool:
        taken_in.append(tuple(token_ids))
        return len(taken_in) != 3 and computed(self, token_ids)

    monkeypatch.setattr(GrammarMatcher, "_is_computed", computed_at_last)
    fresh = noted(monkeypatch, Grammars, "_new", lambda *_, is_fresh: is_fresh)
    matcher = matcher_of(grammars, LETTERS)
    for token in output:
        matcher.advance(token)
    assert texts(tokenizer, matcher) == expected and matcher.error == ""
    assert taken_in == [(), (output[0],), (output[1],), tuple(output)] and fresh[-1] is True


def test_a_matcher_that_gives_up_twice_names_the_limit_that_it_passed_first() -> None:
    """The second one takes in the whole output at once, and often says of a limit that a token does not fit."""

    class Refusing:
        def __init__(self, is_fresh: bool) -> None:
            self._error = 'token "v" doesn\'t satisfy the grammar' if is_fresh else "too many expressions"

        def is_error(self) -> bool:
            return True

        def get_error(self) -> str:
            return self._error

    matcher = GrammarMatcher(Refusing, VOCAB, [], queue.SimpleQueue())  # type: ignore[arg-type]
    assert matcher.error == "too many expressions" and matcher.allowed() is None


KEYS = lark('start: "{\\"full_name\\": \\"" /[ab]{1,9}/ "\\", \\"age\\": " /[0-9]+/ "}"')


def test_forced_text_is_drafted_and_what_may_come_after_each_draft_is_known(
    grammars: Grammars, tokenizer: LLTokenizer
) -> None:
    matcher, other = matcher_of(grammars, KEYS), matcher_of(grammars, KEYS)
    drafts, are_forced = matcher.draft([1, 2, 3], 4)
    assert are_forced and len(drafts) == 4 and b'{"full_name": "'.startswith(tokenizer.decode_bytes(list(drafts)))
    for ahead, token in enumerate(drafts):
        assert np.array_equal(masks(matcher, ahead), masks(other))
        other.advance(token)
    assert np.array_equal(masks(matcher, 4), masks(other)) and not masks(matcher, 5).any()
    whole = tokenizer.tokenize_str('{"full_name": "')
    for token in whole:
        matcher.advance(token)
    (a,), (one,) = tokenizer.tokenize_str("a"), tokenizer.tokenize_str("1")
    assert matcher.draft([a, a, one, a], 8) == ([a, a], False), "up to the first one that does not fit"
    assert not masks(matcher, 3).any(), "the drafts of before are gone"
    assert matcher.draft([one], 8) == ([], False) and matcher.error == ""
    assert np.array_equal(masks(matcher), masks(matcher_of(grammars, KEYS, whole)))


def masks(matcher: GrammarMatcher, ahead: int = 0) -> np.ndarray:
    allowed = matcher.allowed(ahead)
    assert allowed is not None
    return unpacked(allowed, VOCAB)


def test_named_tokens_are_no_text_that_is_forced(grammars: Grammars) -> None:
    assert matcher_of(grammars, lark("start: <[1045]>")).draft([], 8) == ([], False)


def test_where_masks_take_long_nothing_is_drafted(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.generate.loop.grammars.SLOW_MASK_S", -1)
    matcher = matcher_of(grammars, KEYS)
    assert matcher.draft([1], 8) == ([], False) and masks(matcher).any()


@pytest.mark.parametrize("when", ["it follows drafts", "it takes them back", "it follows the next token"])
def test_a_matcher_that_gives_up_because_of_drafts_begins_again_without(
    grammars: Grammars, tokenizer: LLTokenizer, when: str
) -> None:
    made: list[LLMatcher] = []

    class Weak:
        """A matcher that gives up after it has followed drafts."""

        def __init__(self, is_fresh: bool) -> None:
            self._real = grammars._new(KEYS, is_fresh=is_fresh)
            self._has_failed, self._has_drafted = False, False
            made.append(self)  # type: ignore[arg-type]

        def rollback(self, count: int) -> bool:
            self._has_drafted = True
            self._has_failed |= when == "it takes them back"
            return not self._has_failed and bool(self._real.rollback(count))

        def consume_tokens(self, tokens: list[int]) -> bool:
            is_first = len(made) == 1
            if is_first and when == "it follows drafts":
                raise BaseException("a panic")
            self._has_failed |= self._has_drafted and when == "it follows the next token"
            return not self._has_failed and bool(self._real.consume_tokens(tokens))

        def is_error(self) -> bool:
            return self._has_failed

        def get_error(self) -> str:
            return "too many lexer states"

        def __getattr__(self, name: str) -> object:
            return getattr(self._real, name)

    followers = grammars.started()._followers
    matcher = GrammarMatcher(Weak, VOCAB, [], followers, tokenizer.tokenize_str)  # type: ignore[arg-type]
    drafts, _ = matcher.draft([], 4)
    assert drafts
    expected = matcher_of(grammars, KEYS)
    assert np.array_equal(masks(matcher), masks(expected))
    for each in (matcher, expected):
        each.advance(drafts[0])
    assert np.array_equal(masks(matcher), masks(expected)) and matcher.error == "" and len(made) == 2
    assert matcher.draft([], 4) == ([], False)


def test_a_compilation_that_is_stuck_ends_its_request_and_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, gate, compiled = Grammars(DEMO, EOS, VOCAB, compile_s=0.05), threading.Event(), Grammars._compiled

    def stuck(self: Grammars, one: Arrived) -> GrammarMatcher | Failed:
        if one.request.uid.startswith("stuck"):
            gate.wait(30)
        return compiled(self, one)

    monkeypatch.setattr(Grammars, "_compiled", stuck)
    (a,) = LLTokenizer(str(DEMO / "tokenizer.json"), VOCAB, list(EOS)).tokenize_str("a")
    for one in (arrived("stuck", LETTERS), arrived("stuck begun", LETTERS, [a]), arrived("good", LETTERS)):
        grammars.begin(one)
    found = ready(grammars, 2)
    failed = found["stuck"]
    assert isinstance(failed, Failed) and failed.code == "grammar_too_complex" and "0.05 s" in failed.message
    assert failed.param == "regex"
    assert isinstance(found["good"], GrammarMatcher)
    assert len(grammars) == 1, "a request with tokens waits"
    gate.set()
    assert isinstance(ready(grammars)["stuck begun"], GrammarMatcher)
    grammars.begin(arrived("next", LETTERS))
    assert list(ready(grammars)) == ["next"], "what was stuck is not told twice"
    grammars.close()


def test_a_request_that_ended_meanwhile_is_not_ready(grammars: Grammars) -> None:
    grammars.begin(arrived("gone", LETTERS))
    assert grammars.drop("gone") and not grammars.drop("gone")
    grammars.begin(arrived("here", LETTERS))
    assert list(ready(grammars)) == ["here"]


def test_a_model_without_an_end_has_no_grammars() -> None:
    grammars = Grammars(DEMO, (), VOCAB)
    grammars.begin(arrived("a", LETTERS))
    (failed,) = ready(grammars).values()
    assert isinstance(failed, Failed) and failed.status == 400 and "end-of-sequence" in failed.message
    grammars.close()


def test_a_tokenizer_may_have_tokens_that_the_model_does_not_have() -> None:
    grammars = Grammars(DEMO, EOS, 1046)
    matcher = matcher_of(grammars, LETTERS)
    assert tokens(matcher, 1046) == [token for token in tokens(matcher, 1052) if token < 1046] != []
    grammars.close()


def test_tokens_are_spelled_as_llguidance_spells_them(tokenizer: LLTokenizer, grammars: Grammars) -> None:
    ours = grammars._vocabulary()
    assert (ours.vocab_size, ours.eos_tokens) == (VOCAB, list(EOS))
    for token in range(1052):
        assert ours.decode_bytes([token]) == tokenizer.decode_bytes([token])
        assert ours.is_special_token(token) == tokenizer.is_special_token(token)


def test_pieces_of_sentencepiece_stand_for_their_text(tmp_path: Path) -> None:
    """A space is a piece's first character there, and bytes have names."""
    pieces = ["</s>", "<0x61>", "▁a", "a", "▁", "▁b"]
    model = {"type": "Unigram", "vocab": [[piece, 0.0] for piece in pieces]}
    steps = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}]
    added = [{"id": 0, "content": "</s>", "special": True}]
    decoder = {"type": "Sequence", "decoders": steps}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "decoder": decoder, "added_tokens": added}))
    grammars = Grammars(tmp_path, (0,), 8)
    matcher = matcher_of(grammars, lark("start: /( a){2}/"))
    assert tokens(matcher, 8) == [2, 4]
    matcher.advance(4)
    assert tokens(matcher, 8) == [1, 3]
    grammars.close()


def test_a_token_that_only_the_tokenizer_config_adds_is_named_and_has_no_text(tmp_path: Path) -> None:
    model = {"type": "Unigram", "vocab": [[piece, 0.0] for piece in ("</s>", "a", "b")]}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    added = {"3": {"content": "<tool>", "special": True}, "4": {"content": "ab"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    grammars = Grammars(tmp_path, (0,), 5)
    assert tokens(matcher_of(grammars, lark("start: <[3]>")), 5) == [3]
    assert tokens(matcher_of(grammars, lark("start: /[ab]{2}/")), 5) == [1, 2]
    grammars.close()


def test_a_tokenizer_that_cannot_be_read_fails_the_request_alone(tmp_path: Path) -> None:
    grammars = Grammars(tmp_path, EOS, VOCAB)
    for uid in "ab":
        grammars.begin(arrived(uid, LETTERS))
    assert {result.status for result in ready(grammars, 2).values() if isinstance(result, Failed)} == {500}
    grammars.close()


def test_the_tokenizer_is_read_before_the_first_grammar_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    grammars = Grammars(DEMO, EOS, VOCAB).started()
    eventually(lambda: grammars._tokenizer is not None, "it is read")
    monkeypatch.delattr(_Spelled, "of")
    matcher_of(grammars, LETTERS)
    grammars.close()


def test_a_request_that_waits_for_the_tokenizer_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, read = threading.Event(), Grammars._vocabulary

    def slow(self: Grammars) -> LLTokenizer:
        gate.wait(30)
        return read(self)

    monkeypatch.setattr(Grammars, "_vocabulary", slow)
    grammars = Grammars(DEMO, EOS, VOCAB, compile_s=0.01).started()
    grammars.begin(arrived("early", LETTERS))
    grammars.wait(0.05)
    assert grammars.ready() == []
    gate.set()
    assert isinstance(ready(grammars)["early"], GrammarMatcher)
    grammars.close()


def test_the_oldest_grammars_are_forgotten(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.generate.loop.grammars, "MOST_KEPT", 2)
    for number in (1, 2, 1, 3):
        matcher_of(grammars, lark(f"start: /a{{{number}}}/"))
    assert list(grammars._kept) == [lark(f"start: /a{{{number}}}/") for number in (1, 3)]
