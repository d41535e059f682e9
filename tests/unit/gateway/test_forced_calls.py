"""Calls that a tool choice demands: what the output is held to, and how it is read."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.errors import ApiError, param_of
from specdec.gateway.chat.parsing import make_message_parser
from specdec.gateway.chat.tool_calls import TOOL_PARSERS
from specdec.gateway.translation.chat_request import chat_field_names, chat_to_generate
from specdec.wire.errors import InvalidRequest
from tests.support.chat.parsed import cut, parse

TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/Node"}, "$ref": {"const": {"$ref": "#/$defs/Node"}}},
    "required": ["root"],
    "additionalProperties": False,
    "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}, "of": {"type": "integer"}}}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "grow", "parameters": TREE}},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED = {"type": "function", "function": {"name": "stop"}}


def request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "go"}], "tools": TOOLS, "tool_choice": "required", **fields}
    )


def schema_of(asked: ChatRequest, tool_parser: str = "hermes") -> Any:
    return json.loads(chat_to_generate(asked, tool_parser).sampling.constraint.json_schema)


def is_valid(calls: Any, schema: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(calls))


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([{"name": "stop", "parameters": {}}], True),
        ([{"name": "grow", "parameters": {"root": {"next": {"of": 1}}}}, {"name": "stop", "parameters": {}}], True),
        ([{"name": "grow", "parameters": {"root": {}, "$ref": {"$ref": "#/$defs/Node"}}}], True),
        ([{"name": "grow", "parameters": {"root": {"next": {"of": "one"}}}}], False),
        ([{"name": "grow", "parameters": {}}], False),
        ([{"name": "stop", "parameters": {"now": 1}}], False),
        ([{"name": "other", "parameters": {}}], False),
        ([], False),
    ],
)
def test_required_calls_are_of_the_tools_and_of_their_schemas(calls: Any, expected: bool) -> None:
    assert is_valid(calls, schema_of(request())) is expected


def test_a_named_function_is_called_once_and_no_other() -> None:
    schema = schema_of(request(tool_choice=NAMED))
    stop = {"name": "stop", "parameters": {}}
    assert is_valid([stop], schema)
    assert not is_valid([stop, stop], schema)
    assert not is_valid([{"name": "grow", "parameters": {"root": {}}}], schema)


def test_calls_that_must_not_be_parallel_are_one() -> None:
    stop = {"name": "stop", "parameters": {}}
    assert is_valid([stop, stop], schema_of(request()))
    assert not is_valid([stop, stop], schema_of(request(parallel_tool_calls=False)))


@pytest.mark.parametrize("family", [name for name in TOOL_PARSERS if name != "harmony"])
@given(places=st.lists(st.integers(0, 120), max_size=12))
def test_they_are_read_however_the_text_is_cut_and_whatever_the_family(family: str, places: list[int]) -> None:
    written = json.dumps([{"name": "grow", "parameters": {"root": {"of": 5}}}, {"name": "stop", "parameters": {}}])
    parser = make_message_parser("none", family, has_tools=True, tool_choice="required", forced=True)
    message = parse(parser, cut(written, places))
    assert message.content == ""
    assert message.decoded == [("grow", {"root": {"of": 5}}), ("stop", {})]


def test_reasoning_comes_first_and_is_free() -> None:
    constraint = chat_to_generate(request(), "hermes", "deepseek_r1").sampling.constraint
    assert constraint.after_token == "</think>"


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "auto"}, {"tool_choice": "none"}, {"tools": None, "tool_choice": None}]
)
def test_other_choices_force_nothing(fields: dict[str, Any]) -> None:
    assert not chat_to_generate(request(**fields), "hermes").sampling.HasField("constraint")


def test_models_that_write_channels_are_not_held_to_a_list() -> None:
    assert not chat_to_generate(request(), "harmony", "harmony").sampling.HasField("constraint")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_completion_tokens"),
    ],
)
def test_errors_name_the_most_tokens_as_the_client_did(fields: dict[str, Any], param: str) -> None:
    names = chat_field_names(request(tool_choice="auto", **fields), "hermes")
    assert param_of("sampling.max_tokens", names) == param


def test_errors_name_what_the_client_sent() -> None:
    assert chat_field_names(request(), "hermes")["constraint.json_schema"] == "tools"
    with pytest.raises(ApiError) as refused:
        chat_to_generate(request(structured_outputs={"regex": "a"}), "hermes")
    assert refused.value.param == "structured_outputs"
    with pytest.raises(InvalidRequest) as unknown:
        chat_to_generate(request(tool_choice={"type": "function", "function": {"name": "none"}}), "hermes")
    assert unknown.value.field == "tool_choice.function.name"
