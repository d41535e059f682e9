"""Calls that a tool choice requires: the output is constrained to a list of calls, in one form for all families but
harmony, whose models write each call as a message in a channel.

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
from specdec.gateway.chat.tool_calls import forced_harmony_call
from specdec.gateway.chat.tool_choice import ToolChoice, chosen_functions, named_function
from specdec.gateway.schemas.enforceable import enforceable
from specdec.wire.errors import InvalidRequest

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_MOST_FUNCTIONS = 250
"""Functions of a request: a structural tag has at most 512 formats, and a call takes two."""
_UNSAFE = re.compile(r"[^\w\-.:/ ]", re.ASCII)
"""Characters of a name that are escaped: in a tag, the text of a special token means that token."""


def calls_tag(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: ToolChoice,
    tool_parser: str,
    *,
    parallel: bool,
    unenforced: list[str],
) -> str:
    """The structural tag of calls of the named function or of any of the tools: a list, or one message of harmony.

    Args:
        tools: checked.
        tool_choice: requires calls; functions that it chooses are some of them.
        tool_parser: reads the calls.
        parallel: allow several calls; a named function is called once.
        unenforced: gets the paths of what the schemas say and cannot be enforced.

    Raises:
        InvalidRequest: the functions need a larger constraint than allowed, or a strict function has a keyword that
            cannot be enforced.
    """
    names, is_named = chosen_functions(tool_choice), named_function(tool_choice) is not None
    chosen = [(i, t["function"]) for i, t in enumerate(tools) if names is None or t["function"]["name"] in names]
    if len(chosen) > _MOST_FUNCTIONS:
        raise InvalidRequest("tools", f"{len(chosen)} functions are more than {_MOST_FUNCTIONS}: send fewer")
    arguments = [(function, _arguments(index, function, unenforced)) for index, function in chosen]
    if tool_parser == "harmony":
        form = forced_harmony_call([(function["name"], schema) for function, schema in arguments])
    else:
        form = _list_of([_call(*each) for each in arguments], is_one=not parallel or is_named)
    tag = orjson.dumps({"type": "structural_tag", "format": form})
    if len(tag) > MAX_CONSTRAINT_BYTES:
        message = (
            f"the schemas without descriptions have {len(tag)} bytes, more than {MAX_CONSTRAINT_BYTES}: send fewer"
        )
        raise InvalidRequest("tools", message)
    return tag.decode()


def sole_function(tools: Sequence[Mapping[str, Any]], tool_choice: ToolChoice) -> str:
    """The only function that can be called; empty if there are several."""
    names = list(chosen_functions(tool_choice) or [tool["function"]["name"] for tool in tools])
    return names[0] if len(names) == 1 else ""


def _list_of(calls: list[dict[str, Any]], *, is_one: bool) -> dict[str, Any]:
    separated = {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": ",",
        "at_least_one": True,
        "stop_after_first": is_one,
    }
    elements = [{"type": "const_string", "value": "["}, separated, {"type": "const_string", "value": "]"}]
    return {"type": "sequence", "elements": elements}


def _arguments(index: int, function: Mapping[str, Any], unenforced: list[str]) -> dict[str, Any]:
    path, strict = f"tools[{index}].function.parameters", function.get("strict") is True
    schema = function.get("parameters")
    own = enforceable(schema, path, strict=strict, unenforced=unenforced) if schema else _NO_PARAMETERS
    own = {"type": "object", **own} if isinstance(own, dict) else own
    return {"type": "json_schema", "style": "compact_json", "json_schema": own}


def _call(function: Mapping[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    name = _UNSAFE.sub(lambda match: _escaped(match[0]), function["name"])
    return {"type": "tag", "begin": f'{{"name":"{name}","parameters":', "content": arguments, "end": "}"}


def _escaped(character: str) -> str:
    """A character of a JSON text as an escape."""
    return f"\\u{ord(character):04x}" if character.isascii() else json.dumps(character)[1:-1]
