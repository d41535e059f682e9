"""Translate a conversation of /v1/messages to a chat request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from specdec.gateway.anthropic.request import Conversation, MessagesRequest
from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.api.errors import invalid, unsupported
from specdec.gateway.api.fields import JsonSchema, JsonSchemaFormat
from specdec.gateway.api.foreign_fields import SWITCHES
from specdec.gateway.chat.messages import VALUES_PER_PART, VALUES_PER_TOOL, check_num_values
from specdec.gateway.translation.as_chat import AsChat, FieldNames
from specdec.gateway.translation.constraint import SCHEMA_FIELD as CHAT_SCHEMA_FIELD

SCHEMA_FIELD = "output_config.format.schema"
_PART = re.compile(r"messages\[(\d+)\]|tools\[(\d+)\]\.function(\.parameters)?")
_OLDER_SCHEMA_FIELD = "output_format.schema"
_NAMES = MappingProxyType({"stop": "stop_sequences"})
_SAME_NAMES = ("model", "temperature", "top_p", "top_k", "stream", "seed", "min_p", "speculation", "cache_salt")
_RUN_BY_SERVERS = re.compile(r"server_tool_use|mcp_tool_use|\w+_tool_result|container_upload|compaction")
"""Types of blocks in which another server told what it did."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _locate(paths: Sequence[str], path: str) -> str | None:
    """The client's path of a chat's message or tool; None: it is neither."""
    found = _PART.fullmatch(path)
    if found is None:
        return None
    if found[1] is not None:
        return paths[int(found[1])] if int(found[1]) < len(paths) else None
    return f"tools[{found[2]}]" + (".input_schema" if found[3] else "")


def to_chat(asked: Conversation, left_out: list[str] | None = None) -> AsChat:
    """The chat with the same output. Raises ApiError and InvalidRequest.

    `left_out` gets the paths of what another server ran for an earlier answer; None: it is refused.
    """
    contents = [asked.system, *(turn.get("content") for turn in asked.messages)]
    check_num_values("messages", VALUES_PER_PART * sum(len(each) for each in contents if isinstance(each, list)))
    check_num_values("tools", VALUES_PER_TOOL * len(asked.tools or ()))
    messages: list[dict[str, Any]] = []
    paths: list[str] = []
    if asked.system:
        messages.append({"role": "system", "content": _texts("system", asked.system)})
        paths.append("system")
    for index, turn in enumerate(asked.messages):
        path = f"messages[{index}]"
        for message in _turn(path, turn, left_out):
            if messages and messages[-1]["role"] == message["role"] == "user":
                messages[-1]["content"] = parts = _parts(messages[-1]["content"])
                parts += _parts(message["content"])
            else:
                messages.append(message)
                paths.append(path)
    is_continued = messages[-1]["role"] == "assistant"
    if is_continued and "tool_calls" in messages[-1]:
        raise invalid(paths[-1], "calls a tool: a turn of the user with its tool_result must follow", "invalid_value")
    choice = asked.tool_choice
    own: dict[str, Any] = {}
    if isinstance(asked, MessagesRequest):
        own = {name: getattr(asked, name) for name in _SAME_NAMES}
        own |= {"max_tokens": asked.max_tokens, "stop": asked.stop_sequences}
    request = ChatRequest.model_construct(
        **own,
        messages=messages,
        continue_final_message=is_continued,
        tools=None if asked.tools is None else [_tool(f"tools[{i}]", tool) for i, tool in enumerate(asked.tools)],
        tool_choice=_choice(asked),
        parallel_tool_calls=None if choice is None or choice.disable_parallel_tool_use is None
        else not choice.disable_parallel_tool_use,
        chat_template_kwargs=_variables(asked),
        response_format=_format(asked),
    )  # fmt: skip
    has_older = asked.output_config is None or asked.output_config.format is None
    schema_field = _OLDER_SCHEMA_FIELD if has_older else SCHEMA_FIELD
    return AsChat(request, FieldNames({**_NAMES, CHAT_SCHEMA_FIELD: schema_field}, partial(_locate, paths)))


def _variables(asked: Conversation) -> dict[str, Any] | None:
    thinks = {} if asked.thinking is None else dict.fromkeys(SWITCHES, asked.thinking.type != "disabled")
    config = asked.output_config
    # An effort is not only one of thoughts: `thinking` alone switches these.
    effort = {} if config is None or config.effort is None else {"reasoning_effort": config.effort}
    return {**effort, **thinks, **(asked.chat_template_kwargs or {})} or None


def _format(asked: Conversation) -> JsonSchemaFormat | None:
    wanted = None if asked.output_config is None else asked.output_config.format
    wanted = asked.output_format if wanted is None else wanted
    if wanted is None:
        return None
    schema = JsonSchema.model_construct(name="output", schema_=wanted.schema_, strict=None)
    return JsonSchemaFormat.model_construct(type="json_schema", json_schema=schema)


def _choice(asked: Conversation) -> str | dict[str, Any] | None:
    choice = asked.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if not choice.name:
        raise invalid("tool_choice.name", "is missing: the type tool names one", "missing_required_parameter")
    if all(tool.get("name") != choice.name for tool in asked.tools or ()):
        raise invalid("tool_choice.name", f"no tool has the name {choice.name!r}", "invalid_value")
    return {"type": "function", "function": {"name": choice.name}}


def _tool(path: str, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise unsupported(f"{path}.type", "must be custom: this server runs no tools itself")
    if not isinstance(tool.get("input_schema"), dict):
        raise invalid(f"{path}.input_schema", "must be an object, a JSON schema", "invalid_type")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _turn(path: str, turn: dict[str, Any], left_out: list[str] | None) -> list[dict[str, Any]]:
    """The messages of a turn: results of tools before the user's text."""
    role, content = turn.get("role"), turn.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"{path}.role", "must be user, assistant or system", "invalid_value")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise invalid(f"{path}.content", "must be a text or a list of blocks", "invalid_type")
    if role == "system":
        return [{"role": role, "content": _texts(f"{path}.content", content)}]
    blocks = [_block(f"{path}.content[{index}]", block, role, left_out) for index, block in enumerate(content)]
    texts = [{"type": "text", "text": block["text"]} for block in blocks if "text" in block]
    if role == "user":
        results = [block for block in blocks if "role" in block]
        return [*results, {"role": role, "content": texts}] if texts or not results else results
    message: dict[str, Any] = {"role": role, "content": "".join(part["text"] for part in texts)}
    calls = [block["call"] for block in blocks if "call" in block]
    if thoughts := "".join(block["thinking"] for block in blocks if "thinking" in block):
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return [message]


def _block(path: str, block: Any, role: str, left_out: list[str] | None) -> dict[str, Any]:
    """A block as {"text"}, {"thinking"}, {"call"}, a message with the role tool, or {} if it is left out."""
    kind = block.get("type") if isinstance(block, dict) else None
    match role, kind:
        case _, "text":
            return {"text": _text(path, block, "text")}
        case "user", "document" | "search_result":
            return {"text": _found(path, block)}
        case "user", "tool_result":
            content = block.get("content")
            told = "" if content is None else _texts(f"{path}.content", content, finds=True)
            told = f"Error: {told}" if block.get("is_error") is True else told
            return {"role": "tool", "tool_call_id": _text(path, block, "tool_use_id"), "content": told}
        case "assistant", "thinking":
            return {"thinking": _text(path, block, "thinking")}
        case "assistant", "redacted_thinking":
            return {}
        case "assistant", str() if left_out is not None and _RUN_BY_SERVERS.fullmatch(kind):
            left_out.append(path)
            return {}
        case "assistant", "tool_use":
            if not isinstance(block.get("input"), dict):
                raise invalid(f"{path}.input", "must be an object", "invalid_type")
            function = {"name": _text(path, block, "name"), "arguments": block["input"]}
            return {"call": {"id": _text(path, block, "id"), "type": "function", "function": function}}
    raise unsupported(f"{path}.type", f"{kind!r} is not read in a turn of the {role}: the model reads text only")


def _found(path: str, block: dict[str, Any]) -> str:
    """The text of a document or a search result, below its title."""
    title = f"{block['title']}\n" if isinstance(block.get("title"), str) else ""
    if block["type"] == "search_result":
        return title + _texts(f"{path}.content", block.get("content"))
    given = block.get("source")
    source: dict[str, Any] = given if isinstance(given, dict) else {}
    match kind := source.get("type"):
        case "text":
            return title + _text(f"{path}.source", source, "data")
        case "content":
            return title + _texts(f"{path}.source.content", source.get("content"))
    raise unsupported(
        f"{path}.source.type", f"{kind!r} is not read: the model reads text only, so send text or content"
    )


def _texts(path: str, content: Any, *, finds: bool = False) -> str:
    """A text, or the texts of blocks joined by line breaks. `finds`: documents and search results may be blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise invalid(path, "must be a text or a list of blocks", "invalid_type")
    texts = []
    for index, block in enumerate(content):
        at = f"{path}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if finds and kind in ("document", "search_result"):
            texts.append(_found(at, block))
        elif kind == "text":
            texts.append(_text(at, block, "text"))
        else:
            raise unsupported(f"{at}.type", "must be text: the model reads text only")
    return "\n".join(texts)


def _text(path: str, block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"{path}.{name}", "must be a text", "invalid_type")
    return value


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
