"""Check the messages and tools of a chat request, and convert them for the coordinator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.client import chat_messages
from specdec.gateway.chat.tool_choice import ToolChoice, chosen_functions
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import InvalidRequest
from specdec.wire.message_sizes import MOST_CONVERSATION_VALUES

_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of text parts, each with the field that holds the text."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
_KEPT = ("name", "tool_call_id", *_REASONING)
"""Further text fields of a message that templates may read."""
_MOST_NAME_CHARS = 256
VALUES_PER_PART = 3
"""Values of a part: itself, its type and its text."""
VALUES_PER_TOOL = 4
"""Values of a tool, at least: itself, its type, its function and the function's name."""


def to_chat_messages(
    messages: Sequence[Any],
    tools: Sequence[Any] | None = None,
    *,
    tool_choice: ToolChoice = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    template_variables: Mapping[str, Any] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template: str | None = None,
) -> api.ChatMessages:
    """Return the conversation of a chat request, checked.

    The role developer becomes system, as templates know no developer. Calls keep their form: the coordinator knows what
    its template takes. With the tool choice none the template gets no tools, with chosen functions only these.

    Args:
        messages: dicts or pydantic models.
        tools: dicts or pydantic models.
        tool_choice: which tools may be called; None: any.
        add_generation_prompt: end where the assistant's turn starts; None: unless the last message is continued.
        continue_final_message: end within the last message.
        template_variables: further variables of the template (chat_template_kwargs).
        documents: objects for the template's variable `documents`.
        chat_template: replaces the model's template; None: use the model's.

    Raises:
        InvalidRequest: names the path of the faulty field, such as messages[2].content[1].type.
    """
    if not _list("messages", messages):
        raise InvalidRequest("messages", "must not be empty")
    check_num_values("messages", VALUES_PER_PART * sum(map(_num_parts, messages)))
    read = [_message(f"messages[{index}]", _fields(f"messages[{index}]", m)) for index, m in enumerate(messages)]
    return chat_messages(
        read,
        tools=_shown(check_tools(tools), tool_choice),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template_variables=template_variables,
        documents=documents,
        chat_template=chat_template or "",
    )


def check_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """The tools of a request as dicts; none for None. Raises InvalidRequest."""
    if tools is None:
        return []
    read = _list("tools", tools)
    check_num_values("tools", VALUES_PER_TOOL * len(read))
    return [_tool(f"tools[{index}]", _fields(f"tools[{index}]", tool)) for index, tool in enumerate(read)]


def _shown(tools: list[dict[str, Any]], tool_choice: ToolChoice) -> list[dict[str, Any]]:
    chosen = chosen_functions(tool_choice)
    if chosen is not None:
        known = {tool["function"]["name"] for tool in tools}
        for name, path in chosen.items():
            if name not in known:
                raise InvalidRequest(f"{path}.name", f"no tool has the name {name!r}")
        tools = [tool for tool in tools if tool["function"]["name"] in chosen]
    elif tool_choice == "required" and not tools:
        raise InvalidRequest("tool_choice", "required needs tools")
    return [] if tool_choice == "none" else tools


def _tool(path: str, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequest(f"{path}.type", "must be function")
    function = _fields(f"{path}.function", tool.get("function"))
    _name(f"{path}.function", function)
    if (description := function.get("description")) is not None:
        _text(f"{path}.function.description", description)
    if (parameters := function.get("parameters")) is not None and not isinstance(parameters, Mapping):
        raise InvalidRequest(f"{path}.function.parameters", "must be an object, a JSON schema")
    return {**tool, "function": function}


def _message(path: str, message: dict[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequest(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            raise InvalidRequest(f"{path}.{name}", "is not supported")
    read: dict[str, Any] = {"role": "system" if role == "developer" else role}
    content = message.get("content")
    calls = message.get("tool_calls") if role == "assistant" else None
    if content is None and role == "assistant":
        content = message.get("refusal")
    if content is None and role in ("assistant", "tool") and not calls:
        content = ""  # an answer that is empty, a function that returns nothing
    if isinstance(content, list) and role == "assistant":
        content, thoughts = _without_thoughts(f"{path}.content", content)
        if thoughts and not any(message.get(name) for name in _REASONING):
            read["reasoning_content"] = thoughts
    if content is not None or not calls:
        read["content"] = content_of(f"{path}.content", content)
    read |= {name: _text(f"{path}.{name}", message[name]) for name in _KEPT if message.get(name) is not None}
    if calls:
        calls = _list(f"{path}.tool_calls", calls)
        read["tool_calls"] = [_call(f"{path}.tool_calls[{index}]", call) for index, call in enumerate(calls)]
    return read


def _without_thoughts(path: str, parts: list[Any]) -> tuple[list[Any], str]:
    """The parts that are no thoughts, and the thoughts in the others, in Mistral's, Anthropic's and vLLM's forms."""
    others, thoughts = [], []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("thinking", "reasoning"):
            others.append(part)
        elif (told := part.get(kind, part.get("text"))) is not None:
            texts = [told] if isinstance(told, str) else content_of(f"{path}[{index}].{kind}", told)
            thoughts += [text if isinstance(text, str) else text["text"] for text in texts]
    return others, "".join(thoughts)


def content_of(path: str, content: Any) -> str | list[dict[str, str]]:
    """A text, or parts of type text. Raises InvalidRequest."""
    if isinstance(content, str):
        return _text(path, content)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(path, "must be a text or a list of parts")
    return [_part(f"{path}[{index}]", part) for index, part in enumerate(content)]


def _part(path: str, part: Any) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": _text(path, part)}
    fields = _fields(path, part)
    kind = fields.get("type")
    name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise InvalidRequest(f"{path}.type", f"must be one of {', '.join(_TEXT_PARTS)}: the model reads text only")
    return {"type": "text", "text": _text(f"{path}.{name}", fields.get(name))}


def _call(path: str, call: Any) -> dict[str, Any]:
    fields = _fields(path, call)
    if fields.get("type", "function") != "function":
        raise InvalidRequest(f"{path}.type", "must be function")
    function = _fields(f"{path}.function", fields.get("function"))
    _name(f"{path}.function", function)
    read = {"type": "function", "function": {**function, "arguments": _arguments(path, function.get("arguments"))}}
    if fields.get("id") is not None:
        read["id"] = _text(f"{path}.id", fields["id"])
    return read


def _arguments(path: str, arguments: Any) -> Any:
    """The arguments unchanged; an empty object if there are none."""
    if isinstance(arguments, Mapping):
        return arguments
    return _text(f"{path}.function.arguments", "{}" if arguments is None or arguments == "" else arguments)


def _num_parts(message: Any) -> int:
    content = message.get("content") if isinstance(message, Mapping) else None
    return len(content) if isinstance(content, list) else 0


def check_num_values(field: str, num_values: int) -> None:
    """Refuse early what coordinators would refuse, before each value takes several times its memory.

    Raises InvalidRequest.
    """
    if num_values > MOST_CONVERSATION_VALUES:
        raise InvalidRequest(field, f"the conversation has more than {MOST_CONVERSATION_VALUES} values")


def _list(path: str, value: Any) -> Sequence[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidRequest(path, "must be a list")
    return value


def _fields(path: str, value: Any) -> dict[str, Any]:
    """The non-null fields of a dict or a pydantic model."""
    if not isinstance(value, Mapping) and callable(dump := getattr(value, "model_dump", None)):
        value = dump(mode="json", exclude_unset=True)
    if not isinstance(value, Mapping):
        raise InvalidRequest(path, "must be an object")
    return {name: field for name, field in value.items() if field is not None}


def _name(path: str, function: dict[str, Any]) -> str:
    name = _text(f"{path}.name", function.get("name"))
    if not 0 < len(name) <= _MOST_NAME_CHARS:
        raise InvalidRequest(f"{path}.name", f"must have 1 to {_MOST_NAME_CHARS} characters")
    return name


def _text(path: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(path, "must be a text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(path, "has half of a surrogate pair") from error
    return value
