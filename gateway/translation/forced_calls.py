"""Calls that a tool choice requires: the output is constrained to a list of calls, in one form for all families.

The list is JSON, `[{"name": ..., "parameters": ...}]`, which `Llama3JsonParser` reads. So no marker of a family must be
a token, and arguments fit the function's schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from specdec.constraints.limits import MAX_CONSTRAINT_BYTES
from specdec.gateway.chat.messages import ToolChoice, named_function
from specdec.wire.errors import InvalidRequest

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_DATA = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are no schemas."""
_CALL_BYTES = 128
"""Bytes of one call's schema, at least."""


def is_forced(tool_choice: ToolChoice, tool_parser: str) -> bool:
    """Whether the output must be calls and nothing else.

    Models that write channels (harmony) are not constrained: a call is a message in one of several channels.
    """
    return tool_choice not in (None, "none", "auto") and tool_parser != "harmony"


def calls_schema(tools: Sequence[Mapping[str, Any]], tool_choice: ToolChoice, *, parallel: bool) -> str:
    """The JSON schema of a list of calls, of the named function or of any of the tools.

    Args:
        tools: checked.
        tool_choice: required, or a named function that is one of them.
        parallel: allow several calls; a named function is called once.

    Raises:
        InvalidRequest: the functions need a larger constraint than allowed.
    """
    name = named_function(tool_choice)
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if len(functions) * _CALL_BYTES > MAX_CONSTRAINT_BYTES:
        message = (
            f"{len(functions)} functions need a constraint above the limit of {MAX_CONSTRAINT_BYTES} bytes: send fewer"
        )
        raise InvalidRequest("tools", message)
    schema = {
        "type": "array",
        "minItems": 1,
        **({} if parallel and name is None else {"maxItems": 1}),
        "items": {"anyOf": [_call(index, function["name"]) for index, function in enumerate(functions)]},
        "$defs": {_key(index): _parameters(index, function) for index, function in enumerate(functions)},
    }
    return orjson.dumps(schema).decode()


def _key(index: int) -> str:
    return f"parameters_{index}"


def _call(index: int, name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{_key(index)}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _parameters(index: int, function: Mapping[str, Any]) -> Any:
    schema = function.get("parameters")
    if not schema:
        return _NO_PARAMETERS
    return {"type": "object", **_moved(schema, f"#/$defs/{_key(index)}")}


def _moved(schema: Any, place: str) -> Any:
    """The schema moved to another place in a document: references from its root start there."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: value if key in _DATA else _moved(value, place) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
