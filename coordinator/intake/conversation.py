"""From a conversation as a client sent it to plain data for a chat template. What is JSON in it is bounded here."""

from __future__ import annotations

import json
import math
from typing import Any

from specdec.coordinator.text.chat_template import Conversation
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest

_MOST_VALUES = 100_000
"""In all JSON of a conversation: what it takes in memory and time goes by these rather than by its bytes."""
_MOST_DEPTH = 64
"""Of lists and objects in each other; templates walk them recursively."""


def read_conversation(chat: api.ChatMessages, reserved: frozenset[str]) -> Conversation:
    """The conversation, checked. `reserved` are the names of variables that are not the caller's to give.

    Raises:
        InvalidRequest: there is no message; JSON that is none, of the wrong kind, too deep or of too many values;
            a reserved variable; fields that contradict each other.
    """
    if not chat.messages:
        raise InvalidRequest("messages.messages", "must not be empty")
    if chat.continue_final_message and chat.add_generation_prompt:
        message = "the last message is continued or a new one begun, not both"
        raise InvalidRequest("messages.add_generation_prompt", message)
    values = _Values()
    tools = _objects(values, "messages.tools_json", chat.tools_json)
    variables = _variables(values, chat.template_variables_json, reserved)
    if chat.documents_json and "documents" in variables:
        raise InvalidRequest("messages.template_variables_json.documents", "is told beside them")
    return Conversation(
        messages=[_message(values, index, message) for index, message in enumerate(chat.messages)],
        tools=tools or None,
        add_generation_prompt=_begins_turn(chat),
        continue_final_message=chat.continue_final_message,
        documents=_objects(values, "messages.documents_json", chat.documents_json),
        variables=variables,
    )


def _objects(values: _Values, field: str, text: str) -> list[Any] | None:
    if not text:
        return None
    objects: list[Any] = values.read(field, text, list)
    for index, each in enumerate(objects):
        if not isinstance(each, dict):
            raise InvalidRequest(f"{field}[{index}]", "must be an object")
    return objects


def _variables(values: _Values, text: str, reserved: frozenset[str]) -> dict[str, Any]:
    field = "messages.template_variables_json"
    variables: dict[str, Any] = values.read(field, text, dict) if text else {}
    for name in variables:
        if name == "chat_template":
            raise InvalidRequest(f"{field}.{name}", "a template is told beside them, in messages.chat_template")
        if name in reserved or name.startswith("_") or not name.isidentifier():
            raise InvalidRequest(f"{field}.{name}", "is not a variable that a caller may set")
    return variables


def _begins_turn(chat: api.ChatMessages) -> bool:
    if chat.HasField("add_generation_prompt"):
        return chat.add_generation_prompt
    return not chat.continue_final_message


def _message(values: _Values, index: int, message: api.ChatMessage) -> dict[str, Any]:
    read: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.fields_json:
        field = f"messages.messages[{index}].fields_json"
        more = values.read(field, message.fields_json, dict)
        if "role" in more:
            raise InvalidRequest(f"{field}.role", "is told beside it")
        read |= more
    return read


class _Values:
    """Reads JSON texts that have a bound together."""

    def __init__(self) -> None:
        self._num_left = _MOST_VALUES

    def read(self, field: str, text: str, kind: type[list] | type[dict]) -> Any:
        """The value of a text, a list or an object as `kind` says. Raises InvalidRequest."""
        try:
            value = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        except RecursionError as error:
            raise InvalidRequest(field, f"is deeper than {_MOST_DEPTH}") from error
        except ValueError as error:
            raise InvalidRequest(field, f"is not JSON: {error}") from error
        if not isinstance(value, kind):
            raise InvalidRequest(field, f"must be a JSON {'array' if kind is list else 'object'}")
        self._count(field, value)
        return value

    def _count(self, field: str, value: Any) -> None:
        level: list[Any] = [value]
        for _ in range(_MOST_DEPTH):
            inner = [container.values() if isinstance(container, dict) else container for container in level]
            self._num_left -= sum(map(len, inner))
            if self._num_left < 0:
                raise InvalidRequest(field, f"the conversation has more than {_MOST_VALUES} values")
            level = [item for items in inner for item in items if isinstance(item, (dict, list))]
            if not level:
                return
        raise InvalidRequest(field, f"is deeper than {_MOST_DEPTH}")


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large")
    return number
