"""Schemas as libraries emit them: what is enforced, what is left out and told, and what is refused by its path."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from pydantic import BaseModel

from specdec.constraints.limits import MAX_CONSTRAINT_BYTES, fault_of
from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.responses.request import ResponsesRequest
from specdec.gateway.responses.to_chat import to_chat
from specdec.gateway.schemas.enforceable import enforceable
from specdec.gateway.schemas.formats import PATTERNS, fault_of_pattern
from specdec.gateway.translation.chat_request import chat_to_generate
from specdec.v1 import common_pb2 as pb
from specdec.wire.errors import InvalidRequest
from tests.support.engine.accepted import accepts, matcher_of
from tests.support.for_each import for_each

RECORD = {"type": "object", "additionalProperties": {"type": "integer"}}
SET = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


def read(schema: Any, *, strict: bool = False) -> tuple[pb.Constraint, list[str]]:
    unenforced: list[str] = []
    written = enforceable(schema, "s", strict=strict, unenforced=unenforced)
    return pb.Constraint(json_schema=json.dumps(written)), unenforced


@for_each(
    "schema, right, wrong",
    [
        ({**RECORD, "propertyNames": {"type": "string"}}, ['{"a": 1}', "{}"], ['{"a": "b"}']),
        ({**RECORD, "propertyNames": {"enum": ["a", "b"]}}, ['{"a": 1, "b": 2}', "{}"], ['{"c": 1}', '{"a": "b"}']),
        (
            {**RECORD, "propertyNames": {"type": "string", "enum": ["a"]}, "required": ["a"]},
            ['{"a": 1}'],
            ["{}", '{"b": 1}'],
        ),
        ({**RECORD, "propertyNames": {"pattern": "^x"}}, ['{"xy": 1}', "{}"], ['{"y": 1}']),
        ({**RECORD, "propertyNames": {"type": "string", "minLength": 2}}, ['{"ab": 1}'], ['{"a": 1}']),
        ({**RECORD, "propertyNames": {"maxLength": 2}}, ['{"ab": 1}'], ['{"abc": 1}']),
        ({**RECORD, "propertyNames": {"format": "int64"}}, ['{"12": 1}'], ['{"a": 1}']),
        ({**SET, "items": {"enum": ["a", "b"]}}, ['["a"]', "[]", '["b","a"]'], ['["a","a"]', '["c"]']),
        ({**SET, "items": {"type": "boolean"}, "minItems": 2}, ["[false,true]"], ["[true]", "[true,true]"]),
        ({**SET, "maxItems": 1}, ["[1]", "[]"], ["[1,2]"]),
        ({**SET, "uniqueItems": False}, ["[1, 1]"], ['["a"]']),
        ({"type": "string", "format": "int64"}, ['"12"', '"-5"', '"0"'], ['"a"', '""', '"01"']),
        ({"type": "string", "format": "byte"}, ['"YWI="', '""', '"YWJj"'], ['"YWI"', '"?"']),
        ({"type": "string", "format": "base64", "contentEncoding": "base64"}, ['"YQ=="'], ['"YQ"']),
        ({"type": "string", "format": "base64", "pattern": "^.{4}$"}, ['"YWJj"'], ['"YWJjYWJj"', '"a-bc"']),
        ({"type": "string", "format": "jwt"}, ['"a.b.c"', '"a.b."'], ['"a.b"']),
        (
            {"type": "string", "format": "uri-reference"},
            ['"../a?b#c"', '"https://e.com/x"', '""', '"/a/b"', '"//h/p"', '"mailto:a@b.c"', '"#x"'],
            ['"a b"', '"<"', '"%zz"', '"1:a"'],
        ),
        ({"type": ["string", "null"], "format": "uuid4"}, ["null", '"0b0e6f53-8a3c-4f0d-9a54-0123456789ab"'], ['"x"']),
        ({"type": "string", "format": "password"}, ['"any"'], ["1"]),
        ({"type": "integer", "format": "int32"}, ["2147483647"], ["2147483648"]),
        ({"type": "integer", "format": "uint8", "maximum": 9}, ["9"], ["10", "-1"]),
        ({"type": "integer", "format": "int64"}, [str(2**63 - 1), str(2**10 - 2**63)], [str(2**63), str(-(2**63) - 1)]),
        ({"type": "integer", "format": "uint64"}, ["0", str(2**63 - 1)], ["-1", str(2**64)]),
        ({"type": "integer", "minimum": -(2**63), "exclusiveMaximum": 2**63}, ["-5", str(2**62)], ["0.5"]),
        ({"type": ["integer", "null"], "minimum": -1e30, "maximum": 1e30}, ["null", "-7", "7"], ["1e5"]),
        ({"type": "number", "minimum": -sys.float_info.max, "maximum": sys.float_info.max}, ["-1.5", "1e30"], ["null"]),
        ({"type": "object", "properties": {}, "unevaluatedProperties": False}, ["{}"], ['{"a": 1}']),
        ({"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 1}, ['{"a": 1}'], ["{}"]),
        (
            {"type": "object", "required": ["a"], "dependentRequired": {"a": ["b"]}},
            ['{"a":1,"b":2}'],
            ['{"a":1}'],
        ),
        ({"type": "object", "properties": {"a": {"not": {}}, "b": {}}}, ['{"b": 1}'], ['{"a": 1}']),
        ({"if": {"type": "string"}, "type": "integer"}, ["1"], ['"a"']),
        ({"$schema": "https://example.com/own", "type": "integer"}, ["1"], ['"a"']),
        (
            {"$defs": {"c": {"$id": "#c", "enum": [1]}}, "type": "object", "properties": {"a": {"$ref": "#c"}}},
            ['{"a": 1}'],
            ['{"a": 2}'],
        ),
        (
            {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 5},
            [str(2**53 + 2)],
            [str(2**53), str(2**53 + 6)],
        ),
        ({"type": "integer", "exclusiveMaximum": -(2**53) - 1}, [str(-(2**53) - 4)], [str(-(2**53) - 1)]),
    ],
)
def test_it_is_enforced_strict_or_not(schema: Any, right: list[str], wrong: list[str]) -> None:
    for strict in (False, True):
        constraint, unenforced = read(schema, strict=strict)
        assert unenforced == []
        assert [text for text in right if not accepts(constraint, text)] == []
        assert [text for text in wrong if accepts(constraint, text)] == []


@for_each(
    "schema, place",
    [
        (SET, "uniqueItems"),
        ({**SET, "items": {"enum": [*"abcdefgh"]}}, "uniqueItems"),
        ({"type": "string", "format": "regex"}, "format"),
        ({"type": "number", "minimum": -3.4e38}, "minimum"),
        ({"exclusiveMaximum": 1e19}, "exclusiveMaximum"),
        ({"type": "string", "format": "of-nobody"}, "format"),
        ({"type": "string", "pattern": "^(?!a)b$"}, "pattern"),
        ({"type": "string", "pattern": r"\bb"}, "pattern"),
        ({"type": "string", "pattern": r"(b)\1*"}, "pattern"),
        ({"type": "object", "patternProperties": {"(?=a)b": {"type": "integer"}}}, "patternProperties.(?=a)b"),
        ({**RECORD, "properties": {"a": {}}, "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({**RECORD, "propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"pattern": "^a"}}}, "propertyNames"),
        ({"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}, "minProperties"),
        ({"type": "array", "contains": {"type": "integer"}, "minContains": 2}, "contains"),
        ({"type": "string", "not": {"const": "x"}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
        ({"anyOf": [{"type": "object", "dependentSchemas": {"a": {"type": "object"}}}]}, "anyOf[0].dependentSchemas"),
        ({"type": "object", "properties": {"m": SET}}, "properties.m.uniqueItems"),
        ({"$defs": {"not": SET}, "type": "array", "items": {"$ref": "#/$defs/not"}}, "$defs.not.uniqueItems"),
    ],
)
def test_what_cannot_be_enforced_is_told_or_refused_by_its_path(schema: Any, place: str) -> None:
    constraint, unenforced = read(schema)
    assert unenforced[0] == f"s.{place}"
    assert matcher_of(constraint)
    with pytest.raises(InvalidRequest) as refused:
        read(schema, strict=True)
    assert refused.value.field == f"s.{place}"
    assert "strict: false" in refused.value.description


@pytest.mark.parametrize("name", ["default", "enum", "const", "examples", "title", "description", "not", "format"])
def test_properties_may_be_called_like_keywords(name: str) -> None:
    schema = {
        "$defs": {"Color": {"enum": ["red"]}},
        "type": "object",
        "properties": {name: {"$ref": "#/$defs/Color"}},
        "required": [name],
        "additionalProperties": False,
    }
    constraint, unenforced = read(schema, strict=True)
    assert unenforced == []
    assert accepts(constraint, f'{{"{name}": "red"}}')
    assert not accepts(constraint, f'{{"{name}": "blue"}}')


def test_values_that_look_like_schemas_stay_as_they_are() -> None:
    constraint, unenforced = read({"const": {"uniqueItems": True, "title": "x"}}, strict=True)
    assert unenforced == []
    assert accepts(constraint, '{"uniqueItems": true, "title": "x"}')


@for_each(
    "schema",
    [
        {"type": 5, "format": "date"},
        {"type": None, "format": "x"},
        {"dependentRequired": {"a": [{}]}, "required": ["a"]},
        {"propertyNames": {"format": []}},
        {"minProperties": float("inf"), "required": []},
        {"type": "string", "format": "byte", "pattern": "a", "allOf": 5},
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": -1},
        {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 10**400},
    ],
)
def test_values_of_wrong_kinds_are_left_to_the_compiler(schema: Any) -> None:
    enforceable(schema, "s", strict=False, unenforced=[])


def _records(depth: int) -> Any:
    inner: Any = {"type": "string"}
    for _ in range(depth):
        inner = {"propertyNames": {"enum": list("abcdefgh")}, "additionalProperties": inner}
    return inner


def _sets(depth: int) -> Any:
    inner: Any = {"enum": [0, 1]}
    for _ in range(depth):
        inner = {"type": "array", "items": inner, "uniqueItems": True, "minItems": 2, "maxItems": 2}
    return inner


@for_each("schema", [_records(60), _sets(60), {**SET, "items": {"enum": ["x" * 100_000, "y", "z"]}}])
def test_copies_of_copies_are_bounded(schema: Any) -> None:
    constraint, unenforced = read(schema)
    assert len(constraint.json_schema) < 4 * MAX_CONSTRAINT_BYTES
    assert unenforced


def test_long_names_cost_their_length_once() -> None:
    unenforced: list[str] = []
    named = {f"a{index}": {"not": {"type": "null"}} for index in range(2000)}
    enforceable({"properties": {"k" * 100_000: {"properties": named}}}, "s", strict=False, unenforced=unenforced)
    assert sum(map(len, unenforced)) < 1_000_000


def test_models_of_pydantic_are_taken() -> None:
    class Order(BaseModel):
        """A long description."""

        tags: set[str]
        pairs: dict[str, int]
        count: int

    constraint, unenforced = read(Order.model_json_schema())
    assert unenforced == ["s.properties.tags.uniqueItems"]
    assert "description" not in constraint.json_schema
    assert accepts(constraint, '{"tags": ["a"], "pairs": {"b": 1}, "count": 2}')


@pytest.mark.parametrize("name", PATTERNS)
def test_the_expressions_of_formats_compile(name: str) -> None:
    constraint, _ = read({"type": "string", "format": name}, strict=True)
    assert matcher_of(constraint)


@for_each(
    "pattern, fault",
    [
        (r"^[\b(?=]\\b\(?!$", ""),
        (r"[^\]](?:a)(?<name>b)", ""),
        (r"a(?<!b)", "look-around"),
        (r"\\\b", "look-around"),
        (r"(?<n>a)\k<n>", "a back reference"),
    ],
)
def test_what_no_regular_expression_can_say_is_seen_in_patterns(pattern: str, fault: str) -> None:
    assert fault_of_pattern(pattern) == fault


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "go"}], **fields})


def test_every_field_with_a_schema_tells_the_path_as_it_was_sent() -> None:
    unenforced: list[str] = []
    of_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": SET}}
    chat_to_generate(chat(response_format=of_format), unenforced=unenforced)
    chat_to_generate(chat(structured_outputs={"json": SET}), unenforced=unenforced)
    chat_to_generate(chat(structured_outputs={"json": json.dumps(SET)}), unenforced=unenforced)
    newer = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": SET}, "end": "</a>"}
    older = {"structures": [{"begin": "<a>", "schema": SET, "end": "</a>"}], "triggers": ["<a>"]}
    chat_to_generate(chat(response_format={"type": "structural_tag", "format": newer}), unenforced=unenforced)
    chat_to_generate(chat(structured_outputs={"structural_tag": json.dumps(older)}), unenforced=unenforced)
    of_response = {"type": "json_schema", "name": "x", "schema": SET}
    response = ResponsesRequest.model_validate({"input": "go", "text": {"format": of_response}})
    of_chat: list[str] = []
    as_chat, _ = to_chat(response, None)
    chat_to_generate(as_chat.request, unenforced=of_chat)
    unenforced += map(as_chat.path, of_chat)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": SET}}}}
    chat_to_generate(chat(tools=[tool], tool_choice="required"), "hermes", unenforced=unenforced)
    assert unenforced == [
        "response_format.json_schema.schema.uniqueItems",
        "structured_outputs.json.uniqueItems",
        "structured_outputs.json.uniqueItems",
        "response_format.format.content.json_schema.uniqueItems",
        "structured_outputs.structural_tag.structures[0].schema.uniqueItems",
        "text.format.schema.uniqueItems",
        "tools[0].function.parameters.properties.a.uniqueItems",
    ]


@pytest.mark.parametrize("name", ["json", "structural_tag"])
@pytest.mark.parametrize("depth", [100, 400, 900, 50_000])
def test_texts_that_are_nested_too_deeply_are_refused(name: str, depth: int) -> None:
    asked = chat(structured_outputs={name: '{"items":' * depth + "{}" + "}" * depth})
    if depth < 200:
        assert chat_to_generate(asked).sampling.constraint.WhichOneof("form")
        return
    try:
        fault = fault_of(chat_to_generate(asked).sampling.constraint)
    except InvalidRequest as error:
        fault = error.field, error.description
    assert fault is not None
    assert name in fault[0]


@pytest.mark.parametrize("name", ["json", "structural_tag"])
def test_schemas_as_texts_that_are_no_json_are_refused(name: str) -> None:
    for value in ('"\\ud800"', "NaN", "Infinity", "1e999", "9" * 5000):
        schema = f'{{"type": "json_schema", "const": {value}}}'
        with pytest.raises(InvalidRequest, match=r"is not JSON|cannot be written as JSON") as caught:
            chat_to_generate(chat(structured_outputs={name: schema}))
        assert caught.value.field == f"structured_outputs.{name}"


def test_numbers_that_the_compiler_would_round_are_refused_wherever_they_are_sent() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 10**30 + 1}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    tag = {"type": "structural_tag", "format": {"type": "repeat", "min": 10**30}}
    formats = ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, tag)
    asked = [*({"response_format": each} for each in formats), {"tools": [tool], "tool_choice": "required"}]
    for fields in asked:
        with pytest.raises(InvalidRequest, match="64-bit"):
            chat_to_generate(chat(**fields), "hermes")


@pytest.mark.parametrize("keyword", ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"])
@pytest.mark.parametrize("kind", ["integer", "number", ["integer", "null"]])
def test_bounds_that_the_compiler_would_round_towards_0_are_refused(keyword: str, kind: Any) -> None:
    bound = 2**63 if "in" in keyword else -(2.0**63)
    with pytest.raises(InvalidRequest) as refused:
        read({"anyOf": [{"type": kind, keyword: bound}]})
    assert refused.value.field == f"s.anyOf[0].{keyword}"


def test_strict_schemas_are_refused_where_they_were_sent() -> None:
    of_format = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SET}}
    with pytest.raises(InvalidRequest) as refused:
        chat_to_generate(chat(response_format=of_format))
    assert refused.value.field == "response_format.json_schema.schema.uniqueItems"
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": SET}}}
    with pytest.raises(InvalidRequest) as refused:
        chat_to_generate(chat(tools=[{"type": "function", "function": function}], tool_choice="required"), "hermes")
    assert refused.value.field == "tools[0].function.parameters.properties.a.uniqueItems"
