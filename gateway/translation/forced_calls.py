"""Calls that a tool choice requires: the output is constrained to a list of calls, in one form for all families.

The list is JSON without white space between calls and with single spaces at most within, as nobody reads it:
`[{"name":...,"parameters":...}]`, written as a structural tag, so that each function's schema is a document of its own.
`ForcedCallsParser` reads it. No marker of a family must be a token, and arguments fit the function's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from specdec.constraints.limits import MAX_CONSTRAINT_BYTES
from specdec.gateway.chat.messages import ToolChoice, named_function
from specdec.gateway.schemas.enforceable import enforceable
from specdec.wire.errors import InvalidRequest

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_MOST_FUNCTIONS = 250
"""Functions of a request: a structural tag has at most 512 formats, and a call takes two."""
_UNSAFE = re.compile(r"[^\w\-.:/ ]", re.ASCII)
"""Characters of a name that are escaped: in a tag, the text of a special token means that token."""


def is_forced(tool_choice: ToolChoice, tool_parser: str) -> bool:
    """Whether the output must be calls and nothing else.

    Models that write channels (harmony) are not constrained: a call is a message in one of several channels.
    """
    return tool_choice not in (None, "none", "auto") and tool_parser != "harmony"


def calls_tag(
    tools: Sequence[Mapping[str, Any]], tool_choice: ToolChoice, *, parallel: bool, unenforced: list[str]
) -> str:
    """The structural tag of a list of calls, of the named function or of any of the tools.

    Args:
        tools: checked.
        tool_choice: required, or a named function that is one of them.
        parallel: allow several calls; a named function is called once.
        unenforced: gets the paths of what the schemas say and cannot be enforced.

    Raises:
        InvalidRequest: the functions need a larger constraint than allowed, or a strict function has a keyword that
            cannot be enforced.
    """
    name = named_function(tool_choice)
    chosen = [(i, t["function"]) for i, t in enumerate(tools) if name in (None, t["function"]["name"])]
    if len(chosen) > _MOST_FUNCTIONS:
        raise InvalidRequest("tools", f"{len(chosen)} functions are more than {_MOST_FUNCTIONS}: send fewer")
    calls = {
        "type": "tags_with_separator",
        "tags": [_call(index, function, unenforced) for index, function in chosen],
        "separator": ",",
        "at_least_one": True,
        "stop_after_first": not parallel or name is not None,
    }
    wrapped = [{"type": "const_string", "value": "["}, calls, {"type": "const_string", "value": "]"}]
    tag = orjson.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": wrapped}})
    if len(tag) > MAX_CONSTRAINT_BYTES:
        message = (
            f"the schemas without descriptions have {len(tag)} bytes, more than {MAX_CONSTRAINT_BYTES}: send fewer"
        )
        raise InvalidRequest("tools", message)
    return tag.decode()


def sole_function(tools: Sequence[Mapping[str, Any]], tool_choice: ToolChoice) -> str:
    """The only function that can be called; empty if there are several."""
    names = [tool["function"]["name"] for tool in tools]
    return named_function(tool_choice) or (names[0] if len(names) == 1 else "")


def _call(index: int, function: Mapping[str, Any], unenforced: list[str]) -> dict[str, Any]:
    path, strict = f"tools[{index}].function.parameters", function.get("strict") is True
    schema = function.get("parameters")
    own = enforceable(schema, path, strict=strict, unenforced=unenforced) if schema else _NO_PARAMETERS
    own = {"type": "object", **own} if isinstance(own, dict) else own
    name = _UNSAFE.sub(lambda match: _escaped(match[0]), function["name"])
    return {
        "type": "tag",
        "begin": f'{{"name":"{name}","parameters":',
        "content": {"type": "json_schema", "style": "compact_json", "json_schema": own},
        "end": "}",
    }


def _escaped(character: str) -> str:
    """A character of a JSON text as an escape."""
    return f"\\u{ord(character):04x}" if character.isascii() else json.dumps(character)[1:-1]
