"""Translate a request of /v1/responses to a chat request."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.errors import invalid
from specdec.gateway.api.fields import JsonSchema, JsonSchemaFormat, ResponseFormat
from specdec.gateway.responses.items import Conversation
from specdec.gateway.responses.request import ResponseSchema, ResponsesRequest
from specdec.gateway.responses.tools import Tools, choice_of, tools_of
from specdec.gateway.translation.as_chat import AsChat, FieldNames
from specdec.gateway.translation.constraint import SCHEMA_FIELD as CHAT_SCHEMA_FIELD

_NAMES = MappingProxyType(
    {
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "messages": "input",
        "response_format": "text.format",
        CHAT_SCHEMA_FIELD: "text.format.schema",
        "tool_choice.function": "tool_choice",
    }
)
_SAME_NAMES = (
    *("model", "temperature", "top_p", "stream", "seed", "top_k", "min_p", "stop", "parallel_tool_calls"),
    *("speculation", "chat_template_kwargs", "cache_salt", "return_token_origins", "return_steps"),
)


def to_chat(asked: ResponsesRequest, left_out: list[str] | None) -> tuple[AsChat, Tools]:
    """The chat with the same output, and its tools.

    Args:
        asked: the client's request.
        left_out: gets the paths of tools and items that this server does not know; None: they are refused.

    Raises:
        ApiError and InvalidRequest: name the client's field.
    """
    if asked.previous_response_id is not None:
        problem = "responses are not kept: send the conversation as input"
        raise invalid("previous_response_id", problem, "previous_response_not_found")
    tools = tools_of(asked.tools, left_out)
    choice = choice_of(asked.tool_choice, tools)
    conversation = Conversation(left_out)
    conversation.begin(asked.instructions, asked.input)
    fields: dict[str, Any] = {name: getattr(asked, name) for name in _SAME_NAMES}
    request = ChatRequest.model_construct(
        **fields,
        messages=conversation.messages,
        continue_final_message=conversation.is_continued,
        tools=tools.functions or None,
        tool_choice=choice,
        max_completion_tokens=asked.max_output_tokens,
        logprobs=asked.num_logprobs is not None,
        top_logprobs=asked.num_logprobs,
        reasoning_effort=None if asked.reasoning is None else asked.reasoning.effort,
        response_format=_format(asked),
    )

    def locate(path: str) -> str | None:
        return conversation.locate(path) or tools.locate(path)

    return AsChat(request, FieldNames(_NAMES, locate)), tools


def _format(asked: ResponsesRequest) -> ResponseFormat | None:
    wanted = None if asked.text is None else asked.text.format
    if not isinstance(wanted, ResponseSchema):
        return wanted
    schema = JsonSchema.model_construct(name=wanted.name, schema_=wanted.schema_, strict=wanted.strict)
    return JsonSchemaFormat.model_construct(type="json_schema", json_schema=schema)
