"""A response format beside tools: the output fits it, or it calls."""

from __future__ import annotations

import json
import re
from typing import Any

from specdec.constraints.limits import MAX_CONSTRAINT_BYTES
from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.problems import validated
from specdec.gateway.chat.parsing import make_message_parser
from specdec.gateway.chat.tool_calls import make_tool_parser
from specdec.gateway.translation.chat_request import chat_field_names, chat_to_generate
from specdec.v1 import common_pb2 as pb
from tests.support.chat.parsed import parse
from tests.support.engine.accepted import accepts, ends_within, longest_start
from tests.support.for_each import for_each

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ARGUMENTS = '{"city": "<Rome>"}'
TAGS = "<function=look>\n<parameter=city>\n<Rome>\n</parameter>\n</function>"
IN_SECTION = f"<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
IN_BLOCK = (
    '<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="city" string="true"><Rome></｜DSML｜parameter>\n'
    "</｜DSML｜invoke>"
)
CALLS = {
    "hermes": [f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'],
    "qwen": [f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'],
    "qwen3_coder": [f"<tool_call>\n{TAGS}\n</tool_call>"],
    "seed_oss": [f"<seed:tool_call>\n{TAGS}\n</seed:tool_call>"],
    "minimax_m2": [
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="city"><Rome></parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    ],
    "glm45": [
        "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value><Rome></arg_value>\n</tool_call>",
        "<tool_call>look<arg_key>city</arg_key><arg_value><Rome></arg_value></tool_call>",
    ],
    "deepseek_v32": [
        f"<｜DSML｜{block}>\n{IN_BLOCK}\n</｜DSML｜{block}>" for block in ("function_calls", "tool_calls")
    ],
    "kimi_k2": [f"<|tool_calls_section_begin|>{IN_SECTION}<|tool_calls_section_end|>"],
    "deepseek": [
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ],
    "mistral": [
        f'[TOOL_CALLS] [{{"name": "look", "arguments": {ARGUMENTS}}}]',
        f"[TOOL_CALLS]look[ARGS]{ARGUMENTS}",
        f"[TOOL_CALLS]look[CALL_ID]VvvODy9mT[ARGS]{ARGUMENTS}",
    ],
    "gemma4": ['<|tool_call>call:look{city:<|"|><Rome><|"|>}<tool_call|>'],
    "llama3_json": [f'{start}{{"name": "look", "parameters": {ARGUMENTS}}}' for start in ("", "<|python_tag|>")],
    "pythonic": ["[look(city='<Rome>')]", '<|python_start|>[look(city="<Rome>")]<|python_end|>'],
    "harmony": [
        f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{ARGUMENTS}",
        f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.look<|channel|>commentary json"
        f"<|message|>{ARGUMENTS}",
    ],
}
MARK = re.compile(
    r"<\|\w+\|>|<\|\w+>|<\w+\|>|<\|\"\|>|\[[A-Z_]+\]|</?[\w:]*(?:tool_call|arg_\w+)>|<｜tool[^>]+>|｜DSML｜"
)
"""Texts that are special tokens of some tokenizers."""
TWO = {
    "deepseek_v32": f"<｜DSML｜tool_calls>\n{IN_BLOCK}\n{IN_BLOCK}\n</｜DSML｜tool_calls>",
    "kimi_k2": f"<|tool_calls_section_begin|>{IN_SECTION}{IN_SECTION}<|tool_calls_section_end|>",
    "deepseek": CALLS["deepseek"][1].replace(
        "<｜tool▁calls▁end｜>", "\n" + CALLS["deepseek"][1][len("<｜tool▁calls▁begin｜>") :]
    ),
    "mistral": CALLS["mistral"][0].replace("]", ", ").replace("[TOOL_CALLS, ", "[TOOL_CALLS]")
    + CALLS["mistral"][0][len("[TOOL_CALLS] [") :],
    "llama3_json": "; ".join([CALLS["llama3_json"][0]] * 2),
    "pythonic": "[look(city='<Rome>'), look(city='<Rome>')]",
}
"""Two calls, where they are not one after the other."""


def answer(family: str) -> str:
    return '<|channel|>final<|message|>{"n": 1}' if family == "harmony" else '{"n": 1}'


def constraint(tool_parser: str = "hermes", reasoning_parser: str = "none", **fields: Any) -> pb.Constraint:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "response_format": FORMAT, **fields}
    return chat_to_generate(validated(ChatRequest, body), tool_parser, reasoning_parser).sampling.constraint


def specials(call: str) -> list[dict[str, int]]:
    """Without the family's marks among the special tokens, and with all of them."""
    bytes_of_no_text = [0xC0, 0xC1, *range(0xF5, 0xFF)]
    return [{"<|eos|>": 0xFF}, dict(zip(dict.fromkeys(MARK.findall(call)), bytes_of_no_text, strict=False))]


@for_each("family", CALLS)
def test_output_is_calls_of_the_family_or_fits_the_format(family: str) -> None:
    reasoning = "harmony" if family == "harmony" else "none"
    held = constraint(family, reasoning)
    for call in CALLS[family]:
        for special in specials(call + answer(family)):
            assert accepts(held, call, special), call
            assert accepts(held, answer(family), special)
            for wrong in ("Hello", answer(family).replace("1", '"1"'), answer(family) + call, call + " and so", ""):
                assert not accepts(held, wrong, special), wrong
            # Only a list in Python ends before the mark behind it.
            ends = [call[:end] for end in ends_within(held, call, special)]
            assert ends == ([call.removesuffix("<|python_end|>")] if "<|python_end|>" in call else []), call
        parser = make_message_parser(reasoning, family, has_tools=True)
        assert parse(parser, list(call)).decoded == [("look", {"city": "<Rome>"})]


@for_each("family", [family for family in CALLS if family != "harmony"])
def test_one_call_at_most_where_calls_must_not_be_parallel(family: str) -> None:
    two = TWO.get(family) or "\n".join([CALLS[family][0]] * 2)
    for special in specials(two):
        assert accepts(constraint(family), two, special), two
        one = constraint(family, parallel_tool_calls=False)
        assert accepts(one, CALLS[family][0], special) and not accepts(one, two, special)
    assert len(parse(make_tool_parser(family), [two]).calls) == 2


def test_values_of_calls_in_python_are_those_that_its_parser_reads() -> None:
    held = constraint("pythonic")
    values = [
        "-1.5e3",
        "True",
        "none",
        "[1, 'a']",
        "{'a': {\"b\": None}}",
        r"'\u00e9\n\''",
        "(1,)",
        "f()",
        "'\\ud800'",
        "'\n'",
    ]
    for value in values:
        text = f"[look(a={value})]"
        is_read = bool(parse(make_tool_parser("pythonic"), [text]).calls)
        assert accepts(held, text) <= is_read
    assert [accepts(held, f"[look(a={value})]") for value in values] == [True, True, False, True, True, True] + [
        False
    ] * 4


def test_a_function_whose_name_a_family_cannot_write_is_not_called() -> None:
    tool = {"type": "function", "function": {"name": "look up"}}
    assert json.loads(constraint("pythonic", tools=[tool]).json_schema) == SCHEMA
    both = constraint("pythonic", tools=[tool, TOOL])
    assert accepts(both, "[look()]") and not accepts(both, "[look up()]")


def test_an_answer_like_a_call_of_another_function_is_no_call() -> None:
    held = constraint("llama3_json")
    assert not accepts(held, '{"name": "other", "parameters": {}}')
    assert accepts(constraint("llama3_json", response_format={"type": "json_object"}), '{"name": "other"}')


@for_each(
    "fields, text",
    [
        ({"response_format": FORMAT}, '{"n": 1}'),
        ({"response_format": {"type": "json_object"}}, "{}"),
        ({"structured_outputs": {"regex": "a+"}}, "aa"),
        ({"structured_outputs": {"choice": ["x|y", "<|z|>"]}}, "x|y"),
        ({"structured_outputs": {"grammar": 'start: "b"'}}, "b"),
    ],
)
def test_models_of_channels_answer_in_the_final_one(fields: dict[str, Any], text: str) -> None:
    held = constraint("harmony", "harmony", **{"tools": None, "response_format": None, **fields})
    final = f"<|channel|>final<|message|>{text}"
    for before in ("", "<|channel|>analysis<|message|>{Hm}<|end|><|start|>assistant"):
        for special in specials(final + before):
            assert accepts(held, before + final, special)
            assert not accepts(held, before + text, special) and not accepts(held, f"{before}{final}!", special)
            assert not accepts(held, before + CALLS["harmony"][0], special)
    assert parse(make_message_parser("harmony", "none", has_tools=False), list(final)).content == text
    continued = constraint("harmony", "harmony", **{"response_format": None, **fields}, continue_final_message=True)
    assert not continued.structural_tag and accepts(continued, text)


def test_any_object_and_thoughts_before_it() -> None:
    held = constraint(reasoning_parser="deepseek_r1", response_format={"type": "json_object"})
    assert (held.after_token, held.opening_token) == ("</think>", "<think>")
    assert accepts(held, '{"a": [1]}') and accepts(held, CALLS["hermes"][0]) and longest_start(held, "[1]") == 0


@for_each(
    "tool_parser, fields",
    [
        ("hermes", {"tools": None}),
        ("hermes", {"tool_choice": "none"}),
        ("none", {}),
    ],
)
def test_the_format_alone_holds_where_no_call_can_be_told_from_it(tool_parser: str, fields: dict[str, Any]) -> None:
    assert json.loads(constraint(tool_parser, **fields).json_schema) == SCHEMA


def test_a_text_that_is_too_long_to_be_read_is_left_for_the_coordinator_to_refuse() -> None:
    long = "{" * (MAX_CONSTRAINT_BYTES + 1)
    held = constraint("harmony", "harmony", response_format=None, structured_outputs={"json": long})
    assert held.json_schema == long


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
    channels = validated(ChatRequest, {"messages": asked.messages, "structured_outputs": {"regex": "("}})
    assert chat_field_names(channels, "harmony")["constraint.structural_tag"] == "structured_outputs.regex"
