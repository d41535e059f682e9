"""Requests of /v1/responses are chats: items, tools, choices, and errors that name what was sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.errors import ApiError, from_specdec
from specdec.gateway.api.problems import validated
from specdec.gateway.responses.items import encrypted
from specdec.gateway.responses.request import ResponsesRequest
from specdec.gateway.responses.to_chat import to_chat
from specdec.gateway.translation.chat_request import chat_to_generate
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest
from tests.support.cost import lines_run
from tests.support.for_each import for_each

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": PARAMETERS, "strict": False}
SUB = {"type": "function", "name": "sub", "parameters": PARAMETERS}
SPACE = {"type": "namespace", "name": "maths", "description": "More.", "tools": [SUB, {"type": "custom", "name": "x"}]}
SEARCH = {"type": "web_search"}
USER = {"role": "user", "content": "1?"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": '{"a": 1}', "status": "x"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
THOUGHT = {
    "type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}],
}  # fmt: skip
SAID = {
    "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
    "content": [{"type": "output_text", "text": "I add.", "annotations": [], "logprobs": []}],
}  # fmt: skip


def generate(left_out: list[str] | None = None, /, **fields: Any) -> api.GenerateRequest:
    chat, _ = to_chat(validated(ResponsesRequest, {"input": "hi", **fields}), left_out)
    try:
        return chat_to_generate(chat.request, "hermes", "deepseek_r1")
    except InvalidRequest as error:
        raise chat.as_written(error) from None


def refusal(**fields: Any) -> ApiError:
    with pytest.raises((ApiError, InvalidRequest)) as caught:
        generate(None, **fields)
    return caught.value if isinstance(caught.value, ApiError) else from_specdec(caught.value, {})


def told(body: api.GenerateRequest) -> list[dict[str, Any]]:
    """The messages with all fields."""
    return [{"role": m.role, "content": m.content, **json.loads(m.fields_json or "{}")} for m in body.messages.messages]


def as_chat(*messages: dict[str, Any], **fields: Any) -> api.GenerateRequest:
    return chat_to_generate(validated(ChatRequest, {"messages": list(messages), **fields}), "hermes", "deepseek_r1")


def in_chat(*tools: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {n: v for n, v in tool.items() if n != "type"}} for tool in tools]


def test_a_text_and_instructions_are_a_conversation() -> None:
    body = generate(instructions="be kind", max_output_tokens=9, temperature=0, top_logprobs=2, seed=4)
    assert told(body) == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    assert (body.sampling.max_tokens, body.sampling.logprobs, body.sampling.seed) == (9, 2, 4)
    assert body.sampling.temperature == 0.0
    assert body.sampling.HasField("temperature")


def test_a_response_and_a_chat_ask_for_the_same() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = as_chat(
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "reasoning_content": "Hm.", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        tools=in_chat(ADD, SUB), tool_choice="required", parallel_tool_calls=False, max_completion_tokens=5,
        reasoning_effort="low", temperature=0.5,
    )  # fmt: skip
    assert chat == generate(
        instructions="Be brief.", input=[USER, THOUGHT, SAID, CALL, RESULT], tools=[ADD, SUB], tool_choice="required",
        parallel_tool_calls=False, max_output_tokens=5, reasoning={"effort": "low", "summary": "auto"}, temperature=0.5,
    )  # fmt: skip


def test_what_the_assistant_said_in_a_row_is_one_message() -> None:
    items = [USER, THOUGHT, CALL, THOUGHT, SAID, {**CALL, "call_id": "c2"}, RESULT, SAID, SAID, CALL]
    _, said, result, alone, last = told(generate(input=items))
    assert (said["reasoning_content"], said["content"]) == ("Hm.Hm.", "I add.")
    assert [call["id"] for call in said["tool_calls"]] == ["c1", "c2"]
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "c1", "2")
    assert (alone["content"], "tool_calls" in alone) == ("I add.", False)
    assert (last["content"], len(last["tool_calls"])) == ("I add.", 1)


def test_results_may_be_parts_and_calls_of_custom_tools_and_namespaces_are_calls() -> None:
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "***"}
    items = [
        {**CALL, "namespace": "maths"},
        {**RESULT, "output": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        custom,
        {**RESULT, "type": "custom_tool_call_output"},
    ]
    first, result, second, _ = told(generate(input=items))
    assert first["tool_calls"][0]["function"]["name"] == "maths__add"
    assert [part["text"] for part in result["content"]] == ["a", "b"]
    assert second["tool_calls"][0]["function"]["arguments"] == {"input": "***"}


@for_each(
    "item, thoughts",
    [
        (THOUGHT, "Hm."),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]}, "So."),
        ({"type": "reasoning", "summary": [], "encrypted_content": encrypted("Ä.")}, "Ä."),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "content": None}, "x"),
        ({**THOUGHT, "encrypted_content": encrypted("Hm.")}, "Hm."),
        ({"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABo-of-another-server"}, None),
        ({"type": "reasoning", "summary": [], "encrypted_content": "specdec1:?"}, None),
        ({"type": "reasoning", "summary": [], "encrypted_content": None}, None),
    ],
)
def test_thoughts_come_back_in_each_form(item: dict[str, Any], thoughts: str | None) -> None:
    assert told(generate(input=[USER, item, SAID]))[1].get("reasoning_content") == thoughts


def test_a_wish_to_compact_the_conversation_changes_nothing() -> None:
    assert generate(context_management=[{"type": "compaction", "compact_threshold": 1000}]) == generate()


def test_a_last_message_that_is_incomplete_is_continued() -> None:
    incomplete = {**SAID, "status": "incomplete"}
    assert generate(input=[USER, incomplete]).messages.continue_final_message
    for items in ([USER, SAID], [USER, incomplete, USER], [USER, CALL, incomplete], [USER, incomplete, CALL, RESULT]):
        assert not generate(input=items).messages.continue_final_message


def test_instructions_and_the_first_messages_of_system_and_developer_are_one_system_message() -> None:
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be exact."}]}
    for fields in (
        {"instructions": "Be brief.", "input": [developer, USER, developer]},
        {"input": [{"role": "system", "content": "Be brief."}, developer, USER, developer]},
    ):
        messages = told(generate(**fields))
        assert [message["role"] for message in messages] == ["system", "user", "system"]
        assert messages[0]["content"] == "Be brief.\n\nBe exact."
    assert generate(input=[developer, USER]) == as_chat({**developer, "role": "system"}, USER)


def test_functions_of_namespaces_are_shown_and_other_tools_are_left_out_by_path() -> None:
    left_out: list[str] = []
    body = generate(left_out, tools=[SEARCH, ADD, SPACE], input=[USER, {"type": "web_search_call", "id": "ws_1"}])
    shown = json.loads(body.messages.tools_json)
    assert [tool["function"]["name"] for tool in shown] == ["add", "maths__sub"]
    assert shown[0] == in_chat(ADD)[0]
    assert left_out == ["tools[0]", "tools[2].tools[1]", "input[1]"]


@for_each(
    "choice, shown, forced",
    [
        (None, ["add", "maths__sub"], []),
        ("auto", ["add", "maths__sub"], []),
        ("none", None, []),
        ("required", ["add", "maths__sub"], ["add", "maths__sub"]),
        ({"type": "function", "name": "add"}, ["add"], ["add"]),
        ({"type": "function", "name": "sub", "namespace": "maths"}, ["maths__sub"], ["maths__sub"]),
        ({"type": "function", "name": "maths__sub"}, ["maths__sub"], ["maths__sub"]),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}, ["add"], []),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
            ["add"],
            ["add"],
        ),
    ],
)
def test_each_tool_choice(choice: Any, shown: list[str] | None, forced: list[str]) -> None:
    body = generate([], tools=[ADD, SPACE], tool_choice=choice)
    tools = body.messages.tools_json
    assert (json.loads(tools) if tools else None) is None or [
        tool["function"]["name"] for tool in json.loads(tools)
    ] == shown
    assert bool(tools) == (shown is not None)
    tag = body.sampling.constraint.structural_tag
    tags = json.loads(tag)["format"]["elements"][1]["tags"] if tag else []
    assert [json.loads(each["begin"] + "{}}")["name"] for each in tags] == forced


@for_each(
    "fields, param",
    [
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        (
            {"text": {"format": {"type": "json_schema", "strict": True, "schema": {"not": {"type": "string"}}}}},
            "text.format.schema.not",
        ),
        ({"truncation": "middle"}, "truncation"),
        ({"include": ["message.output_text.logprobs", "thoughts"]}, "include[1]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"colour": 1}, "colour"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [USER, {"type": "computer_call"}]}, "input[1].type"),
        ({"input": [USER, {"type": "web_search_call"}]}, "input[1].type"),
        ({"input": [USER, {"type": ["message"]}]}, "input[1].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"instructions": "x", "input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"instructions": "x", "input": [USER, {"role": "user"}]}, "input[1].content"),
        ({"instructions": "x", "input": [{"role": "system", "content": 5}]}, "input[0].content"),
        ({"input": [USER, {**SAID, "content": None}]}, "input[1].content"),
        ({"input": [USER, {**SAID, "content": [{"type": "image"}]}]}, "input[1].content[0].type"),
        ({"input": [USER, {**CALL, "call_id": None}]}, "input[1].call_id"),
        ({"input": [USER, {**CALL, "arguments": {}}]}, "input[1].arguments"),
        ({"input": [THOUGHT, CALL, {**CALL, "name": ""}]}, "input[2].name"),
        ({"input": [THOUGHT, CALL, {**CALL, "arguments": "\ud800"}]}, "input[2].arguments"),
        ({"input": [CALL, {**RESULT, "call_id": 1}]}, "input[1].call_id"),
        ({"input": [CALL, {**RESULT, "output": 1}]}, "input[1].output"),
        ({"input": [CALL, {**RESULT, "output": [{"type": "input_image"}]}]}, "input[1].output[0].type"),
        ({"input": [{**THOUGHT, "content": "x"}]}, "input[0].content"),
        ({"input": [{**THOUGHT, "content": [{"type": "reasoning_text"}]}]}, "input[0].content[0].text"),
        ({"tools": [ADD, SEARCH]}, "tools[1].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"tools": [ADD, {**SUB, "name": ""}]}, "tools[1].name"),
        ({"tools": [{**ADD, "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{**ADD, "description": 1}]}, "tools[0].description"),
        ({"tools": [{**SPACE, "name": ""}]}, "tools[0].name"),
        ({"tools": [{**SPACE, "tools": None}]}, "tools[0].tools"),
        ({"tools": [{**SPACE, "tools": [1]}]}, "tools[0].tools[0]"),
        ({"tools": [{**SPACE, "tools": [SUB, {**SUB, "parameters": 1, "name": "b"}]}]}, "tools[0].tools[1].parameters"),
        ({"tools": [{**SPACE, "tools": [SUB, SUB]}]}, "tools[0].tools[1].name"),
        ({"tools": [{**SUB, "name": "maths__sub"}, {**SPACE, "tools": [SUB]}]}, "tools[1].tools[0].name"),
        ({"tools": [{**SPACE, "tools": [SUB]}, {**SUB, "name": "maths__sub"}]}, "tools[1].name"),
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.name"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "all", "tools": []}}, "tool_choice.mode"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        (
            {"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [SUB]}},
            "tool_choice.tools[0].name",
        ),
        (
            {
                "tools": [{**ADD, "strict": True, "parameters": {"not": {"type": "string"}}}, SUB],
                "tool_choice": "required",
            },
            "tools[0].parameters.not",
        ),
    ],
)
def test_what_is_refused_is_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.status, error.param) == (400, param)


def test_a_response_that_was_never_kept_is_not_found() -> None:
    error = refusal(previous_response_id="resp_0")
    assert (error.code, "send the conversation" in error.message) == ("previous_response_not_found", True)


def test_speculation_and_what_is_told_of_it_are_asked_for_as_in_chats() -> None:
    body = generate(return_steps=True, speculation={"enabled": False}, cache_salt="x")
    assert body.cache_salt == "x"
    assert body.with_steps and body.speculation.enabled is False
    assert not generate().with_steps
    assert refusal(prediction={"type": "content", "content": "x"}).param == "prediction"


def test_a_long_run_of_items_and_tools_costs_no_more_than_each_of_them() -> None:
    def cost(num: int) -> int:
        asked = validated(
            ResponsesRequest,
            {
                "input": [THOUGHT, CALL, SAID] * num,
                "tools": [{"type": "namespace", "name": "n", "tools": [{**SUB, "name": str(i)} for i in range(num)]}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": f"n__{i}"} for i in range(num)],
                },
            },
        )
        return lines_run(lambda: to_chat(asked, None))

    assert cost(400) < 4.5 * cost(100)
