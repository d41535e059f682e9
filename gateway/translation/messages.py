"""Conversations of text, from the HTTP request's messages to the gRPC request's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from gateway.api.errors import invalid, unsupported
from specdec.v1 import coordinator_pb2 as api

_ROLES = ("system", "developer", "user", "assistant", "tool")


def chat_messages(messages: Sequence[dict[str, Any]]) -> api.ChatMessages:
    """The conversation. Raises ApiError, which names the message and its field."""
    return api.ChatMessages(messages=[_message(f"messages[{i}]", message) for i, message in enumerate(messages)])


def _message(at: str, message: dict[str, Any]) -> api.ChatMessage:
    role = message.get("role")
    if role not in _ROLES:
        raise invalid(f"{at}.role", f"must be one of {', '.join(_ROLES)}")
    return api.ChatMessage(role=role, content=_text(f"{at}.content", message.get("content")))


def _text(at: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(at, "must be a text or a list of parts")
    parts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(f"{at}[{index}].type", "only parts of type text are supported")
        parts.append(part["text"])
    return "".join(parts)


class Conversation(Protocol):
    """What requests with messages say of them."""

    @property
    def add_generation_prompt(self) -> bool | None:
        """End where the assistant's turn starts."""

    @property
    def continue_final_message(self) -> bool | None:
        """End within the last message."""

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None:
        """Further variables of the template."""

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """Functions that may be called."""


def conversation(
    request: Conversation, messages: Sequence[dict[str, Any]], reasoning_effort: str | None = None
) -> api.ChatMessages:
    """The conversation with all that its template is told. Raises ApiError, which names the field."""
    if request.continue_final_message and request.add_generation_prompt:
        raise invalid("add_generation_prompt", "goes not together with continue_final_message")
    if request.tools:
        raise unsupported("tools")
    told = chat_messages(messages)
    told.continue_final_message = bool(request.continue_final_message)
    if request.add_generation_prompt is not None:
        told.add_generation_prompt = request.add_generation_prompt
    variables = dict(request.chat_template_kwargs or {})
    if reasoning_effort is not None:
        variables.setdefault("reasoning_effort", reasoning_effort)
    if variables:
        told.template_variables_json = orjson.dumps(variables).decode()
    return told
