"""Finds where a text may be cut, so that the tokens of its parts, one after the other, are those of the whole.

The library takes up to 330 bytes of memory for each byte that it encodes at once. So a long text is encoded in parts. A
border lies after a letter or a digit, where each step of the tokenizer does the same with both parts as with the whole:

- No added token has the two characters, or looks across the border for its spaces or the end of its word.
- The normalizer changes each character alone, or composes none across the border.
- No pattern of the pre-tokenizer takes both characters in one match (`patterns.py`).
- A word ends at the border, or the model never joins the two characters: it is a BPE, and no token has them in a row.

If a step of the tokenizer is not known here, or no border is found, the text is encoded as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, pairwise
from string import ascii_lowercase
from typing import Any, Final

import orjson
from tokenizers import Tokenizer, models, normalizers

from stages.tokenize.patterns import Pattern, UnknownPattern, literal

PART: Final = 16 << 10
"""Approximate number of characters of a part."""
NEAR: Final = 512
"""Number of characters before the end of a part in which a border is searched. Without one there, the part is as long
again: to search everywhere could take seconds."""
AFTER: Final = " \n\t\r0123456789.,;:!?'\"()[]{}/\\|-_+*&%$#@~^`。，、！？；：（）「」『』《》“”"
"""Characters after a border. A mark after one of them does not make another character of both, as it does of `=`."""
BEFORE: Final = r"[^\W_\u1100-\u11ff\U00010000-\U0010ffff]"
"""A letter or a digit that is not composed with the one before: the parts of Korean syllables may be."""
PAIRS_KNOWN: Final = 8192
GPT_2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of ByteLevel."""
SPACES: Final = " \n\t\r"
ONE_BY_ONE: Final = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents")
"""Normalizers that change the text on both sides of a border as they change each side alone."""

State = Mapping[str, Any]
Normalize = Callable[[str, str], str | None]
"""(left, right) of a border -> the second character, normalized; None: this is not a border."""
Split = Callable[[str, str], bool | None]
"""(left, right) of a border -> whether a word ends there; None: this is not a border."""


class UnknownStep(ValueError):
    """The tokenizer has a step that this module does not know."""


class Borders:
    """Borders in the texts of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raise UnknownStep or UnknownPattern if a step of *tokenizer* is not known here."""
        steps = _flat(tokenizer.normalizer, "normalizers")
        self._drops_space = _prepends(steps)
        """Whether each part gets a space in front. Then a part begins after its own space."""
        self._normalize = [_normalize_of(step) for step in (steps[1:] if self._drops_space else steps)]
        self._splits = _splits_of(_flat(tokenizer.pre_tokenizer, "pretokenizers"))
        self._added = _Added(tokenizer, must_be_plain=self._drops_space)
        self._joins = _joins_of(tokenizer)
        self._is_border = lru_cache(PAIRS_KNOWN)(self._judge)
        after = [right for right in AFTER if any(self._is_border(left, right) for left in ascii_lowercase)]
        if not after:
            raise UnknownStep("none of the model's")
        self._possible = re.compile(f"{BEFORE}(?=[{re.escape(''.join(after))}])")

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Borders | None:
        """Return the borders for a tokenizer; None: it must encode whole texts."""
        try:
            return cls(tokenizer)
        except (UnknownStep, UnknownPattern):
            return None

    def parts(self, text: str) -> Iterator[str]:
        """Yield the parts of a text."""
        begin = 0
        while end := self._next(text, begin):
            yield text[begin:end]
            begin = end + self._drops_space
        yield text[begin:]

    def _next(self, text: str, begin: int) -> int | None:
        """Return where the part ends that begins at *begin*; None: it is the last one."""
        for end in range(begin + PART, len(text), PART):
            for match in reversed([*self._possible.finditer(text, end - NEAR, end)]):
                if self._may_cut(text, match.end()):
                    return match.end()
        return None

    def _may_cut(self, text: str, place: int) -> bool:
        if self._drops_space and self._added.are_beside(text[place - 1], text[place + 1 : place + 2]):
            return False
        return self._is_border(text[place - 1], text[place])

    def _judge(self, left: str, right: str) -> bool:
        if self._drops_space and right != " ":
            return False
        if self._added.reach_across(left, right):
            return False
        normal = right
        for normalize in self._normalize:
            changed = normalize(left, normal)
            if changed is None or len(changed) != 1:
                return False
            normal = changed
        if self._added.reach_across(left, normal):
            return False
        ends_word = [split(left, normal) for split in self._splits]
        if None in ends_word:
            return False
        return any(ends_word) or self._joins.never(left, normal)


class _Added:
    """Added tokens, which are taken out of a text before anything else."""

    def __init__(self, tokenizer: Tokenizer, *, must_be_plain: bool) -> None:
        """*must_be_plain*: refuse normalized tokens, because what is normalized would begin with a space, too."""
        self._inside: set[str] = set()
        """Pairs of characters inside added tokens."""
        self._ends: set[str] = set()
        """Last characters of added tokens that look at the next character."""
        self._begins: set[str] = set()
        """First characters of added tokens that look at the character before."""
        self._firsts: set[str] = set()
        self._lasts: set[str] = set()
        for token in tokenizer.get_added_tokens_decoder().values():
            if must_be_plain and token.normalized:
                raise UnknownStep("an added token that is normalized")
            text = token.content
            is_changed = token.normalized and tokenizer.normalizer is not None
            normal = tokenizer.normalizer.normalize_str(text) if is_changed else text
            for spelled in filter(None, (text, normal)):
                self._inside.update(map("".join, pairwise(spelled)))
                self._firsts.add(spelled[0])
                self._lasts.add(spelled[-1])
                if token.rstrip or token.single_word:
                    self._ends.add(spelled[-1])
                if token.lstrip or token.single_word:
                    self._begins.add(spelled[0])

    def reach_across(self, left: str, right: str) -> bool:
        return left + right in self._inside or left in self._ends or right in self._begins

    def are_beside(self, left: str, right: str) -> bool:
        """Return whether an added token may end before a space, or begin after it, or take more spaces there."""
        return left in self._lasts or right in self._firsts or not right.isalnum()


class _Joins:
    """Pairs of characters that a model may join in one token."""

    def __init__(self, vocabulary: Iterable[str] = (), space: str = " ") -> None:
        """*space*: how the pre-tokenizer writes a space."""
        tokens = [*vocabulary]
        self._space = space
        self._pairs = set(re.findall(rf"(?=(.[{re.escape(AFTER)}▁{space}]))", "\0".join(tokens), re.DOTALL))
        self._alone = {token for token in tokens if len(token) == 1}

    def never(self, left: str, right: str) -> bool:
        """Return whether both characters are known and always stay in different tokens."""
        right = right.replace(" ", self._space)
        return left + right not in self._pairs and {left, right} <= self._alone


def _joins_of(tokenizer: Tokenizer) -> _Joins:
    """Return the pairs that a model may join. Only a BPE that makes each token by joining two others shows them."""
    model = tokenizer.model
    last: State = next(reversed(_flat(tokenizer.pre_tokenizer, "pretokenizers")), {"type": ""})
    if not isinstance(model, models.BPE) or last["type"] == "ByteLevel":
        return _Joins()
    if model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix or model.ignore_merges:
        return _Joins()
    return _Joins(tokenizer.get_vocab(with_added_tokens=False), last.get("replacement", " "))


def _flat(step: Any, name: str) -> list[State]:
    """Return the steps of a normalizer or a pre-tokenizer one by one; *name*: the field that a sequence has them in."""
    return list(_flattened(orjson.loads(step.__getstate__()), name)) if step is not None else []


def _flattened(state: State, name: str) -> Iterator[State]:
    if state["type"] == "Sequence":
        yield from chain.from_iterable(_flattened(each, name) for each in state[name])
    else:
        yield state


def _prepends(steps: Sequence[State]) -> bool:
    """Return whether a normalizer begins each text with its character for a space, as Llama 2's does."""
    if not steps or steps[0]["type"] != "Prepend":
        return False
    space = {"type": "Replace", "pattern": {"String": " "}, "content": steps[0]["prepend"]}
    if [*steps[1:]] != [space]:
        raise UnknownStep("Prepend")
    return True


def _normalize_of(step: State) -> Normalize:
    if step["type"] in ONE_BY_ONE:
        return partial(_one_by_one, getattr(normalizers, step["type"])())
    if step["type"] == "Replace":
        pattern = step["pattern"]
        if len(pattern.get("String", "")) == 1:
            return partial(_replace_one, pattern["String"], step["content"])
        return partial(_replace, _pattern_of(pattern))
    raise UnknownStep(step["type"])


def _one_by_one(normalizer: Any, left: str, right: str) -> str | None:
    return str(normalizer.normalize_str(right)) if normalizer.normalize_str(left) == left else None


def _replace_one(old: str, new: str, left: str, right: str) -> str | None:
    if left == old:
        return None
    return new if right == old else right


def _replace(pattern: Pattern, left: str, right: str) -> str | None:
    return None if pattern.can_take(left) or pattern.can_take(right) else right


def _splits_of(steps: Sequence[State]) -> list[Split]:
    if any(step["type"] in ("ByteLevel", "Metaspace") for step in steps[:-1]):
        raise UnknownStep("a step after one that writes other characters")
    return [split for step in steps for split in _split_of(step)]


def _split_of(step: State) -> Iterator[Split]:
    match step["type"]:
        case "Split":
            pattern = _pattern_of(step["pattern"])
            yield partial(_match_ends if step["behavior"] in ("Isolated", "Removed") else _between, pattern)
        case "ByteLevel":
            if step["add_prefix_space"]:
                yield partial(_only_before, " ")
            if step.get("use_regex", True):
                yield partial(_match_ends, Pattern(GPT_2))
        case "Metaspace":
            if step["prepend_scheme"] != "never":
                yield partial(_only_before, f" {step['replacement']}")
            if step.get("split", True):
                yield partial(_word_begins, f" {step['replacement']}")
        case "Whitespace":  # only the library knows what it takes for a letter
            yield partial(_only_before, SPACES)
            yield partial(_word_begins, SPACES)
        case "WhitespaceSplit":
            yield partial(_word_begins, SPACES)
        case "Digits":
            yield partial(_digits_end, step["individual_digits"])
        case unknown:
            raise UnknownStep(unknown)


def _pattern_of(pattern: State) -> Pattern:
    return Pattern(pattern["Regex"]) if "Regex" in pattern else literal(pattern["String"])


def _match_ends(pattern: Pattern, left: str, right: str) -> bool | None:
    """Return whether a word ends there: a match of *pattern* is a word, or parts two words."""
    return None if pattern.can_take_both(left, right) else pattern.takes_alone(left)


def _between(pattern: Pattern, left: str, right: str) -> bool | None:
    """Return False, or None if a match can have either character: it is joined with what is beside it."""
    return None if pattern.can_take(left) or pattern.can_take(right) else False


def _digits_end(one_by_one: bool, left: str, right: str) -> bool | None:
    """Return whether a word ends there. A character beyond ASCII may be a number for the library."""
    if right.isdigit() and not one_by_one:
        return True if left.isascii() and left.isalpha() else None
    return right.isdigit() or (left.isascii() and left.isdigit())


def _only_before(characters: str, left: str, right: str) -> bool | None:
    """Return False before *characters*. Another part would get a space in front, or its beginning is not known."""
    return False if right in characters else None


def _word_begins(characters: str, left: str, right: str) -> bool:
    return right in characters
