"""What an answer must be, as its client said it: a value that the first event of a request holds."""

from __future__ import annotations

from typing import Literal

from pipeline.sampling import Value


class Constraint(Value):
    """One of the four things that an answer can be bound to. The tokenizer makes a grammar of it."""

    kind: Literal["json", "regex", "choice", "grammar"]
    text: str
    """A JSON schema, a regular expression, a JSON list of texts, or a grammar in GBNF or Lark."""
    whitespace: str | None = None
    """Of a JSON schema: the pattern of whitespace between tokens of JSON; None: our own."""
    param: str
    """The field of the request that holds it."""
    whitespace_param: str = ""
    """The field that holds `whitespace`."""
