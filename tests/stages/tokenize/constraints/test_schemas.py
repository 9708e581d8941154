"""Which keywords of a JSON schema bind no value, which `oneOf` is an `anyOf`, and which numbers are counted."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, Field, TypeAdapter

from pipeline.errors import RequestError
from pipeline.grammars import parser_limits, with_stack
from pipeline.sampling import Constraint
from stages.tokenize.constraints.grammars import byte_tokens, grammar_of
from stages.tokenize.constraints.schemas import reduced, why_overlapping

TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def grammar(schema: Any) -> str:
    return with_stack(lambda: grammar_of(Constraint(kind="json", text=json.dumps(schema), param="field")))


def refused(schema: Any) -> str:
    with pytest.raises(RequestError) as raised:
        grammar(schema)
    assert raised.value.code == "unsupported_schema"
    return raised.value.message.removeprefix("field: cannot be enforced: ")


def accepts(schema: Any, value: Any) -> bool:
    tokens: LLTokenizer = byte_tokens()
    matcher = LLMatcher(tokens, grammar(schema), log_level=0, limits=parser_limits())
    text = list((value if isinstance(value, str) else json.dumps(value)).encode())
    return matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()


IDLE: list[dict[str, Any]] = [
    {"propertyNames": {"type": "string"}},
    {"propertyNames": {"$comment": "any", "type": ["string", "null"], "minLength": 0}},
    {"propertyNames": True},
    {"unevaluatedProperties": True},
    {"unevaluatedProperties": {"description": "anything"}, "unevaluatedItems": {}},
    {"uniqueItems": False, "not": False},
    {"minContains": 2, "maxContains": 3},
    {"contains": {"type": "string"}, "minContains": 0},
    {"if": {"required": ["a"]}},
    {"then": {"required": ["a"]}, "else": {"required": ["b"]}},
    {"if": {"required": ["a"]}, "then": {}, "else": {"title": "all else"}},
    {"dependencies": {}, "dependentRequired": {"a": []}, "dependentSchemas": {"a": True}},
    {"$dynamicAnchor": "node", "$vocabulary": {}, "contentSchema": {"not": {}}},
    {"nullable": False, "xml": {"name": "a"}, "externalDocs": {}, "example": 3, "discriminator": {"propertyName": "a"}},
    {"x-order": 3, "markdownDescription": "*a*", "deprecated": True, "readOnly": True, "writeOnly": False},
]


@pytest.mark.parametrize("idle", IDLE, ids=lambda idle: " ".join(idle))
def test_keywords_that_bind_no_value_are_left_out(idle: dict[str, Any]) -> None:
    nested = {"type": "object", "properties": {"a": TEXTS | idle, "b": {"type": "array", **idle}}} | idle
    plain = {"type": "object", "properties": {"a": TEXTS, "b": {"type": "array"}}}
    assert reduced(nested) == plain and grammar(nested) == grammar(plain)


BINDING: list[tuple[dict[str, Any], str]] = [
    ({"propertyNames": {"pattern": "^a", "maxLength": 3}}, "propertyNames"),
    ({"propertyNames": {"maxLength": True}}, "propertyNames"),
    ({"propertyNames": {"enum": ["a"]}, "properties": {"b": {}}}, "propertyNames"),
    ({"unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"uniqueItems": True}, "uniqueItems"),
    ({"contains": {}, "minContains": 0, "maxContains": 1}, "contains"),
    ({"if": {}, "then": False}, "if"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"not": {}}, "not"),
]


@pytest.mark.parametrize(("binding", "name"), BINDING, ids=[name for _, name in BINDING])
def test_a_keyword_that_cannot_be_enforced_is_named_with_its_place(binding: dict[str, Any], name: str) -> None:
    schema = {"$defs": {"unused": {"not": {}}, "node": {"type": ["object", "array"], **binding}}}
    told = refused(schema | {"type": "array", "items": {"$ref": "#/$defs/node"}})
    assert f"`{name}`" in told and " in `$defs.node` " in told and "remove" in told


def test_a_record_has_the_names_that_its_keys_allow() -> None:
    keys = {"type": "string", "enum": ["a", "b"]}
    record = {"type": "object", "propertyNames": keys, "additionalProperties": {"type": "integer"}, "required": ["a"]}
    assert accepts(record, {"a": 1, "b": 2}) and accepts(record, {"a": 1})
    assert not any(accepts(record, value) for value in ({"a": 1, "c": 2}, {"b": 2}, {"a": "1"}))
    patterned = {"type": "object", "propertyNames": {"pattern": "^x[0-9]$"}}
    assert accepts(patterned, {"x1": None, "x2": []}) and accepts(patterned, {})
    assert not accepts(patterned, {"x": None}) and not accepts(patterned, {"x12": None})
    single = {"type": "object", "propertyNames": {"const": "a"}}
    assert accepts(single, {"a": 1}) and not accepts(single, {"b": 1})


def test_a_record_has_names_of_the_lengths_that_its_keys_allow() -> None:
    keys = {"type": "string", "minLength": 1, "maxLength": 4.0}  # zod: z.record(z.string().min(1).max(4), z.int())
    record = {"type": "object", "propertyNames": keys, "additionalProperties": {"type": "integer"}}
    names = ("a", 'é"\n\u0001', "😀字😀字", "", "abcde", "😀字😀字😀")
    taken = [accepts(record, json.dumps({name: 1}, ensure_ascii=False)) for name in names]
    assert taken == [True, True, True, False, False, False]
    assert accepts(record, {"a": 1, "b": 2}) and accepts(record, {}) and not accepts(record, {"a": "1"})
    assert accepts({"type": "object", "propertyNames": {"minLength": 2}}, {"abcde": 1})


def test_names_of_properties_and_values_are_no_keywords() -> None:
    schema = {
        "type": "object",
        "properties": {"title": {"const": {"title": "a", "uniqueItems": False}}, "default": {"type": "null"}},
        "required": ["title", "default"],
        "additionalProperties": False,
    }
    assert reduced(schema) == schema
    assert accepts(schema, {"title": {"title": "a", "uniqueItems": False}, "default": None})


def test_definitions_are_left_out_unless_a_reference_may_lead_there() -> None:
    node = {"type": "integer", "description": "a number"}
    bare = {"type": "integer"}
    root = {"$defs": {"a~b c": node, "other": node}, "components": {"schemas": {"x": node, "y": node}}, "later": node}
    pointed = {"anyOf": [{"$ref": "#/$defs/a~0b%20c"}, {"$ref": "#/components/schemas/x"}]}
    assert reduced(root | pointed) == {
        "$defs": {"a~b c": bare},
        "components": {"schemas": {"x": bare}},
        **pointed,
    }
    anchored = reduced(root | {"$ref": "#an-anchor"})
    assert anchored == {"$defs": {"a~b c": bare, "other": bare}, "$ref": "#an-anchor"}
    assert reduced(root | {"$ref": "#/later"})["later"] == node


def test_descriptions_do_not_count_toward_the_size_of_a_grammar() -> None:
    told = {"type": "string", "title": "t" * 500, "description": "d" * 50_000, "examples": ["e" * 50_000]}
    schema = {"type": "object", "properties": {"a": told, "b": told | {"default": "f" * 50_000}}}
    assert len(grammar(schema)) < 500
    assert "65536" in refused({"enum": ["v" * 40_000, "w" * 40_000]})


class Cat(BaseModel):
    """Has a tag that is not required, because it has a default."""

    kind: Literal["cat"] = "cat"
    meows: int


class Dog(BaseModel):
    kind: Literal["dog", "wolf"] = "dog"
    friends: list[Pet] = []


class Fish(BaseModel):
    kind: Literal["fish"]


Pet = Annotated[Cat | Dog | Fish, Field(discriminator="kind")]


class Owner(BaseModel):
    pet: Pet
    other: Pet | None = None


def test_a_tagged_union_of_pydantic_is_followed_and_its_tag_is_always_written() -> None:
    schema = Owner.model_json_schema()
    assert "required" not in schema["$defs"]["Dog"], "else this test shows nothing"
    assert accepts(schema, {"pet": {"kind": "cat", "meows": 3}, "other": None})
    assert accepts(schema, {"pet": {"kind": "wolf", "friends": [{"kind": "fish"}, {"kind": "dog"}]}})
    assert not accepts(schema, {"pet": {"meows": 3}}), "pydantic would not read it"
    assert not accepts(schema, {"pet": {"kind": "cow"}})


def test_a_union_of_unions_is_followed() -> None:
    class Black(BaseModel):
        kind: Literal["cat"] = "cat"
        color: Literal["black"] = "black"

    class White(BaseModel):
        kind: Literal["cat"] = "cat"
        color: Literal["white"] = "white"

    cat = Annotated[Black | White, Field(discriminator="color")]
    schema = TypeAdapter(Annotated[cat | Fish, Field(discriminator="kind")]).json_schema()
    assert accepts(schema, {"kind": "cat", "color": "white"}) and accepts(schema, {"kind": "fish"})
    assert not accepts(schema, {"kind": "cat"})


EXCLUSIVE: dict[str, list[Any]] = {
    "types": [{"type": "string"}, {"type": ["integer", "null"]}, {"type": "array"}],
    "references": [{"$ref": "#/$defs/text"}, {"$ref": "#/$defs/number"}],
    "titled values": [{"const": "a", "title": "A"}, {"enum": ["b", 1, 2.5]}, {"const": True}],
    "a required tag": [
        {"type": "object", "properties": {"t": {"const": 1}}, "required": ["t"]},
        {"type": "object", "properties": {"t": {"const": 2}}},
    ],
    "serde": [
        {"type": "object", "properties": {name: {}}, "required": [name], "additionalProperties": False}
        for name in "abc"
    ],
    "a property of another type": [
        {"type": "object", "properties": {"t": {"$ref": "#/$defs/text"}}, "required": ["t"]},
        {"type": "object", "properties": {"t": {"$ref": "#/$defs/number"}}},
    ],
    "inherited": [
        {"allOf": [{"$ref": "#/$defs/pet"}, {"properties": {"t": {"const": "a"}}}]},
        {"allOf": [{"$ref": "#/$defs/pet"}, {"properties": {"t": {"enum": ["b", "c"]}}}]},
    ],
}
DEFS = {
    "text": {"type": "string"},
    "number": {"type": "number"},
    "pet": {"type": "object", "properties": {"t": {"type": "string"}}, "required": ["t"]},
}


@pytest.mark.parametrize("members", EXCLUSIVE.values(), ids=EXCLUSIVE)
def test_members_that_exclude_each_other_are_an_any_of(members: list[Any]) -> None:
    schema = reduced({"$defs": DEFS, "type": "array", "items": {"oneOf": members}})
    assert "anyOf" in schema["items"] and "oneOf" not in schema["items"]


OVERLAPPING: list[tuple[list[Any], str]] = [
    ([{"type": "integer"}, {"type": "number"}], "members 0 and 1 both allow the type `number`"),
    ([{"type": "null"}, {"maxLength": 3}], "members 0 and 1 both allow the type `null`"),
    ([{"enum": [1]}, {"enum": [1.0, 2]}], "both allow the type `number`"),
    (
        [{"properties": {"t": {"const": 1}}, "required": ["t"]}, {"properties": {"t": {"const": 2}}}],
        "both allow the type `array`, `boolean`, `null`, `number`, `string`",
    ),
    (
        [{"type": "object", "properties": {"t": {"const": n}}} for n in range(3)],
        "members 0 and 1 both allow an object without `t`, which tells them apart: require it",
    ),
    ([{"type": "object"}, {"type": "object", "required": ["a"]}], "members 0 and 1 both allow the same objects"),
    ([{"type": "null"}, {"$ref": "#/$defs/loop"}], "members 0 and 1 both allow"),
]


@pytest.mark.parametrize(("members", "why"), OVERLAPPING, ids=[why[-30:] for _, why in OVERLAPPING])
def test_members_that_may_overlap_are_refused_with_the_place_and_the_reason(members: list[Any], why: str) -> None:
    loop = {"loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]}}
    schema = {"$defs": loop, "type": "object", "properties": {"a": {"oneOf": members}}}
    assert why in why_overlapping(schema)
    told = refused(schema)
    assert told.startswith("`properties.a.oneOf`: its ") and why in told and "use anyOf" in told


@pytest.mark.parametrize(("place", "is_followed"), [("$defs", True), ("components/schemas", True), ("later", False)])
def test_a_tag_is_required_wherever_its_union_is_followed(place: str, is_followed: bool) -> None:
    members = {name: {"type": "object", "properties": {"t": {"const": name, "default": name}}} for name in ("a", "b")}
    where: dict[str, Any] = {"components": {"schemas": members}} if "/" in place else {place: members}
    schema = reduced(where | {"oneOf": [{"$ref": f"#/{place}/{name}"} for name in members]})
    assert ("anyOf" in schema) is is_followed
    for step in place.split("/"):
        schema = schema[step]
    assert (schema["a"].get("required") == schema["b"].get("required") == ["t"]) is is_followed


def test_a_one_of_beside_an_any_of_is_followed_too() -> None:
    schema = {"anyOf": [{"maxLength": 1}, {"const": "long"}], "oneOf": [{"type": "string"}, {"type": "null"}]}
    assert accepts(schema, "a") is False and accepts(schema, '"a"') and accepts(schema, '"long"')
    assert not accepts(schema, '"other"') and not accepts(schema, "3")


def test_a_union_of_many_members_is_judged_in_time() -> None:
    members = [{"type": "object", "properties": {"t": {"const": f"k{n}", "default": f"k{n}"}}} for n in range(400)]
    assert len(reduced({"oneOf": [*members, False]})["anyOf"]) == 401
    assert len(reduced({"oneOf": [{"const": n, "title": str(n)} for n in range(4000)]})["anyOf"]) == 4000
    assert "oneOf" in reduced({"oneOf": [{"type": "object"}] * 400})


COUNTED: list[tuple[str, str, dict[str, Any]]] = [
    ("number", "maximum", {"18446744073709551615": False, "1e300": False, "9007199254740992": True, "-0.0": True}),
    ("integer", "minimum", {"-9223372036854775808": False, "9007199254740993": False, "1E2": True, "-1e-9": True}),
    ("number", "exclusiveMinimum", {"1e-300": False, "1e-60": True, "-9007199254740992": True, "0": True}),
    ("number", "multipleOf", {"0.30000000000000004": False, "1e300": False, "4294967295": True, "0.01": True}),
    ("string", "maxLength", {"9007199254740991": False, "4294967295": True, "1e2": True}),
    ("array", "maxItems", {"18446744073709551615": False, "20.0": True}),
]


@pytest.mark.parametrize(("type_name", "keyword", "numbers"), COUNTED, ids=[each[1] for each in COUNTED])
def test_numbers_that_a_grammar_cannot_count_are_left_out(
    type_name: str, keyword: str, numbers: dict[str, Any]
) -> None:
    for number, is_counted in numbers.items():
        schema = json.loads(f'{{"type": "{type_name}", "{keyword}": {number}}}')
        assert (keyword in reduced(schema)) is is_counted, number
        assert grammar(schema)


def test_integers_that_would_be_rounded_are_no_values_of_a_grammar() -> None:
    assert reduced({"enum": ["a", 2**53 + 1]}) == {} == reduced({"const": {"a": [2**60]}})
    assert accepts({"enum": ["a", -(2**53)]}, -(2**53)) and accepts({"const": -0.0}, "-0")
