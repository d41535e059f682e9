"""Make conversations for the coordinator from plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.v1 import coordinator_pb2
from specdec.wire.errors import InvalidRequest


def chat_messages(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    template_variables: Mapping[str, Any] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str = "",
) -> coordinator_pb2.ChatMessages:
    """Return a conversation for a request.

    Args:
        messages: Oldest first; each with a role, and a content that is a text, a list of parts or absent. All other
            fields reach the model's chat template, for example tool_calls with arguments as objects.
        tools: Descriptions of functions, in the form that the template takes.
        add_generation_prompt: End where the assistant's turn starts; None: unless the last message is continued.
        continue_final_message: End within the last message, so that the output continues it.
        template_variables: Further variables of the template, for example enable_thinking.
        documents: Documents for the answer, for templates that read them.
        chat_template: Jinja source that replaces the model's template, for coordinators with
            trust_request_chat_template.

    Raises:
        InvalidRequest: A message is no mapping, or a value is no JSON or no UTF-8 text; names its path, such as
            messages[2].
    """
    return coordinator_pb2.ChatMessages(
        messages=[_message(f"messages[{index}]", message) for index, message in enumerate(messages)],
        tools_json=_encode("tools", list(tools)) if tools else "",
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_variables_json=_encode("template_variables", dict(template_variables)) if template_variables else "",
        documents_json="" if documents is None else _encode("documents", list(documents)),
        chat_template=_text("chat_template", chat_template),
    )


def _message(path: str, message: Mapping[str, Any]) -> coordinator_pb2.ChatMessage:
    if not isinstance(message, Mapping):
        raise InvalidRequest(path, f"is a {type(message).__name__}, not a message with a role and a content")
    content = message.get("content")
    # Null fields count as absent, except the content: an absent content differs from an empty one.
    fields = {name: value for name, value in message.items() if name not in ("role", "content") and value is not None}
    if not isinstance(content, str):
        fields["content"] = content
        content = ""
    fields_json = _encode(path, fields) if fields else ""
    try:
        return coordinator_pb2.ChatMessage(role=message.get("role", ""), content=content, fields_json=fields_json)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(path, f"is not text: {error}") from error


def _text(path: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(path, f"is not text: {error}") from error
    return text


def _encode(path: str, value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(path, f"is not JSON: {error}") from error
    return text
