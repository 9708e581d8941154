"""The fields that say what an answer must be: those of OpenAI, vLLM, SGLang and llama.cpp. At most one may say it.

They check shapes. Whether a schema or a grammar can be enforced, the tokenizer finds out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError, from_json

from pipeline.events import Constraint
from web.wire import fields
from web.wire.openai.bulk import MOST_LARGE, bulk_of
from web.wire.openai.held import HeldSchema, held
from web.wire.openai.strict import Strict, refuse_unsupported, wrong

LARGEST_BYTES: Final = 64 << 10
MOST_CHOICES: Final = 4096
ANY_OBJECT: Final = '{"type":"object"}'
EXAMPLE_FORMAT: Final = {
    "type": "json_schema",
    "json_schema": {"name": "place", "schema": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
"""What /openapi.json and the playground show."""


def _bounded(text: str) -> str:
    if len(text.encode()) > LARGEST_BYTES:
        raise PydanticCustomError("too_large", "Input should have at most {most} bytes", {"most": LARGEST_BYTES})
    return text


def _schema(schema: object) -> HeldSchema:
    """Return a schema, which comes as an object or as its JSON."""
    if isinstance(schema, str):
        text = schema.encode()
        if sum(bulk_of(text)) > MOST_LARGE:
            raise PydanticCustomError("too_large", "Input should have at most {most} values", {"most": MOST_LARGE})
        with contextlib.suppress(ValueError):
            schema = from_json(text)
    if isinstance(schema, dict):
        return held(schema)
    raise PydanticCustomError("json_schema", "Input should be a JSON schema: an object, or its JSON as text")


Schema = Annotated[
    Any,
    AfterValidator(_schema),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}], "title": "JSON schema"}),
]
"""Becomes a HeldSchema."""
Pattern = Annotated[str, Field(min_length=1), AfterValidator(_bounded)]
Whitespace = Annotated[str, Field(max_length=256)]
Choices = Annotated[list[Pattern], Field(fail_fast=True, min_length=1, max_length=MOST_CHOICES)]


class NamedSchema(Strict):
    """OpenAI's `json_schema`."""

    schema_: Annotated[Schema, Field(alias="schema")]
    """The schema that the answer follows."""
    name: str | None = None
    """Name of the schema. Changes nothing."""
    description: str | None = None
    """What the schema is for. Changes nothing."""
    strict: bool | None = None
    """Changes nothing: a schema is always enforced."""


class ResponseFormat(Strict):
    """OpenAI's field for structured output."""

    type: Literal["text", "json_object", "json_schema", "json"]
    """`text`: any answer. `json_object`: a JSON object. `json_schema`: JSON of a schema, and so is TGI's `json`."""
    json_schema: NamedSchema | None = None
    """The schema of `json_schema`."""
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    """llama.cpp's member: the schema of a `json_object`."""
    value: Schema | None = None
    """TGI's member: the schema of a `json`, or of a `json_object`, as huggingface_hub sends it."""


class StructuredOutputs(Strict):
    """vLLM's field for structured output. One of the first five members says what the answer must be."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    """JSON that this schema allows."""
    regex: Pattern | None = None
    """A text that this regular expression matches."""
    choice: Choices | None = None
    """One of these texts."""
    grammar: Pattern | None = None
    """A text of this grammar, in GBNF or Lark."""
    json_object: bool | None = None
    """A JSON object."""
    whitespace_pattern: Whitespace | None = None
    """Pattern of the whitespace between tokens of JSON. Empty: none."""


_REFUSED_MEMBERS: Final = fields.refused(
    "structured_outputs", [info.alias or name for name, info in StructuredOutputs.model_fields.items()]
)


class ConstraintFields(Strict):
    """What all bodies that generate have."""

    response_format: Annotated[ResponseFormat | None, Field(examples=[EXAMPLE_FORMAT])] = None
    """The answer is a JSON object, or JSON that the schema in `json_schema` allows, whatever `strict` says."""
    structured_outputs: Annotated[StructuredOutputs | None, Field(examples=[{"choice": ["yes", "no"]}])] = None
    """The answer is JSON of a schema (`json`), a text of a pattern or a grammar, or one of some texts (`choice`), as
    in vLLM. `whitespace_pattern` sets the whitespace of JSON."""
    guided_json: Schema | None = None
    """vLLM's older name of `structured_outputs.json`."""
    guided_regex: Pattern | None = None
    """vLLM's older name of `structured_outputs.regex`."""
    guided_choice: Choices | None = None
    """vLLM's older name of `structured_outputs.choice`."""
    guided_grammar: Pattern | None = None
    """vLLM's older name of `structured_outputs.grammar`."""
    guided_whitespace_pattern: Whitespace | None = None
    """Pattern of the whitespace between tokens of JSON, for all fields but `structured_outputs`. Empty: none."""
    json_schema: Schema | None = None
    """SGLang's and llama.cpp's name of `structured_outputs.json`."""
    regex: Pattern | None = None
    """SGLang's name of `structured_outputs.regex`."""
    ebnf: Pattern | None = None
    """SGLang's name of `structured_outputs.grammar`."""
    grammar: Annotated[str, AfterValidator(_bounded)] | None = None
    """llama.cpp's name of `structured_outputs.grammar`. Empty: none."""

    def constraint(self, path: str = "") -> Constraint | None:
        """Return what the answer must be; None: anything. Errors put *path* before names.

        Raises:
            RequestError: The fields do not go together.
        """
        found = list(self._constraints(path))
        if len(found) > 1:
            first, second = found[0].param, found[1].param
            raise wrong(second, f"not together with `{first}`; an answer can have one constraint")
        outputs = self.structured_outputs
        of_outputs = None if outputs is None else outputs.whitespace_pattern
        param = path + ("guided_whitespace_pattern" if of_outputs is None else "structured_outputs.whitespace_pattern")
        whitespace = self.guided_whitespace_pattern if of_outputs is None else of_outputs
        if whitespace is None:
            return found[0] if found else None
        if self.guided_whitespace_pattern is not None and outputs is not None:
            raise wrong(param, "not together with `structured_outputs`, which has its own")
        if not found or found[0].kind != "json":
            raise wrong(param, "only allowed with a JSON schema")
        return found[0].model_copy(update={"whitespace": whitespace, "whitespace_param": param})

    @property
    def unknown_members(self) -> set[str]:
        """The unknown fields within the fields of this class."""
        names: set[str] = set()
        if self.structured_outputs is not None:
            extra = set(self.structured_outputs.extra) - set(_REFUSED_MEMBERS)
            names |= {f"structured_outputs.{name}" for name in extra}
        if self.response_format is not None:
            names |= {f"response_format.{name}" for name in self.response_format.extra}
            schema = self.response_format.json_schema
            names |= {f"response_format.json_schema.{name}" for name in ({} if schema is None else schema.extra)}
        return names

    def ignored_keywords(self, path: str = "") -> Iterator[str]:
        """Yield where schemas have keywords whose numbers no grammar can count, with *path* before names."""
        schemas = {"guided_json": self.guided_json, "json_schema": self.json_schema}
        if (asked := self.response_format) is not None:
            schemas["response_format.schema"] = asked.schema_
            schemas["response_format.value"] = asked.value
            schemas["response_format.json_schema.schema"] = asked.json_schema.schema_ if asked.json_schema else None
        if self.structured_outputs is not None:
            schemas["structured_outputs.json"] = self.structured_outputs.json_
        for name, schema in schemas.items():
            yield from (f"{path}{name}.{keyword}" for keyword in (schema.ignored if schema is not None else ()))

    def _constraints(self, path: str) -> Iterator[Constraint]:
        """Yield the constraint of each field that is set."""
        if self.response_format is not None:
            yield from _of_format(self.response_format, path + "response_format")
        if self.structured_outputs is not None:
            yield from _of_outputs(self.structured_outputs, path + "structured_outputs")
        schemas = {"guided_json": self.guided_json, "json_schema": self.json_schema}
        for name, schema in schemas.items():
            if schema is not None:
                yield _json(schema, path + name)
        patterns = {"guided_regex": self.guided_regex, "regex": self.regex}
        grammars = {"guided_grammar": self.guided_grammar, "ebnf": self.ebnf, "grammar": self.grammar or None}
        for kind, given in (("regex", patterns), ("grammar", grammars)):
            for name, text in given.items():
                if text is not None:
                    yield Constraint(kind=kind, text=text, param=path + name)  # type: ignore[arg-type]
        if self.guided_choice is not None:
            yield _choice(self.guided_choice, path + "guided_choice")


def _of_format(asked: ResponseFormat, path: str) -> Iterator[Constraint]:
    if asked.type != "json_schema" and asked.json_schema is not None:
        raise wrong(f"{path}.json_schema", "only allowed with `type: json_schema`")
    if asked.type != "json_object" and asked.schema_ is not None:
        raise wrong(f"{path}.schema", "only allowed with `type: json_object`")
    if asked.type not in ("json", "json_object") and asked.value is not None:
        raise wrong(f"{path}.value", "only allowed with `type: json` or `json_object`")
    if asked.schema_ is not None and asked.value is not None:
        raise wrong(f"{path}.value", "the same as `schema`; send one of them")
    if asked.type == "json_schema":
        if asked.json_schema is None:
            raise wrong(f"{path}.json_schema", "missing; send an object with `name` and `schema`")
        yield _json(asked.json_schema.schema_, f"{path}.json_schema.schema")
    elif asked.schema_ is not None:
        yield _json(asked.schema_, f"{path}.schema")
    elif asked.value is not None:
        yield _json(asked.value, f"{path}.value")
    elif asked.type == "json":
        raise wrong(f"{path}.value", "missing; send the schema")
    elif asked.type == "json_object":
        yield Constraint(kind="json", text=ANY_OBJECT, param=f"{path}.type")


def _of_outputs(asked: StructuredOutputs, path: str) -> Iterator[Constraint]:
    refuse_unsupported(asked.extra, _REFUSED_MEMBERS, f"{path}.")
    found: list[Constraint] = []
    if asked.json_ is not None:
        found.append(_json(asked.json_, f"{path}.json"))
    if asked.regex is not None:
        found.append(Constraint(kind="regex", text=asked.regex, param=f"{path}.regex"))
    if asked.choice is not None:
        found.append(_choice(asked.choice, f"{path}.choice"))
    if asked.grammar is not None:
        found.append(Constraint(kind="grammar", text=asked.grammar, param=f"{path}.grammar"))
    if asked.json_object:
        found.append(Constraint(kind="json", text=ANY_OBJECT, param=f"{path}.json_object"))
    if not found:
        raise wrong(path, "send one of `json`, `regex`, `choice`, `grammar` and `json_object`")
    yield from found


def _json(schema: HeldSchema, param: str) -> Constraint:
    return Constraint(kind="json", text=orjson.dumps(schema.value).decode(), param=param)


def _choice(choices: list[str], param: str) -> Constraint:
    return Constraint(kind="choice", text=orjson.dumps(choices).decode(), param=param)


def constraint_fields(constraint: Constraint | None, path: str = "") -> dict[str, Any]:
    """Return the fields from which *constraint* came: the inverse of `ConstraintFields.constraint`."""
    if constraint is None:
        return {}
    name = constraint.param.removeprefix(path)
    is_parsed = constraint.kind in ("json", "choice")
    value: Any = orjson.loads(constraint.text) if is_parsed else constraint.text
    body: dict[str, Any]
    match name.split("."):
        case ["response_format", "type"]:
            body = {"response_format": {"type": "json_object"}}
        case ["response_format", "value"]:
            body = {"response_format": {"type": "json", "value": value}}
        case ["response_format", "schema"]:
            body = {"response_format": {"type": "json_object", "schema": value}}
        case ["response_format", *_]:
            body = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": value}}}
        case ["structured_outputs", "json_object"]:
            body = {"structured_outputs": {"json_object": True}}
        case ["structured_outputs", member]:
            body = {"structured_outputs": {member: value}}
        case _:
            body = {name: value}
    if constraint.whitespace is None:
        return body
    if "structured_outputs" in body:
        body["structured_outputs"]["whitespace_pattern"] = constraint.whitespace
        return body
    return body | {"guided_whitespace_pattern": constraint.whitespace}
