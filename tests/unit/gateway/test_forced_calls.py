"""Calls that a tool choice demands: what the output is held to, and how it is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.errors import ApiError, param_of
from specdec.gateway.chat.parsing import make_message_parser
from specdec.gateway.chat.tool_calls import TOOL_PARSERS
from specdec.gateway.translation.chat_request import chat_field_names, chat_to_generate
from specdec.v1 import common_pb2 as pb
from specdec.wire.errors import InvalidRequest
from tests.support.chat.parsed import cut, parse
from tests.support.engine.accepted import accepts, longest_start
from tests.support.for_each import for_each

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


def constraint_of(asked: ChatRequest, tool_parser: str = "hermes") -> pb.Constraint:
    return chat_to_generate(asked, tool_parser).sampling.constraint


def written(*calls: tuple[str, Any]) -> str:
    told = [f'{{"name":{json.dumps(name)},"parameters":{json.dumps(arguments)}}}' for name, arguments in calls]
    return f"[{','.join(told)}]"


STOP = ("stop", {})


@for_each(
    "calls, expected",
    [
        ([STOP], True),
        ([("grow", {"root": {"next": {"of": 1}}}), STOP], True),
        ([("grow", {"root": {}, "$ref": {"$ref": "#/$defs/Node"}})], True),
        ([("grow", {"root": {"next": {"of": "one"}}})], False),
        ([("grow", {})], False),
        ([("stop", {"now": 1})], False),
        ([("other", {})], False),
        ([], False),
    ],
)
def test_required_calls_are_of_the_tools_and_of_their_schemas(calls: Any, expected: bool) -> None:
    assert accepts(constraint_of(request()), written(*calls)) is expected


def test_a_named_function_is_called_once_and_no_other() -> None:
    constraint = constraint_of(request(tool_choice=NAMED))
    assert accepts(constraint, written(STOP))
    assert not accepts(constraint, written(STOP, STOP))
    assert not accepts(constraint, written(("grow", {"root": {}})))


def test_of_allowed_tools_only_these_are_called_and_only_if_they_are_required() -> None:
    def allowed(mode: str, *names: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    constraint = constraint_of(request(tool_choice=allowed("required", "stop")))
    assert accepts(constraint, written(STOP)) and accepts(constraint, written(STOP, STOP))
    assert not accepts(constraint, written(("grow", {"root": {}})))
    assert accepts(constraint_of(request(tool_choice=allowed("required", "stop", "grow"))), written(STOP))
    asked = request(tool_choice=allowed("auto", "stop"))
    body = chat_to_generate(asked, "hermes")
    assert not body.sampling.HasField("constraint")
    assert [tool["function"]["name"] for tool in json.loads(body.messages.tools_json)] == ["stop"]


def test_calls_that_must_not_be_parallel_are_one() -> None:
    assert accepts(constraint_of(request()), written(STOP, STOP))
    assert not accepts(constraint_of(request(parallel_tool_calls=False)), written(STOP, STOP))


@pytest.mark.parametrize("space", [" ", "\n", "\t"])
def test_no_white_space_is_spent_between_calls_and_little_within(space: str) -> None:
    constraint, call = constraint_of(request()), written(("grow", {"root": {}}))
    for place in ("[", '{"name"', '"parameters"', "]"):
        at = call.index(place)
        assert longest_start(constraint, call[:at] + space) == at
    before = '[{"name":"grow","parameters":{'
    assert longest_start(constraint, before + space * 500) <= len(before) + 1


def with_schemas(**schemas: Any) -> ChatRequest:
    return request(tools=[{"type": "function", "function": {"name": n, "parameters": s}} for n, s in schemas.items()])


@pytest.mark.parametrize("name", ["default", "enum", "const", "examples", "$id", "$anchor", "properties"])
def test_a_property_may_have_the_name_of_a_keyword(name: str) -> None:
    schema = {
        "$defs": {"Color": {"enum": ["red", "blue"]}},
        "type": "object",
        "properties": {name: {"$ref": "#/$defs/Color"}},
        "required": [name],
        "additionalProperties": False,
    }
    constraint = constraint_of(with_schemas(paint=schema))
    assert accepts(constraint, written(("paint", {name: "red"})))
    assert not accepts(constraint, written(("paint", {name: "green"})))


def test_a_schema_that_allows_nothing_is_left_to_the_compiler() -> None:
    tag = json.loads(constraint_of(with_schemas(f={"not": {}})).structural_tag)
    assert tag["format"]["elements"][1]["tags"][0]["content"]["json_schema"] is False


def test_each_schema_is_a_document_with_its_own_references_and_hints() -> None:
    color = {"$defs": {"c": {"$anchor": "col", "enum": ["red"]}}, "type": "object", "required": ["a"]}
    schemas = {
        "by_id": {**color, "$id": "https://example.com/t.json", "properties": {"a": {"$ref": "t.json#/$defs/c"}}},
        "by_anchor": {**color, "properties": {"a": {"$ref": "#col"}}},
        "by_root": {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False},
        "hinted": {
            "x-guidance": {"coerce_one_of": True},
            "type": "object",
            "properties": {"v": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
            "required": ["v"],
        },
    }
    constraint = constraint_of(with_schemas(**schemas))
    for name, right, wrong in [
        ("by_id", {"a": "red"}, {"a": "blue"}),
        ("by_anchor", {"a": "red"}, {"a": "blue"}),
        ("by_root", {"next": {"next": {}}}, {"next": {"other": 1}}),
        ("hinted", {"v": 1}, {"v": "a"}),
    ]:
        assert accepts(constraint, written((name, right))), name
        assert not accepts(constraint, written((name, wrong))), name


def test_many_tools_are_bounded_by_what_they_demand_and_not_by_what_they_describe() -> None:
    properties = {f"p{i}": {"type": "string", "description": "d" * 200} for i in range(5)}
    schemas = {f"tool_{i}": {"type": "object", "properties": properties, "required": ["p0"]} for i in range(64)}
    constraint = constraint_of(with_schemas(**schemas))
    assert len(json.dumps(schemas)) > 72_000
    assert accepts(constraint, written(("tool_63", {"p0": "a"})))
    assert not accepts(constraint, written(("tool_63", {"p1": "a"})))
    with pytest.raises(InvalidRequest, match="send fewer") as refused:
        constraint_of(with_schemas(**{f"t{i}": {} for i in range(600)}))
    assert refused.value.field == "tools"
    with pytest.raises(InvalidRequest, match="send fewer") as refused:
        constraint_of(with_schemas(big={"enum": ["x" * 400_000]}))
    assert refused.value.field == "tools"


def test_a_name_with_the_text_of_a_special_token_is_no_token() -> None:
    constraint = constraint_of(with_schemas(**{"<|end|>é😀": {}}))
    assert accepts(constraint, '[{"name":"\\u003c\\u007cend\\u007c\\u003e\\u00e9\\ud83d\\ude00","parameters":{}}]')


@pytest.mark.parametrize("end", range(1, 70))
def test_what_stands_around_calls_is_never_content_wherever_the_text_ends(end: int) -> None:
    text = written(("grow", {"root": {}}), STOP)[:end]
    for sole in ("", "grow"):
        parser = make_message_parser(
            "none", "hermes", has_tools=True, tool_choice="required", forced=True, sole_function=sole
        )
        message = parse(parser, list(text))
        assert message.content == ""
        assert [name for name, _ in message.calls] == ["grow", "stop"][: len(message.calls)]
        assert bool(message.calls) or (not sole and end < len('[{"name":"grow","parameters":{'))


@pytest.mark.parametrize("family", [name for name in TOOL_PARSERS if name != "harmony"])
@given(places=st.lists(st.integers(0, 120), max_size=12))
def test_they_are_read_however_the_text_is_cut_and_whatever_the_family(family: str, places: list[int]) -> None:
    text = json.dumps([{"name": "grow", "parameters": {"root": {"of": 5}}}, {"name": "stop", "parameters": {}}])
    parser = make_message_parser("none", family, has_tools=True, tool_choice="required", forced=True)
    message = parse(parser, cut(text, places))
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


CHANNELS = {"<|channel|>": 0xF8, "<|message|>": 0xF9, "<|end|>": 0xFA, "<|start|>": 0xFB, "<|constrain|>": 0xFC}
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def in_channel(name: str, arguments: Any) -> str:
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return head + json.dumps(arguments, separators=(",", ":"))


def test_models_that_write_channels_must_end_with_a_message_that_calls() -> None:
    sampling = chat_to_generate(request(), "harmony", "harmony").sampling
    assert not sampling.skip_special_tokens
    grow = in_channel("grow", {"root": {"next": {"of": 1}}})
    for text in (grow, THOUGHT + THOUGHT + in_channel("stop", {})):
        assert accepts(sampling.constraint, text, CHANNELS)
        parser = make_message_parser("harmony", "harmony", has_tools=True, tool_choice="required")
        assert len(parse(parser, list(text)).decoded) == 1
    final = "<|channel|>final<|message|>No."
    for text in (in_channel("grow", {}), in_channel("other", {}), THOUGHT, grow + grow, final, THOUGHT + final, ""):
        assert not accepts(sampling.constraint, text, CHANNELS), text
    named = chat_to_generate(request(tool_choice=NAMED), "harmony", "harmony").sampling.constraint
    assert accepts(named, in_channel("stop", {}), CHANNELS) and not accepts(named, grow, CHANNELS)


def test_as_many_functions_can_be_forced_in_channels_as_in_a_list() -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(250)]
    for family in ("harmony", "hermes"):
        held = chat_to_generate(request(tools=tools), family, "harmony" if family == "harmony" else "none")
        assert longest_start(held.sampling.constraint, "[") == (family == "hermes")


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
    assert chat_field_names(request(), "hermes")["constraint.structural_tag"] == "tools"
    assert param_of("sampling.constraint.after_token", chat_field_names(request(), "hermes")) == "tool_choice"
    with pytest.raises(ApiError) as refused:
        chat_to_generate(request(structured_outputs={"regex": "a"}), "hermes")
    assert refused.value.param == "structured_outputs"
    with pytest.raises(InvalidRequest) as unknown:
        chat_to_generate(request(tool_choice={"type": "function", "function": {"name": "none"}}), "hermes")
    assert unknown.value.field == "tool_choice.function.name"
