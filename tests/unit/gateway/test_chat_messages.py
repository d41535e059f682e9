"""Messages and tools of chat requests: what templates get of them, and what is refused by its path."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from specdec.gateway.chat.messages import to_chat_messages
from specdec.wire.errors import InvalidRequest
from tests.support.for_each import for_each

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "g"}}
USER = {"role": "user", "content": "Hello."}


def read(message: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What a template gets of one message."""
    told = to_chat_messages([message], **options).messages[0]
    fields = json.loads(told.fields_json) if told.fields_json else {}
    return {"role": told.role, "content": told.content, **fields}


def refused(messages: Any, tools: Any = None, **options: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        to_chat_messages(messages, tools, **options)
    return caught.value.field


def test_texts_and_parts_of_text_stay_what_they_are() -> None:
    assert read(USER) == USER
    parts = [{"type": "text", "text": "é"}, {"type": "input_text", "text": "b"}, "c"]
    assert read({"role": "user", "content": parts})["content"] == [{"type": "text", "text": text} for text in "ébc"]
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert read(refusal)["content"] == [{"type": "text", "text": "No."}]
    assert read({"role": "assistant", "content": None, "refusal": "No."})["content"] == "No."


def test_developers_are_the_system() -> None:
    assert read({"role": "developer", "content": "Be terse."}) == {"role": "system", "content": "Be terse."}


def test_calls_stay_as_they_were_told() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":"é"}'}}
    told = read({"role": "assistant", "content": None, "tool_calls": [call]})
    assert told == {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("arguments", "expected"), [("", "{}"), (None, "{}"), ({"a": 1}, {"a": 1}), ('{"a"', '{"a"'), ("[1]", "[1]")]
)
def test_no_arguments_are_an_empty_object_and_others_stay(arguments: Any, expected: Any) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    assert read({"role": "assistant", "tool_calls": [call]})["tool_calls"][0]["function"]["arguments"] == expected


def test_what_templates_may_read_besides_is_kept_and_what_they_do_not_is_left_out() -> None:
    answer = {"role": "tool", "tool_call_id": "c1", "content": "4", "name": "f", "unknown": 1}
    assert read(answer) == {"role": "tool", "tool_call_id": "c1", "content": "4", "name": "f"}
    thought = {"role": "assistant", "content": "4", "reasoning_content": "2+2", "tool_calls": None, "audio": None}
    assert read(thought) == {"role": "assistant", "content": "4", "reasoning_content": "2+2"}


@for_each(
    "part",
    [
        {"type": "thinking", "thinking": "2+2"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}]},
        {"type": "reasoning", "reasoning": "2+2"},
        {"type": "reasoning", "text": "2+2"},
    ],
)
def test_thoughts_among_the_parts_of_an_answer_are_its_reasoning(part: dict[str, Any]) -> None:
    said = {"role": "assistant", "content": [part, {"type": "text", "text": "4"}]}
    parts = [{"type": "text", "text": "4"}]
    assert read(said) == {"role": "assistant", "content": parts, "reasoning_content": "2+2"}
    assert read({**said, "reasoning_content": "other"})["reasoning_content"] == "other"
    assert refused([{"role": "assistant", "content": [{"type": "thinking", "thinking": [5]}]}]) == (
        "messages[0].content[0].thinking[0]"
    )
    assert refused([{"role": "user", "content": [part]}]) == "messages[0].content[0].type"


def test_an_empty_answer_and_a_function_that_returns_nothing_may_come_back_as_null() -> None:
    for role in ("assistant", "tool"):
        for more in ({}, {"content": None}, {"content": None, "tool_calls": []}):
            assert read({"role": role, **more}) == {"role": role, "content": ""}


def test_models_of_pydantic_are_taken_as_dicts_are() -> None:
    class Part(BaseModel):
        type: str
        text: str

    class Asked(BaseModel):
        role: str
        content: list[Part]
        name: str | None = None

    told = to_chat_messages([Asked(role="user", content=[Part(type="text", text="a")])])
    assert told == to_chat_messages([{"role": "user", "content": [{"type": "text", "text": "a"}]}])


@for_each(
    "message, path",
    [
        ("hello", ""),
        ({"content": "a"}, ".role"),
        ({"role": "robot", "content": "a"}, ".role"),
        ({"role": "user"}, ".content"),
        ({"role": "user", "content": 5}, ".content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, ".content[0].type"),
        ({"role": "user", "content": ["a", {"type": "input_audio"}]}, ".content[1].type"),
        ({"role": "user", "content": [{"type": "text"}]}, ".content[0].text"),
        ({"role": "user", "content": [{"type": ["text"]}]}, ".content[0].type"),
        ({"role": "user", "content": [5]}, ".content[0]"),
        ({"role": "user", "content": "\ud800"}, ".content"),
        ({"role": "user", "content": "a", "name": 5}, ".name"),
        ({"role": "assistant", "audio": {"id": "x"}}, ".audio"),
        ({"role": "assistant", "function_call": {"name": "f"}}, ".function_call"),
        ({"role": "assistant", "tool_calls": "f"}, ".tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, ".tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, ".tool_calls[0].type"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 0}}]},
            ".tool_calls[0].function.arguments",
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, ".tool_calls[0].function.name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]},
            ".tool_calls[0].function.arguments",
        ),
    ],
)
def test_what_is_wrong_with_a_message_is_named_by_its_path(message: Any, path: str) -> None:
    assert refused([USER, message]) == f"messages[1]{path}"


@pytest.mark.parametrize("messages", [[], "hello", {"role": "user"}, None])
def test_messages_are_a_list_and_not_empty(messages: Any) -> None:
    assert refused(messages) == "messages"


@pytest.mark.parametrize(
    ("tool", "path"),
    [
        (5, ""),
        ({}, ".type"),
        ({"type": "web_search"}, ".type"),
        ({"type": "function"}, ".function"),
        ({"type": "function", "function": {}}, ".function.name"),
        ({"type": "function", "function": {"name": "x" * 257}}, ".function.name"),
        ({"type": "function", "function": {"name": "f", "description": 5}}, ".function.description"),
        ({"type": "function", "function": {"name": "f", "parameters": []}}, ".function.parameters"),
    ],
)
def test_what_is_wrong_with_a_tool_is_named_by_its_path(tool: Any, path: str) -> None:
    assert refused([USER], [TOOL, tool]) == f"tools[1]{path}"


def test_templates_are_shown_the_tools_that_may_be_called() -> None:
    def shown(tool_choice: Any) -> list[str]:
        told = to_chat_messages([USER], [TOOL, OTHER], tool_choice=tool_choice).tools_json
        return [tool["function"]["name"] for tool in json.loads(told or "[]")]

    assert shown(None) == shown("auto") == shown("required") == ["f", "g"]
    assert shown("none") == []
    assert shown({"type": "function", "function": {"name": "g"}}) == ["g"]
    for mode in ("auto", "required"):
        assert shown(allowed("g", mode=mode)) == ["g"] and shown(allowed("g", "f", mode=mode)) == ["f", "g"]


def allowed(*names: str, mode: Any = "auto") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("tool_choice", "tools", "field"),
    [
        ("some", [TOOL], "tool_choice"),
        (5, [TOOL], "tool_choice"),
        ({"type": "custom"}, [TOOL], "tool_choice.type"),
        ({"type": "function"}, [TOOL], "tool_choice.function"),
        ({"type": "function", "function": {"name": "h"}}, [TOOL], "tool_choice.function.name"),
        ("required", [], "tool_choice"),
        ({"type": "function", "function": {"name": ""}}, [TOOL], "tool_choice.function.name"),
        ({"type": "allowed_tools"}, [TOOL], "tool_choice.allowed_tools"),
        (allowed("f", mode="any"), [TOOL], "tool_choice.allowed_tools.mode"),
        (allowed(), [TOOL], "tool_choice.allowed_tools.tools"),
        (allowed("f", "h"), [TOOL], "tool_choice.allowed_tools.tools[1].function.name"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "mcp"}]}},
            [TOOL],
            "tool_choice.allowed_tools.tools[0].type",
        ),
    ],
)
def test_a_tool_choice_that_cannot_be_is_refused(tool_choice: Any, tools: Any, field: str) -> None:
    assert refused([USER], tools, tool_choice=tool_choice) == field


def test_what_else_a_template_is_told_is_carried_on() -> None:
    chat = to_chat_messages([USER], continue_final_message=True, template_variables={"enable_thinking": False})
    assert chat.continue_final_message
    assert not chat.HasField("add_generation_prompt")
    assert json.loads(chat.template_variables_json) == {"enable_thinking": False}
    assert to_chat_messages([USER], add_generation_prompt=False).HasField("add_generation_prompt")
    assert refused([USER], template_variables={"x": float("nan")}) == "template_variables"
