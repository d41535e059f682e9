"""The items of a conversation of /v1/responses, as a chat's messages.

What the assistant said in a row is one message: its thoughts, its text and its calls, as a chat's answer has them.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.gateway.api.errors import invalid, unsupported
from specdec.gateway.api.problems import short
from specdec.gateway.chat.messages import VALUES_PER_PART, check_num_values, content_of
from specdec.gateway.responses.tools import member_name, text_of

_VALUES_PER_ITEM = 6
"""Values of a call in a message, with the message and its path."""
_OPAQUE = "specdec1:"
"""Begins encrypted content of this server."""
_RUN_BY_SERVERS = frozenset(
    {
        *("code_interpreter_call", "file_search_call", "image_generation_call", "mcp_approval_request"),
        *("mcp_approval_response", "mcp_call", "mcp_list_tools", "tool_search_call", "tool_search_output"),
        "web_search_call",
    }
)
"""Items of tools that another server ran for an earlier answer, which tells what they found."""
_PART = re.compile(r"messages\[(\d+)\](\.content|\.tool_calls\[(\d+)\](?:\.function)?)?")


def encrypted(thoughts: str) -> str:
    """Thoughts as opaque text that clients send back. It is not secret: clients see the thoughts as well."""
    return _OPAQUE + b64encode(thoughts.encode()).decode()


@dataclass(slots=True)
class _Said:
    """Pieces of a message of the assistant."""

    message: dict[str, Any]
    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    is_text_last: bool = False


class Conversation:
    """Messages, and where they come from."""

    def __init__(self, left_out: list[str] | None) -> None:
        """`left_out` gets the paths of items of tools that ran elsewhere; None: they are refused."""
        self.messages: list[dict[str, Any]] = []
        self.is_continued = False
        """Whether the last message is the beginning of the answer."""
        self._left_out = left_out
        self._origins: list[int] = []
        """Index of each message's first item; -1: the instructions; -2: a text that is the whole input."""
        self._calls: list[list[int]] = []
        """Indexes of each message's calls."""
        self._said: _Said | None = None
        """What the assistant says in a row; None: the last item was none of it."""

    def begin(self, instructions: str | None, given: str | Sequence[dict[str, Any]]) -> None:
        """Take everything. Raises ApiError and InvalidRequest."""
        items = [] if isinstance(given, str) else given
        check_num_values("input", sum(map(_num_values, items)))
        num_first = next((index for index, item in enumerate(items) if not _is_system(item)), len(items))
        num_read = 0
        if num_first + bool(instructions) > 1:
            # Many templates take one system message only, which must be the first.
            num_read = num_first
            texts = [_text(f"input[{index}].content", items[index].get("content")) for index in range(num_first)]
            told = "\n\n".join([*([instructions] if instructions else ()), *texts])
            self._append({"role": "system", "content": told}, -1 if instructions else 0)
        elif instructions:
            self._append({"role": "system", "content": instructions}, -1)
        if isinstance(given, str):
            self._append({"role": "user", "content": given}, -2)
        for index in range(num_read, len(items)):
            self._add(index, items[index])
        self._close()

    def locate(self, path: str) -> str | None:
        """The client's path of a message, a message's content, or a call; None: it is none of these."""
        found = _PART.fullmatch(path)
        if found is None or int(found[1]) >= len(self.messages):
            return None
        index, part = int(found[1]), found[2] or ""
        origin = self._origins[index]
        if origin < 0:
            return ("instructions", "input")[-1 - origin]
        if found[3] is not None and int(found[3]) < len(self._calls[index]):
            return f"input[{self._calls[index][int(found[3])]}]"
        if part == ".content" and self.messages[index]["role"] == "tool":
            part = ".output"
        return f"input[{origin}]{part}"

    def _append(self, message: dict[str, Any], index: int) -> None:
        self._close()
        self.messages.append(message)
        self._origins.append(index)
        self._calls.append([])

    def _close(self) -> None:
        """Put the pieces of what the assistant said into its message."""
        said, self._said = self._said, None
        if said is None:
            return
        if said.thoughts:
            said.message["reasoning_content"] = "".join(said.thoughts)
        if said.texts or "tool_calls" not in said.message:
            said.message["content"] = "".join(said.texts)

    def _open(self, index: int, *, is_text: bool = False) -> _Said:
        """What the assistant says in a row. A text right after a text is a message of its own."""
        if self._said is None or (is_text and self._said.is_text_last):
            message: dict[str, Any] = {"role": "assistant"}
            self._append(message, index)
            self._said = _Said(message)
        self._said.is_text_last = is_text
        return self._said

    def _add(self, index: int, item: dict[str, Any]) -> None:
        path = f"input[{index}]"
        self.is_continued = False
        match item.get("type") or "message":
            case "message" if item.get("role") == "assistant" and not item.get("tool_calls"):
                said = self._open(index, is_text=True)
                said.texts.append(_text(f"{path}.content", item.get("content")))
                is_whole = item.get("status") not in ("in_progress", "incomplete")
                self.is_continued = not is_whole and "tool_calls" not in said.message
            case "message":
                self._append(item, index)
            case "function_call":
                namespace, name = item.get("namespace"), text_of(path, item, "name")
                name = member_name(namespace, name) if isinstance(namespace, str) and namespace else name
                self._add_call(index, item, name, text_of(path, item, "arguments"))
            case "custom_tool_call":
                self._add_call(index, item, text_of(path, item, "name"), {"input": text_of(path, item, "input")})
            case "function_call_output" | "custom_tool_call_output":
                told = {"tool_call_id": text_of(path, item, "call_id"), "content": item.get("output")}
                self._append({"role": "tool", **told}, index)
            case "reasoning":
                if thoughts := _thoughts(path, item):
                    self._open(index).thoughts.append(thoughts)
            case "item_reference":
                raise unsupported(f"{path}.type", "names an item that was not kept: send the item itself")
            case str(kind) if kind in _RUN_BY_SERVERS and self._left_out is not None:
                self._left_out.append(path)
            case kind:
                raise unsupported(f"{path}.type", f"{short(kind)} is not supported")

    def _add_call(self, index: int, item: dict[str, Any], name: str, arguments: str | dict[str, str]) -> None:
        call_id = text_of(f"input[{index}]", item, "call_id")
        function = {"name": name, "arguments": arguments}
        calls = self._open(index).message.setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})
        self._calls[-1].append(index)


def _is_system(item: dict[str, Any]) -> bool:
    return item.get("type", "message") == "message" and item.get("role") in ("system", "developer")


def _text(path: str, content: Any) -> str:
    """A text, or the texts of parts as lines. Raises InvalidRequest."""
    content = content_of(path, content)
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _thoughts(path: str, item: dict[str, Any]) -> str:
    """The thoughts of a reasoning item; empty if it has none that can be read. Raises ApiError."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if parts is not None and not isinstance(parts, list):
            raise invalid(f"{path}.{name}", "must be a list", "invalid_type")
        for index, part in enumerate(parts or ()):
            if not isinstance(part, dict):
                raise invalid(f"{path}.{name}[{index}]", "must be an object with a text", "invalid_type")
            text_of(f"{path}.{name}[{index}]", part, "text")
    own = _opened(item.get("encrypted_content"))
    parts = item.get("content") or (() if own else item.get("summary")) or ()
    return "".join(part["text"] for part in parts) or own


def _opened(content: Any) -> str:
    """The thoughts in encrypted content; empty if it is not this server's."""
    if not isinstance(content, str) or not content.startswith(_OPAQUE):
        return ""
    try:
        return b64decode(content.removeprefix(_OPAQUE), validate=True).decode()
    except ValueError:
        return ""


def _num_values(item: dict[str, Any]) -> int:
    """Values of an item as a message, at least."""
    lists = (item.get(name) for name in ("content", "output", "summary"))
    return _VALUES_PER_ITEM + VALUES_PER_PART * sum(len(each) for each in lists if isinstance(each, list))
