"""/v1/messages: its requests are chats, and its events add up to its message."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.gateway.anthropic.answer import MessageEvents, whole_message
from specdec.gateway.anthropic.request import MessagesRequest
from specdec.gateway.anthropic.to_chat import to_chat
from specdec.gateway.api.errors import ApiError
from specdec.gateway.api.problems import validated
from specdec.gateway.chat.parsing import make_message_parser
from specdec.gateway.routes.answers import JsonResponse
from specdec.gateway.translation.chat_request import chat_to_generate
from specdec.gateway.translation.head import AnswerHead
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest
from tests.support.for_each import for_each
from tests.support.services.chunks import choice_finished, delta, finished, started, texts_of

NO_TEXTS = texts_of([])
TOOL = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": "x y"}}\n</tool_call>'
ANSWER = f"<think>Let me see.</think>\n\nI add.\n{CALLED}"


def generate(*messages: Any, **fields: Any) -> api.GenerateRequest:
    body = {"model": "m", "max_tokens": 9, "messages": list(messages) or [{"role": "user", "content": "hi"}], **fields}
    chat = to_chat(validated(MessagesRequest, body))
    try:
        return chat_to_generate(chat.request, "hermes", "deepseek_r1")
    except InvalidRequest as error:
        raise chat.as_written(error) from None


def fields(body: api.GenerateRequest, index: int) -> dict[str, Any]:
    """Fields of a message besides its role and its text."""
    told: dict[str, Any] = json.loads(body.messages.messages[index].fields_json)
    return told


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content, "cache_control": {"type": "ephemeral"}}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **more}


def events_of(pieces: list[str], reason: Any = pb.FINISH_REASON_STOP, **ending: Any) -> list[dict[str, Any]]:
    parser = make_message_parser("deepseek_r1", "hermes", has_tools=True)
    answer = MessageEvents(AnswerHead("msg_1", 5), parser)
    chunks = [started(), *map(delta, pieces), choice_finished(reason, **ending), finished()]
    return [event for chunk in chunks for event in answer.add(chunk, NO_TEXTS)]


def test_system_blocks_turns_and_parameters_are_a_chat() -> None:
    body = generate(
        user(text("hi")), {"role": "assistant", "content": "yes"}, user(text("a"), text("b")),
        system=[text("be"), text("kind")], stop_sequences=["\n\nHuman:"], temperature=0.5, top_k=4, seed=3,
    )  # fmt: skip
    said = [(message.role, message.content) for message in body.messages.messages]
    assert said[0] == ("system", "be\nkind")
    assert [role for role, _ in said[1:]] == ["user", "assistant", "user"]
    assert [part["text"] for part in fields(body, 3)["content"]] == ["a", "b"]
    sampling = body.sampling
    assert (list(sampling.stop), sampling.max_tokens, sampling.top_k, sampling.seed) == (["\n\nHuman:"], 9, 4, 3)


def test_results_of_tools_are_messages_of_their_own_before_the_users_text() -> None:
    body = generate(
        user(text("1?")), assistant({"type": "thinking", "thinking": "Hm.", "signature": "s"}, text("So."), CALL),
        user(result([text("2"), text("3")]), text("And?")), tools=[TOOL],
    )  # fmt: skip
    roles = [message.role for message in body.messages.messages]
    assert roles == ["user", "assistant", "tool", "user"]
    told = body.messages.messages[2]
    assert (told.content, fields(body, 2)["tool_call_id"]) == ("2\n3", "toolu_1")
    assert fields(body, 1)["reasoning_content"] == "Hm."
    called = fields(body, 1)["tool_calls"]
    assert [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in called] == [
        ("toolu_1", "add", {"a": 1})
    ]
    failed = generate(user(text("1?")), assistant(CALL), user(result("broken", is_error=True)), tools=[TOOL])
    assert failed.messages.messages[-1].content == "Error: broken"


def test_turns_of_one_role_are_one_and_a_last_turn_of_the_assistant_is_continued() -> None:
    body = generate({"role": "user", "content": "a"}, {"role": "user", "content": "b"}, assistant(text("I say")))
    assert [message.role for message in body.messages.messages] == ["user", "assistant"]
    assert body.messages.continue_final_message


@for_each(
    "choice, expected",
    [
        ({"type": "any"}, True),
        ({"type": "tool", "name": "add"}, True),
        ({"type": "auto"}, False),
        ({"type": "none"}, False),
    ],
)
def test_a_choice_of_tools_forces_calls_where_it_says_so(choice: dict[str, Any], expected: bool) -> None:
    body = generate(tools=[TOOL], tool_choice=choice)
    assert body.sampling.HasField("constraint") is expected
    assert bool(body.messages.tools_json) is (choice["type"] != "none")


@for_each(
    "fields, param",
    [
        ({"messages": [user({"type": "image", "source": {}})]}, "messages[0].content[0].type"),
        ({"messages": [user(text("a")), user(CALL)]}, "messages[1].content[0].type"),
        ({"messages": [user(result([{"type": "image"}]))]}, "messages[0].content[0].content[0].type"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [user(text("a")), assistant(CALL)], "tools": [TOOL]}, "messages[1]"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice.name"),
        ({"tools": [{**TOOL, "name": {}}], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice.name"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"container": "c"}, "container"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        generate(*fields.pop("messages", ()), **fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_thinking_and_a_schema_reach_template_and_constraint() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    body = generate(
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert json.loads(body.messages.template_variables_json) == {"enable_thinking": True, "thinking": True}
    assert json.loads(body.sampling.constraint.json_schema)["required"] == ["a"]


FOUND = {"type": "search_result", "source": "u", "title": "T", "content": [text("found")]}
DOCUMENTS = [
    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "found"}, "title": "T"},
    {"type": "document", "source": {"type": "content", "content": [text("found")]}, "title": "T"},
]


@for_each("block", [FOUND, *DOCUMENTS])
def test_what_was_found_is_text_in_a_turn_and_in_a_result(block: dict[str, Any]) -> None:
    body = generate(user(text("1?")), assistant(CALL), user(result([text("a"), block])), user(block), tools=[TOOL])
    assert body.messages.messages[2].content == "a\nT\nfound"
    assert "T\\nfound" in body.messages.messages[3].fields_json + body.messages.messages[3].content.replace("\n", "\\n")
    with pytest.raises(ApiError) as caught:
        generate(user({**block, "source": {"type": "url", "url": "x"}, "content": 5}))
    assert caught.value.param is not None and caught.value.param.startswith("messages[0].content[0].")


def test_what_another_server_ran_is_left_out_by_path_or_refused() -> None:
    searched = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    turns = [user(text("1?")), assistant(searched, found, text("yes")), user(text("2?"))]
    left_out: list[str] = []
    asked = validated(MessagesRequest, {"model": "m", "max_tokens": 9, "messages": turns})
    assert (
        to_chat(asked, left_out).request.messages
        == to_chat(
            validated(
                MessagesRequest,
                {"model": "m", "max_tokens": 9, "messages": [turns[0], assistant(text("yes")), turns[2]]},
            )
        ).request.messages
    )
    assert left_out == ["messages[1].content[0]", "messages[1].content[1]"]
    with pytest.raises(ApiError) as caught:
        to_chat(asked, None)
    assert caught.value.param == "messages[1].content[0].type"
    with pytest.raises(ApiError):
        to_chat(validated(MessagesRequest, {"model": "m", "max_tokens": 9, "messages": [user(searched)]}), [])


def test_an_older_name_of_the_format_and_newer_kinds_of_thinking_are_taken() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": schema}
    assert json.loads(generate(output_format=form).sampling.constraint.json_schema)["required"] == ["a"]
    chat = to_chat(
        validated(MessagesRequest, {"model": "m", "max_tokens": 9, "messages": [user()], "output_format": form})
    )
    assert chat.path("response_format.json_schema.schema.x") == "output_format.schema.x"
    for kind, expected in (("between_tools", True), ("adaptive", True), ("disabled", False)):
        variables = json.loads(generate(thinking={"type": kind}).messages.template_variables_json)
        assert variables == {"enable_thinking": expected, "thinking": expected}
    effort = generate(output_config={"effort": "xhigh"}).messages.template_variables_json
    assert json.loads(effort) == {"reasoning_effort": "xhigh"}


def test_thoughts_text_and_calls_are_blocks() -> None:
    message = whole_message(events_of([ANSWER]))
    assert message["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": ""},
        {"type": "text", "text": "I add."},
        {"type": "tool_use", "id": message["content"][2]["id"], "name": "add", "input": {"a": 12, "b": "x y"}},
    ]
    assert (message["stop_reason"], message["stop_sequence"], message["role"]) == ("tool_use", None, "assistant")
    assert message["usage"] == {
        "input_tokens": 1, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 4
    }  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, len(ANSWER)), max_size=12), st.integers(0, len(ANSWER)))
def test_however_it_is_cut_the_events_are_well_formed_and_say_the_same(cuts: list[int], end: int) -> None:
    said = ANSWER[:end]
    places = [0, *sorted(min(cut, end) for cut in cuts), end]
    pieces = [said[a:b] for a, b in itertools.pairwise(places)]
    events = events_of(pieces, pb.FINISH_REASON_LENGTH)
    open_block = None
    for event in events[1:-2]:
        kind, index = event["type"], event["index"]
        if kind == "content_block_start":
            assert open_block is None
            open_block = index
        assert index == open_block
        if kind == "content_block_stop":
            open_block = None
    assert open_block is None
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]

    def without_id(message: dict[str, Any]) -> list[dict[str, Any]]:
        return [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]

    whole = whole_message(events)
    assert without_id(whole) == without_id(whole_message(events_of([said], pb.FINISH_REASON_LENGTH)))
    assert whole["stop_reason"] == "max_tokens"
    assert all(isinstance(block["input"], dict) for block in whole["content"] if block["type"] == "tool_use")


def test_a_stop_sequence_is_told() -> None:
    message = whole_message(events_of(["<think></think>a"], stop_string="\n\nHuman:"))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "\n\nHuman:")
    assert [block["type"] for block in message["content"]] == ["text"]


def test_integers_of_any_size_in_a_calls_arguments_reach_the_client() -> None:
    called = CALLED.replace("12", "9" * 30)
    message = whole_message(events_of([called]))
    assert json.loads(JsonResponse(message).body)["content"][-1]["input"]["a"] == int("9" * 30)


def test_turns_of_one_role_are_joined_in_one_list() -> None:
    parts = user(*[text("x")] * 3)
    body = generate(parts, *[user(text(str(index))) for index in range(3)], {"role": "user", "content": "end"})
    assert [message.role for message in body.messages.messages] == ["user"]
    assert len(parts["content"]) == 3
