"""Which tools a request lets the model call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.wire.errors import InvalidRequest

ToolChoice = str | Mapping[str, Any] | None
"""none, auto, required, a named function as in {"type": "function", "function": {"name": "f"}}, or OpenAI's
allowed_tools, whose mode is auto or required.
"""


def named_function(tool_choice: ToolChoice) -> str | None:
    """The one function that must be called, or None. Raises InvalidRequest for an unknown form."""
    chosen = chosen_functions(tool_choice)
    return next(iter(chosen)) if chosen is not None and _kind(tool_choice) == "function" else None


def must_call(tool_choice: ToolChoice) -> bool:
    """Whether the answer must be calls. Raises InvalidRequest for an unknown form."""
    if chosen_functions(tool_choice) is None or isinstance(tool_choice, str | None):
        return tool_choice == "required"
    return _kind(tool_choice) == "function" or tool_choice["allowed_tools"]["mode"] == "required"


def chosen_functions(tool_choice: ToolChoice) -> dict[str, str] | None:
    """The names of the only functions that may be called, with their paths; None: all, or with none no one.

    Raises:
        InvalidRequest: the form is unknown.
    """
    if tool_choice is None or isinstance(tool_choice, str):
        if tool_choice not in (None, "none", "auto", "required"):
            raise InvalidRequest("tool_choice", "must be none, auto, required, a function or allowed_tools")
        return None
    if not isinstance(tool_choice, Mapping):
        raise InvalidRequest("tool_choice", "must be a text or an object")
    kind = _kind(tool_choice)
    if kind == "function":
        return _function("tool_choice", tool_choice)
    if kind != "allowed_tools":
        raise InvalidRequest("tool_choice.type", "must be function or allowed_tools: this server runs no tools itself")
    path, allowed = "tool_choice.allowed_tools", tool_choice.get("allowed_tools")
    if not isinstance(allowed, Mapping):
        raise InvalidRequest(path, "must be an object")
    if allowed.get("mode") not in ("auto", "required"):
        raise InvalidRequest(f"{path}.mode", "must be auto or required")
    tools = allowed.get("tools")
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence) or not tools:
        raise InvalidRequest(f"{path}.tools", "must be a list of at least one tool")
    chosen: dict[str, str] = {}
    for index, tool in enumerate(tools):
        at = f"{path}.tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise InvalidRequest(f"{at}.type", "must be function: this server runs no tools itself")
        chosen |= _function(at, tool)
    return chosen


def _kind(tool_choice: ToolChoice) -> Any:
    return tool_choice.get("type") if isinstance(tool_choice, Mapping) else None


def _function(path: str, tool: Mapping[str, Any]) -> dict[str, str]:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{path}.function", "must be an object")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{path}.function.name", "must be a text, and not empty")
    return {name: f"{path}.function"}
