"""From response_format and structured_outputs to constraints, and back to the names that clients wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.constraints.limits.structural_tags import read_structural_tag
from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.completions import CompletionRequest
from specdec.gateway.api.errors import ApiError, param_of
from specdec.gateway.api.problems import validated
from specdec.gateway.responses.request import ResponsesRequest
from specdec.gateway.responses.to_chat import to_chat
from specdec.gateway.translation.chat_request import chat_to_generate
from specdec.gateway.translation.completion_request import completion_to_generate
from specdec.gateway.translation.constraint import constraint_names
from specdec.v1 import common_pb2 as pb

MESSAGES = [{"role": "user", "content": "x"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(**fields: Any) -> ChatRequest:
    return validated(ChatRequest, {"messages": MESSAGES, **fields})


def constraint(reasoning_parser: str = "none", **fields: Any) -> pb.Constraint:
    return chat_to_generate(chat(**fields), "none", reasoning_parser).sampling.constraint


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, pb.Constraint(json_object=True)),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, pb.Constraint(json_object=True)),
        ({"structured_outputs": {"json_object": True}}, pb.Constraint(json_object=True)),
        ({"structured_outputs": {"json_object": False, "regex": "a"}}, pb.Constraint(regex="a")),
        ({"structured_outputs": {"grammar": "start: /a/"}}, pb.Constraint(grammar="start: /a/")),
        ({"structured_outputs": {"json": "true"}}, pb.Constraint(json_schema="true")),
        ({"structured_outputs": {"json": False}}, pb.Constraint(json_schema="false")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, pb.Constraint(choice=pb.TextChoices(texts=["a", "b"]))),
        ({"structured_outputs": {"choice": []}}, pb.Constraint(choice=pb.TextChoices())),
        ({"response_format": {"type": "text"}}, pb.Constraint()),
        ({"structured_outputs": None}, pb.Constraint()),
    ],
)
def test_each_form_becomes_its_constraint(fields: dict[str, Any], expected: pb.Constraint) -> None:
    assert constraint(**fields) == expected
    completion = validated(CompletionRequest, {"prompt": "x", **fields})
    assert completion_to_generate(completion, 1)[0].sampling.constraint == expected


def test_schemas_are_the_same_by_all_three_ways() -> None:
    inner = {"name": "x", "description": "d", "strict": True, "schema": SCHEMA}
    response = validated(
        ResponsesRequest, {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}
    )
    found = [
        constraint(response_format={"type": "json_schema", "json_schema": inner}),
        constraint(structured_outputs={"json": SCHEMA}),
        chat_to_generate(to_chat(response, None)[0].request).sampling.constraint,
    ]
    assert [json.loads(each.json_schema) for each in found] == [SCHEMA] * 3


TAGS: dict[str, Any] = {
    "triggers": ["<f"],
    "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": {"const": None}}, "end": ""}],
}
FORMAT = {"format": {"type": "triggered_tags", **TAGS}}
OLDER = {"structures": [{"begin": "<f>", "schema": {"const": None}, "end": ""}], "triggers": ["<f"]}


@pytest.mark.parametrize("tag", [FORMAT, OLDER])
def test_structural_tags_are_the_same_by_all_ways(tag: dict[str, Any]) -> None:
    found = [
        constraint(response_format={"type": "structural_tag", **tag}),
        constraint(structured_outputs={"structural_tag": tag}),
        constraint(structured_outputs={"structural_tag": json.dumps({"type": "structural_tag", **tag})}),
    ]
    read = [read_structural_tag(each.structural_tag) for each in found]
    assert read == [read_structural_tag(json.dumps(FORMAT))] * 3


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as error:
        constraint(**fields)
    assert error.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"structural_tag": 3}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "structural_tag", "triggers": "x"}}, "response_format.triggers"),
        ({"structured_outputs": {"other": 1}}, "structured_outputs.other"),
    ],
)
def test_what_is_malformed_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        chat(**fields)
    assert error.value.status == 400
    assert error.value.param == param


@pytest.mark.parametrize(
    ("fields", "field", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "sampling.constraint", "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "sampling.constraint.json_schema",
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": {}}}, "sampling.constraint.json_schema", "structured_outputs.json"),
        ({"structured_outputs": {"json": {}}}, "sampling.constraint.after_token", "structured_outputs"),
        ({"response_format": {"type": "json_object"}}, "sampling.constraint.after_token", "response_format"),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "x"}}},
            "sampling.constraint.structural_tag.format.type",
            "response_format.format.type",
        ),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "sampling.constraint.structural_tag.format.type",
            "structured_outputs.structural_tag.format.type",
        ),
        (
            {"structured_outputs": {"choice": [""]}},
            "sampling.constraint.choice.texts[0]",
            "structured_outputs.choice[0]",
        ),
    ],
)
def test_errors_name_the_field_that_the_client_wrote(fields: dict[str, Any], field: str, param: str) -> None:
    assert param_of(field, constraint_names(chat(**fields))) == param


@pytest.mark.parametrize(
    ("parser", "thinking", "expected"),
    [
        ("none", None, ""),
        ("deepseek_r1", None, "</think>"),
        ("qwen3", None, "</think>"),
        ("qwen3", True, "</think>"),
        ("qwen3", False, ""),
        ("mistral", None, "[/THINK]"),
    ],
)
def test_the_answer_is_what_is_constrained_not_the_thoughts(parser: str, thinking: bool | None, expected: str) -> None:
    told = {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}
    found = constraint(parser, structured_outputs={"regex": "a"}, **told)
    assert found.after_token == expected
    assert found.opening_token == expected.replace("/", "")
    assert constraint(parser, **told) == pb.Constraint()
