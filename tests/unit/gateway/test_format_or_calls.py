"""A response format beside tools: the output fits it, or it calls."""

from __future__ import annotations

import json
from typing import Any

from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.problems import validated
from specdec.gateway.chat.tool_calls import make_tool_parser
from specdec.gateway.translation.chat_request import chat_field_names, chat_to_generate
from specdec.v1 import common_pb2 as pb
from tests.support.chat.parsed import parse
from tests.support.engine.accepted import accepts, longest_start
from tests.support.for_each import for_each

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ARGUMENTS = '{"city": "<Rome>"}'
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "qwen": f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=city>\n<Rome>\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=look>\n<parameter=city>\n<Rome>\n</parameter>\n</function>\n"
    "</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="look">\n<parameter name="city"><Rome></parameter>\n</invoke>\n'
    "</minimax:tool_call>",
}


def constraint(tool_parser: str = "hermes", reasoning_parser: str = "none", **fields: Any) -> pb.Constraint:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "response_format": FORMAT, **fields}
    return chat_to_generate(validated(ChatRequest, body), tool_parser, reasoning_parser).sampling.constraint


@for_each("family, call", CALLS.items())
def test_output_is_calls_of_the_family_or_fits_the_format(family: str, call: str) -> None:
    begin, end = call[: call.index(">") + 1], call[call.rindex("<") :]
    for special in ({"<|end|>": 0xFF}, {begin: 0xF8, end: 0xF9}):
        held = constraint(family)
        assert accepts(held, call, special)
        assert accepts(held, f"{call}\n{call}", special)
        assert accepts(held, '{"n": 1}', special)
        for wrong in ("Hello", '{"n": "1"}', f'{{"n": 1}}{call}', f"{call} and so", begin, ""):
            assert not accepts(held, wrong, special), wrong
    assert json.loads(parse(make_tool_parser(family), [call]).calls[0][1]) == {"city": "<Rome>"}


def test_one_call_at_most_where_calls_must_not_be_parallel() -> None:
    held = constraint(parallel_tool_calls=False)
    assert accepts(held, CALLS["hermes"])
    assert not accepts(held, CALLS["hermes"] + "\n" + CALLS["hermes"])


def test_any_object_and_thoughts_before_it() -> None:
    held = constraint(reasoning_parser="deepseek_r1", response_format={"type": "json_object"})
    assert (held.after_token, held.opening_token) == ("</think>", "<think>")
    assert accepts(held, '{"a": [1]}') and accepts(held, CALLS["hermes"]) and longest_start(held, "[1]") == 0


@for_each(
    "tool_parser, fields",
    [
        ("hermes", {"tools": None}),
        ("hermes", {"tool_choice": "none"}),
        ("kimi_k2", {}),
        ("none", {}),
    ],
)
def test_the_format_alone_holds_where_no_call_can_be_told_from_it(tool_parser: str, fields: dict[str, Any]) -> None:
    assert json.loads(constraint(tool_parser, **fields).json_schema) == SCHEMA


def test_a_forced_call_and_other_constraints_are_as_before() -> None:
    assert not accepts(constraint(tool_choice="required"), '{"n": 1}')
    held = constraint(response_format=None, structured_outputs={"regex": "a+"})
    assert held.regex == "a+"


def test_a_fault_of_the_schema_is_one_of_the_field_that_brought_it() -> None:
    asked = validated(
        ChatRequest, {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "response_format": FORMAT}
    )
    names = chat_field_names(asked, "hermes")
    assert names["constraint.structural_tag"] == names["constraint.json_schema"] == "response_format.json_schema.schema"
