"""What all request bodies share: strict types, unsupported fields with their neutral values, and errors that name a
field but never repeat its value.
"""

from __future__ import annotations

import math
from codecs import BOM_UTF8
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import orjson
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails, PydanticCustomError

from pipeline.errors import RequestError
from pipeline.grammars import numbers_in
from web.wire.fields import Field
from web.wire.openai.bulk import MOST_LARGE, refuse_bulk

INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1
NAMED_BY_CLIENTS: Final = ("metadata", "logit_bias", "chat_template_kwargs", "parameters")
"""Objects whose keys the client chose: an error's message quotes the key, and `param`, which is logged, does not."""
LONGEST_QUOTED: Final = 64
"""Most characters of such a key that a message quotes."""


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE: Final = BeforeValidator(_whole)
"""Takes 5.0 for 5, as JSON Schema does."""


class Strict(BaseModel):
    """No "3" for 3 and no "yes" for true; NaN and infinities are refused."""

    model_config = ConfigDict(
        strict=True, extra="allow", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @property
    def extra(self) -> Mapping[str, Any]:
        """The fields that are not declared."""
        return self.model_extra or {}

    @property
    def ignored(self) -> tuple[str, ...]:
        """Where its schemas have keywords whose numbers no grammar can count: the first ones, sorted."""
        return ()

    @property
    def left_out(self) -> tuple[str, ...]:
        """What of it the model does not get: the first parts, sorted."""
        return ()


Body = TypeVar("Body", bound=Strict)


def parsed(model: type[Body], body: bytes, *, most_large: int = MOST_LARGE) -> Body:
    """Return the *model* that *body* holds, with at most so many texts, objects and lists.

    Raises:
        RequestError: The first thing that is wrong. It names the field, not the value.
    """
    body = body.removeprefix(BOM_UTF8)
    refuse_bulk(body, most_large)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise refusal(first_of(error)) from None


def first_of(error: ValidationError) -> ErrorDetails:
    """Return the first problem. Each takes 5 us, but there are few: lists have `fail_fast`, and objects `at_most`."""
    return error.errors(include_url=False, include_context=False, include_input=False)[0]


def at_most(most: int) -> BeforeValidator:
    """Return a validator of objects and texts: it refuses more than *most* members or characters, and looks at none."""

    def check(value: object) -> object:
        if isinstance(value, dict | str) and len(value) > most:
            message = "Input should have at most {most} {what}, not {num}"
            what = "characters" if isinstance(value, str) else "members"
            raise PydanticCustomError("too_long", message, {"most": most, "num": len(value), "what": what})
        return value

    return BeforeValidator(check)


def text_or_list(of: str, most: int) -> AfterValidator:
    """Return a validator of a text, or a list of at most so many blocks, items or the like; it looks at none."""

    def check(value: object) -> object:
        if not isinstance(value, str | list):
            raise PydanticCustomError("text_or_list", "Input should be a string or a list of {of}", {"of": of})
        if isinstance(value, list) and len(value) > most:
            message = "Input should have at most {most} {of}, not {num}"
            raise PydanticCustomError("too_long", message, {"most": most, "of": of, "num": len(value)})
        return value

    return AfterValidator(check)


TEXT_OR_LIST: Final = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array"}]})


def kept_exactly(value: object) -> object:
    """Refuse any number within *value* that JSON in the log cannot hold: an integer of more than 64 bits (which bounds
    on `int` alone would turn into a float), NaN and the infinities, which `Any` lets through."""
    for one in numbers_in(value):
        if isinstance(one, int) and not -INT64_MAX - 1 <= one <= INT64_MAX:
            raise PydanticCustomError("int64", "Input should be a whole number of at most 64 bits")
        if isinstance(one, float) and not math.isfinite(one):
            raise PydanticCustomError("finite_number", "Input should be a finite number")
    return value


def refuse_unsupported(extra: Mapping[str, Any], table: Mapping[str, Field], path: str) -> None:
    """Refuse the fields that *table* names, unless their value is neutral. Errors put *path* before the name.

    Raises:
        RequestError: For the first such field.
    """
    for name, value in extra.items():
        field = table.get(name)
        if field is None or value is None or any(_same(value, neutral) for neutral in field.neutral):
            continue
        accepted = "".join(f" or send {orjson.dumps(neutral).decode()}" for neutral in field.neutral)
        instead = f", or use {field.instead}" if field.instead else ""
        raise RequestError(
            f"{path}{name} is not supported with this value; leave it out{accepted}{instead}",
            code="unsupported_parameter",
            param=f"{path}{name}",
        )


def wrong(param: str, message: str) -> RequestError:
    """Return the error for a field whose value is wrong, or does not go together with another field."""
    return RequestError(f"{param}: {message}", param=param, code="invalid_value")


def _same(value: object, neutral: object) -> bool:
    """Compare as JSON does: 1 is 1.0, but true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def refusal(first: ErrorDetails) -> RequestError:
    """Return the error for the first problem that pydantic found."""
    if first["type"] == "json_invalid":
        return RequestError(f"The body is not JSON that we can read: {first['msg']}", code="invalid_json")
    if not first["loc"]:
        return RequestError("The body should be a JSON object", code="invalid_json")
    path: list[str] = []
    quoted = ""
    for place, part in enumerate(first["loc"]):  # up to a key that the client chose, and without the tags of unions
        if not str(part).startswith("<"):
            path.append(str(part))
        if part in NAMED_BY_CLIENTS:
            keys = first["loc"][place + 1 : place + 2]
            quoted = "".join(f" at {orjson.dumps(str(key)[:LONGEST_QUOTED]).decode()}" for key in keys)
            break
    param = ".".join(path)
    return RequestError(f"{param}{quoted}: {first['msg']}", param=param, code="invalid_value")
