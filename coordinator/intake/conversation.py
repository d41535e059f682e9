"""From a conversation as a client sent it to plain data for a chat template. The JSON in it is bounded here."""

from __future__ import annotations

from typing import Any

from specdec.coordinator.text.chat_template import Conversation
from specdec.coordinator.text.json_values import JsonValues
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest


def read_conversation(chat: api.ChatMessages, reserved: frozenset[str]) -> Conversation:
    """The conversation, checked. `reserved` names the variables that a caller may not set.

    Raises:
        InvalidRequest: no message; JSON that is malformed, of the wrong kind, too deep or of too many values; a
            reserved variable; fields that contradict each other.
    """
    if not chat.messages:
        raise InvalidRequest("messages.messages", "must not be empty")
    if chat.continue_final_message and chat.add_generation_prompt:
        message = "the last message is continued or a new one begun, not both"
        raise InvalidRequest("messages.add_generation_prompt", message)
    values = JsonValues()
    tools = _objects(values, "messages.tools_json", chat.tools_json)
    variables = _variables(values, chat.template_variables_json, reserved)
    if chat.documents_json and "documents" in variables:
        message = "conflicts with messages.documents_json: send one of them"
        raise InvalidRequest("messages.template_variables_json.documents", message)
    return Conversation(
        messages=[_message(values, index, message) for index, message in enumerate(chat.messages)],
        tools=tools or None,
        add_generation_prompt=_begins_turn(chat),
        continue_final_message=chat.continue_final_message,
        documents=_objects(values, "messages.documents_json", chat.documents_json),
        variables=variables,
        values=values,
    )


def _objects(values: JsonValues, field: str, text: str) -> list[Any] | None:
    if not text:
        return None
    objects: list[Any] = values.read(field, text, list)
    for index, each in enumerate(objects):
        if not isinstance(each, dict):
            raise InvalidRequest(f"{field}[{index}]", "must be an object")
    return objects


def _variables(values: JsonValues, text: str, reserved: frozenset[str]) -> dict[str, Any]:
    field = "messages.template_variables_json"
    variables: dict[str, Any] = values.read(field, text, dict) if text else {}
    for name in variables:
        if name == "chat_template":
            raise InvalidRequest(f"{field}.{name}", "is not a variable: send the template in messages.chat_template")
        if name in reserved or name.startswith("_") or not name.isidentifier():
            raise InvalidRequest(f"{field}.{name}", "is not a variable that a caller may set")
    return variables


def _begins_turn(chat: api.ChatMessages) -> bool:
    if chat.HasField("add_generation_prompt"):
        return chat.add_generation_prompt
    return not chat.continue_final_message


def _message(values: JsonValues, index: int, message: api.ChatMessage) -> dict[str, Any]:
    if not message.role:
        raise InvalidRequest(f"messages.messages[{index}].role", "is empty: name a role that the template knows")
    read: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.fields_json:
        field = f"messages.messages[{index}].fields_json"
        more = values.read(field, message.fields_json, dict)
        if "role" in more:
            raise InvalidRequest(f"{field}.role", f"conflicts with messages.messages[{index}].role: leave it out")
        read |= more
    return read
