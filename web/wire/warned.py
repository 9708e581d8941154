"""What is strange about a request that is taken all the same, for a response header. Knows nothing of HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final
from urllib.parse import quote

from pydantic_core import from_json

from pipeline.events import Submitted
from web.wire.fields import MOST_SHOWN

HEADER: Final = "x-minisgl-warnings"
LONGEST_PLACE: Final = 128
"""Most characters of a place in a schema that a warning names."""


def warnings_of(events: Sequence[Submitted], bos: str, ignored: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the first warnings about the requests of one body, as `<code>=<field>`.

    *bos*: the text of the token that the tokenizer puts before a prompt; "" if it puts none. *ignored*: the keywords of
    schemas whose numbers no grammar can count.
    """
    found = [f"invalid_arguments={path}" for path in islice(_invalid_arguments(events[0]), MOST_SHOWN)]
    if any(_begins_twice(event, bos) for event in events):
        found.append("double_bos=prompt")
    found += [f"ignored_keyword={quote(place, safe='$[]')[:LONGEST_PLACE]}" for place in ignored[:MOST_SHOWN]]
    return tuple(found[:MOST_SHOWN])


def _invalid_arguments(event: Submitted) -> Iterator[str]:
    """Yield the path of each tool call whose arguments are no JSON object. No arguments are an empty object."""
    for place, message in enumerate(event.messages):
        for number, call in enumerate(message.get("tool_calls", ())):
            text = call["function"]["arguments"]
            if text and not _is_object(text):
                yield f"messages.{place}.tool_calls.{number}.function.arguments"


def _is_object(text: str) -> bool:
    try:
        return isinstance(from_json(text, allow_inf_nan=False), dict)
    except ValueError:
        return False


def _begins_twice(event: Submitted, bos: str) -> bool:
    """Return whether a prompt begins with the text of the token that the tokenizer puts before it."""
    return bool(bos) and event.add_special_tokens is not False and event.prompt.startswith(bos)
