"""The tools of a /v1/responses request, as a chat has them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.gateway.api.errors import invalid, unsupported
from specdec.gateway.api.problems import short
from specdec.gateway.chat.messages import VALUES_PER_TOOL, check_num_values
from specdec.gateway.chat.tool_choice import ToolChoice

_PART = re.compile(r"tools\[(\d+)\](?:\.function)?")
_FIELDS = ("description", "parameters", "strict")


@dataclass(slots=True)
class Tools:
    """Functions that the model may call."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    """In the chat's form."""
    paths: list[str] = field(default_factory=list)
    """Of each function in the client's request."""
    members: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Namespace and own name of functions by the name that the model sees, NAMESPACE__NAME."""
    taken: list[dict[str, Any]] = field(default_factory=list)
    """The tools as sent, without those that were left out."""
    names: set[str] = field(default_factory=set)
    """Of the functions, as the model sees them."""

    def add(self, path: str, tool: dict[str, Any], namespace: str = "") -> None:
        """Add a function. Raises ApiError."""
        name = text_of(path, tool, "name")
        shown = member_name(namespace, name) if namespace else name
        if shown in self.names and (namespace or shown in self.members):
            raise invalid(f"{path}.name", f"the name {short(shown)} is taken by another tool", "invalid_value")
        if namespace:
            self.members[shown] = (namespace, name)
        self.names.add(shown)
        function = {field: tool[field] for field in _FIELDS if tool.get(field) is not None}
        self.functions.append({"type": "function", "function": {"name": shown, **function}})
        self.paths.append(path)

    def only(self, names: set[str]) -> None:
        """Keep the functions of these names."""
        kept = [index for index, tool in enumerate(self.functions) if tool["function"]["name"] in names]
        self.functions = [self.functions[index] for index in kept]
        self.paths = [self.paths[index] for index in kept]

    def locate(self, path: str) -> str | None:
        """The client's path of a chat's tool; None: it is none."""
        found = _PART.fullmatch(path)
        return self.paths[int(found[1])] if found is not None and int(found[1]) < len(self.paths) else None


def member_name(namespace: str, name: str) -> str:
    """The name of a namespace's function that the model sees, as in vLLM."""
    return f"{namespace}__{name}"


def tools_of(tools: Sequence[dict[str, Any]] | None, left_out: list[str] | None) -> Tools:
    """The tools of a request.

    Args:
        tools: as sent.
        left_out: gets the paths of tools that are no functions, such as web_search; None: they are refused.

    Raises:
        ApiError: names the faulty tool.
    """
    found = Tools()
    members = [tool.get("tools") for tool in tools or ()]
    num_all = len(members) + sum(len(each) for each in members if isinstance(each, list))
    check_num_values("tools", VALUES_PER_TOOL * num_all)
    for index, tool in enumerate(tools or ()):
        path = f"tools[{index}]"
        match tool.get("type"):
            case "function":
                found.add(path, tool)
            case "namespace":
                _add_namespace(found, path, tool, left_out)
            case kind:
                _leave_out(path, kind, left_out)
                continue
        found.taken.append(tool)
    return found


def _add_namespace(found: Tools, path: str, tool: dict[str, Any], left_out: list[str] | None) -> None:
    namespace, members = text_of(path, tool, "name"), tool.get("tools")
    if not namespace:
        raise invalid(f"{path}.name", "must not be empty", "invalid_value")
    if not isinstance(members, list):
        raise invalid(f"{path}.tools", "must be a list of functions", "invalid_type")
    for index, member in enumerate(members):
        at = f"{path}.tools[{index}]"
        if not isinstance(member, dict):
            raise invalid(at, "must be an object", "invalid_type")
        if member.get("type") == "function":
            found.add(at, member, namespace)
        else:
            _leave_out(at, member.get("type"), left_out)


def _leave_out(path: str, kind: Any, left_out: list[str] | None) -> None:
    if not isinstance(kind, str):
        raise invalid(f"{path}.type", "must be a text, such as function", "invalid_type")
    if left_out is None:
        raise unsupported(
            f"{path}.type", f"{short(kind)} is not supported: this server takes functions and runs no tool"
        )
    left_out.append(path)


def choice_of(choice: str | dict[str, Any] | None, tools: Tools) -> ToolChoice:
    """The chat's tool choice; allowed_tools leaves only these in `tools`. Raises ApiError."""
    if choice is None or isinstance(choice, str):
        return choice
    match choice.get("type"):
        case "function":
            return {"type": "function", "function": {"name": _chosen("tool_choice", choice, tools)}}
        case "allowed_tools":
            mode, allowed = choice.get("mode"), choice.get("tools")
            if mode not in ("auto", "required"):
                raise invalid("tool_choice.mode", "must be auto or required", "invalid_value")
            if not isinstance(allowed, list) or not allowed:
                raise invalid("tool_choice.tools", "must be a list of at least one tool", "invalid_type")
            tools.only({_chosen(f"tool_choice.tools[{i}]", each, tools) for i, each in enumerate(allowed)})
            return str(mode)
    raise unsupported("tool_choice.type", "must be function or allowed_tools: this server runs no tools itself")


def _chosen(path: str, tool: Any, tools: Tools) -> str:
    """The name that the model sees of a chosen function."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise unsupported(f"{path}.type", "must be function: this server runs no tools itself")
    name, namespace = text_of(path, tool, "name"), tool.get("namespace")
    name = member_name(namespace, name) if isinstance(namespace, str) and namespace else name
    if name not in tools.names:
        raise invalid(f"{path}.name", f"no tool has the name {short(name)}", "invalid_value")
    return name


def text_of(path: str, fields: dict[str, Any], name: str) -> str:
    """A field that must be a text. Raises ApiError."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise invalid(f"{path}.{name}", "must be a text", "invalid_type")
    return value
