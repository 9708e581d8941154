"""Turns what an answer must be into one grammar text, and checks it. Knows no vocabulary: the engine has the last word.

llguidance (https://github.com/guidance-ai/llguidance) refuses unknown keywords of a JSON schema, by name. Keywords that
bind a value are not dropped here either, except numbers that no grammar can count (`schemas.py`).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from pipeline.errors import RequestError
from pipeline.grammars import brief, is_limit, parser_limits
from pipeline.sampling import Constraint
from pipeline.vocabulary import AddedTokens
from stages.tokenize.constraints.schemas import place_of, reduced, why_overlapping

LARGEST_GRAMMAR_BYTES: Final = 64 << 10
TOO_LARGE: Final = f"its grammar has more than {LARGEST_GRAMMAR_BYTES} bytes"
WHITESPACE: Final = r"\n {0,16}| "
"""Whitespace between two tokens of JSON: a line break with an indentation, or one space. Without a bound, a model that
has nothing to say writes spaces until the end."""
LARGEST_GBNF_BYTES: Final = 16 << 10
"""The time to convert GBNF to Lark grows with the square of its size: this much takes a quarter of a second."""
MOST_OPERATORS: Final = 8
"""Largest number of `&` and `~` in a client's grammar. The number of states of an intersection is up to the product of
its parts', and llguidance counts only some of the work for them: 20 take seconds, but 8 take a hundredth of one."""
OPERATORS: Final = re.compile(
    r"""//[^\n]*|\#[^\n]*|"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|~[ \t]*(?=\d)|(?P<operator>[&~])""", re.DOTALL
)
"""Comments, texts, patterns, and the `~` of a repetition, in all of which the two signs mean something else."""
TEMPERATURE: Final = re.compile(r"^[ \t]*[!?]?\w+[ \t]*\[[^\]\n]*\btemperature\b", re.MULTILINE)
"""An attribute of a rule in Lark, which is for programs that ask a matcher for it."""
CHOSEN: Final = "CHOSEN"
"""Name of the terminal that is one of some texts."""
OPTIONS: Final = "x-guidance"
"""llguidance's own keyword: options of its compiler, which clients do not set."""
UNFORCED: Final = '%llguidance {"no_forcing": true}'
"""Lets the model choose the tokens also of a text that must come. Otherwise llguidance chooses them, which needs an
encoder, and minutes for `((a{100}){100}){100}`. Of several such lines in a grammar, the last one holds."""
SOURCE: Final = re.compile(r"^at \d+\(\d+\): |\n +\d+ \| .*|\n +\^(?=\n|$)")
"""Place of an error in the grammar, and the lines around it, in llguidance's message: clients do not know that text."""
COERCED: Final = "coerce_one_of"
"""llguidance's option for a `oneOf` whose members may overlap. Its error names it."""
UNKNOWN_KEYWORDS: Final = re.compile(r'Unimplemented keys: (\[(?:"[\w$]+"(?:, )?)+\])')
"""llguidance's list of keywords that it does not enforce."""


class TooComplex(ValueError):
    """A grammar exceeds a limit of work."""


def grammar_of(constraint: Constraint) -> str:
    """Return the grammar of an answer that must fulfil *constraint*. Needs a large stack (`with_stack`).

    Raises:
        RequestError: It cannot be enforced, it allows no answer, or its grammar is too large.
    """
    if constraint.whitespace:
        pattern = Constraint(kind="regex", text=constraint.whitespace, param=constraint.whitespace_param)
        made(lambda: checked(rules_of(pattern)), "invalid_grammar", pattern.param or constraint.param)
    code = "unsupported_schema" if constraint.kind == "json" else "invalid_grammar"
    return made(
        lambda: answered(checked(rules_of(constraint), schema_of(constraint)), byte_tokens()), code, constraint.param
    )


def made(make: Callable[[], str], code: str, param: str) -> str:
    """Return the grammar that *make* returns.

    Raises:
        RequestError: *make* raised one, or any other error, which becomes one with *code*, about the field *param*.
    """
    try:
        return make()
    except RequestError:
        raise
    except MemoryError as error:
        raise too_complex(param, "its check takes too much memory") from error
    except TooComplex as error:
        raise too_complex(param, f"{error}") from error
    except RecursionError as error:
        raise refusal(code, param, "it is nested too deeply") from error
    except Exception as error:  # the converter of GBNF raises its own and plain ones
        raise refusal(code, param, f"{error}") from error


def rules_of(constraint: Constraint) -> str:
    """Return *constraint* as rules in Lark; raise any error that says why that is impossible."""
    if constraint.kind != "json" and len(constraint.text.encode()) > LARGEST_GRAMMAR_BYTES:
        raise ValueError(TOO_LARGE)
    return _MAKERS[constraint.kind](constraint)


def schema_of(constraint: Constraint) -> dict[str, Any] | None:
    """Return the JSON schema of a constraint; None: it has none."""
    return orjson.loads(constraint.text) if constraint.kind == "json" else None


def checked(rules: str, schema: Mapping[str, Any] | None = None) -> str:
    """Return the grammar of some rules in Lark, or of several grammars in llguidance's JSON.

    *schema*: the source of the rules, in which errors name the place.

    Raises:
        ValueError: The grammar is too large, or llguidance refuses it.
    """
    grammar = rules if rules.startswith("{") else f"{rules}\n{UNFORCED}\n"
    if len(grammar.encode()) > LARGEST_GRAMMAR_BYTES:
        raise ValueError(TOO_LARGE)
    if wrong := _what_is_wrong(grammar, schema or {}):
        raise ValueError(wrong)
    return grammar


def answered(grammar: str, tokens: LLTokenizer) -> str:
    """Return a grammar if its answers have characters. Compile it as engines do, over *tokens*: the work is the same.

    Other errors of a grammar that names the model's own tokens are left to the engine.

    Raises:
        ValueError: It takes too much work, or allows nothing but the empty text.
    """
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=parser_limits())
    may_follow = 0
    if not matcher.is_error():
        may_follow = int.from_bytes(matcher.compute_bitmask(), "little") & ~(1 << tokens.eos_token)
    if matcher.is_error():
        if is_limit(reason := matcher.get_error()):
            raise TooComplex(brief(reason))
        return grammar
    if not may_follow and matcher.is_accepting():
        raise ValueError("it allows nothing but the empty text")
    return grammar


@functools.cache
def byte_tokens() -> LLTokenizer:
    """Return a vocabulary in which each byte is a token."""
    return LLTokenizer("byte")


def tokens_of(added: AddedTokens) -> LLTokenizer:
    """Return a vocabulary of the *added* tokens of a model, by their ids, and of the bytes after them."""
    return _tokens_of(tuple(added.ids.items()), added.special)


@functools.lru_cache(maxsize=1)  # a process has one model
def _tokens_of(added: tuple[tuple[str, int], ...], special: frozenset[int]) -> LLTokenizer:
    first = 1 + max((token for _, token in added), default=-1)
    tokens = [b""] * first + [bytes([byte]) for byte in range(256)] + [b"\xff<end>"]
    for text, token in added:
        tokens[token] = b"\xff" + text.encode()  # not valid text: a grammar must name the token
    end = len(tokens) - 1
    return LLTokenizer(_Tokens(tokens, end, [*special, end]), None, [end])  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The bytes of each token in llguidance's format (`TokenizerWrapper`)."""

    tokens: list[bytes]
    eos_token_id: int
    special_token_ids: list[int]
    bos_token_id: None = None
    is_tokenizer_wrapper: bool = True

    def __call__(self, text: str) -> list[int]:
        raise AssertionError("nothing is encoded (no_forcing)")


def refusal(code: str, param: str, reason: str) -> RequestError:
    """Return the error for a field from which no grammar can be made."""
    told = " ".join(reason.split())[:500]
    return RequestError(f"{param}: cannot be enforced: {told}", code=code, param=param)


def too_complex(param: str, reason: str) -> RequestError:
    """Return the error for a field whose grammar takes too much work."""
    told = " ".join(reason.split())[:300]
    message = f"{param}: its grammar is too complex: {told}; ask for less repetition, depth or choice."
    return RequestError(message, code="grammar_too_complex", param=param)


def _what_is_wrong(grammar: str, schema: Mapping[str, Any]) -> str:
    """Return why llguidance refuses a grammar; empty if it does not. Its warnings are about vocabularies."""
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    if not is_wrong:
        return ""
    if unknown := UNKNOWN_KEYWORDS.search(messages[0]):
        names = sorted(json.loads(unknown[1]))
        place, several = place_of(reduced(schema), names), len(names) > 1
        told = f"the keyword{'s' * several} {', '.join(f'`{name}`' for name in names)}{place and f' in `{place}`'}"
        return f"{told} {'are' if several else 'is'} not supported; remove {'them' if several else 'it'}"
    if COERCED in messages[0] and (why := why_overlapping(schema)):  # clients do not set options
        return f"{why}; use anyOf, or let its members exclude each other"
    told = SOURCE.sub("", messages[0]).partition(f" Enable '{COERCED}'")[0]
    return told.removeprefix("failed to compile JSON schema: ")


def _of_schema(constraint: Constraint) -> str:
    space = WHITESPACE if constraint.whitespace is None else constraint.whitespace
    return f"start: {json_of(reduced(orjson.loads(constraint.text)), space)}"


def _of_pattern(constraint: Constraint) -> str:
    (grammar,) = orjson.loads(LLMatcher.grammar_from_regex(constraint.text))["grammars"]
    return str(grammar["lark_grammar"])


def _of_choice(constraint: Constraint) -> str:
    """Return a rule with one terminal, because a rule has at most 2,000 alternatives."""
    return f"start: {CHOSEN}\n{CHOSEN}: {choices_of(constraint)}"


def choices_of(constraint: Constraint) -> str:
    """Return the body of a terminal that is one of some texts."""
    return " | ".join(map(json.dumps, orjson.loads(constraint.text)))


def _of_grammar(constraint: Constraint) -> str:
    text = constraint.text
    operators = sum(found["operator"] is not None for found in OPERATORS.finditer(text))
    if operators > MOST_OPERATORS:
        raise TooComplex(f"it has {operators} operators `&` and `~`, and at most {MOST_OPERATORS} are accepted")
    if not is_lark_syntax(text):
        if len(text.encode()) > LARGEST_GBNF_BYTES:
            raise ValueError(f"a grammar in GBNF has at most {LARGEST_GBNF_BYTES} bytes; write a larger one in Lark")
        return str(gbnf_to_lark(text))
    if TEMPERATURE.search(text):
        raise ValueError("the attribute temperature of a rule has no effect here; use the field temperature")
    return text


_MAKERS: Final[Mapping[str, Callable[[Constraint], str]]] = {
    "json": _of_schema,
    "regex": _of_pattern,
    "choice": _of_choice,
    "grammar": _of_grammar,
}


def json_of(schema: Mapping[str, Any], whitespace: str | None = None) -> str:
    """Return the item of a rule that is JSON by *schema*, a reduced one, with this *whitespace* between tokens.

    None: one space after commas and colons only, as chat templates write the calls that models learn from. A model that
    may write anything else there often does, if it has something else in mind than the schema.
    """
    spaced = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    options = spaced if whitespace is None else {"whitespace_pattern": whitespace}
    return f"%json {orjson.dumps({**schema, OPTIONS: options}).decode()}"
