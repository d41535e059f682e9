"""What Codex sends, written down from its public source and its version 0.171: a turn, and the next one with what it
keeps of the answer.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.gateway.api.errors import ApiError
from specdec.gateway.api.problems import validated
from specdec.gateway.responses.items import encrypted
from specdec.gateway.responses.request import ResponsesRequest
from specdec.gateway.responses.to_chat import to_chat
from specdec.gateway.translation.chat_request import chat_to_generate
from specdec.v1 import coordinator_pb2 as api

COMMAND = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command in a PTY.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "cmd": {"type": "string", "description": "Shell command to execute."},
            "max_output_tokens": {"type": "number"},
            "yield_time_ms": {"type": "number"},
        },
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
PLAN = {
    "type": "function",
    "name": "update_plan",
    "description": "Updates the task plan.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {
            "plan": {"type": "array", "items": {"type": "object", "properties": {"step": {"type": "string"}}}}
        },
        "required": ["plan"],
        "additionalProperties": False,
    },
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Use the `apply_patch` tool to edit files. This is a FREEFORM tool.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
SERVER = {
    "type": "namespace",
    "name": "mcp__docs",
    "description": "Tools of the MCP server docs.",
    "tools": [
        {"type": "function", "name": "find", "description": "Finds.", "strict": False, "parameters": {"type": "object"}}
    ],
}
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Searches tools.",
    "parameters": {"type": "object"},
}
TURN: dict[str, Any] = {
    "model": "target",
    "instructions": "You are a coding agent running in the Codex CLI.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions instructions>...</permissions instructions>"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "# AGENTS.md instructions"},
                {"type": "input_text", "text": "<environment_context>...</environment_context>"},
            ],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
    ],
    "tools": [
        COMMAND, PLAN, PATCH, {"type": "web_search", "external_web_access": False},
        {"type": "image_generation", "output_format": "png"}, SERVER, SEARCH,
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019a9d8e-4c11-7c33-9a57-b8a0e6f3a5c1",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "b3f0"},
}  # fmt: skip
ANSWERED: list[dict[str, Any]] = [
    # Codex drops thoughts and ids, and keeps what is encrypted.
    {"type": "reasoning", "summary": [], "content": None, "encrypted_content": encrypted("I list them.")},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]},
    {"type": "function_call", "name": "exec_command", "arguments": '{"cmd":"ls"}', "call_id": "call_1"},
    {"type": "function_call", "name": "find", "namespace": "mcp__docs", "arguments": "{}", "call_id": "call_2"},
    {"type": "function_call_output", "call_id": "call_1", "output": "Exit code: 0\nOutput:\na.py"},
    {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "found"}]},
    {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "custom_tool_call", "status": "completed", "call_id": "call_3", "name": "apply_patch", "input": "***"},
    {"type": "custom_tool_call_output", "call_id": "call_3", "output": "Done!"},
]
"""What another model that Codex used before may have left is in it, too."""


def translated(left_out: list[str] | None, **changed: Any) -> api.GenerateRequest:
    chat, _ = to_chat(validated(ResponsesRequest, {**TURN, **changed}, None), left_out)
    return chat_to_generate(chat.request, "hermes", "deepseek_r1")


def test_a_turn_is_a_chat_with_its_functions() -> None:
    left_out: list[str] = []
    body = translated(left_out)
    base = {"role": "developer", "content": [{"type": "input_text", "text": TURN["instructions"]}]}
    assert translated([], instructions=None, input=[base, *TURN["input"]]) == body  # as newer versions send it
    assert [message.role for message in body.messages.messages] == ["system", "user", "user"]
    system = body.messages.messages[0].content
    assert system.startswith("You are a coding agent") and system.endswith("</permissions instructions>")
    names = [tool["function"]["name"] for tool in json.loads(body.messages.tools_json)]
    assert names == ["exec_command", "update_plan", "mcp__docs__find"]
    assert left_out == ["tools[2]", "tools[3]", "tools[4]", "tools[6]"]
    assert json.loads(body.messages.template_variables_json) == {
        "reasoning_effort": "medium",
        "enable_thinking": True,
        "thinking": True,
    }


def test_the_next_turn_has_what_the_model_thought_said_and_called() -> None:
    left_out: list[str] = []
    body = translated(left_out, input=[*TURN["input"], *ANSWERED])
    messages = body.messages.messages[3:]
    assert [message.role for message in messages] == ["assistant", "tool", "tool", "assistant", "tool"]
    said = json.loads(messages[0].fields_json)
    assert (messages[0].content, said["reasoning_content"]) == ("Let me look.", "I list them.")
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["exec_command", "mcp__docs__find"]
    patched = json.loads(messages[3].fields_json)["tool_calls"][0]["function"]
    assert (patched["name"], patched["arguments"]) == ("apply_patch", {"input": "***"})
    assert "input[9]" in left_out


def test_its_last_message_may_have_a_schema() -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    text = {"format": {"type": "json_schema", "strict": True, "schema": schema, "name": "codex_output_schema"}}
    body = translated([], text=text, tools=[])
    assert json.loads(body.sampling.constraint.json_schema) == schema


def test_where_unknown_fields_are_refused_the_first_tool_of_another_kind_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        translated(None)
    assert (caught.value.param, caught.value.code) == ("tools[2].type", "unsupported_parameter")
