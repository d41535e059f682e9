"""A response format beside tools that may be called: the output fits the format, or it is calls.

A format alone would forbid the family's calls, and an agent with a type of output could never call a tool. Calls are
free text between the family's marks; families whose calls have other special tokens within are not known here.
"""

from __future__ import annotations

import orjson

from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.chat.tool_calls import call_marks
from specdec.v1 import common_pb2 as pb


def or_calls(request: ChatRequest, constraint: pb.Constraint, tool_parser: str) -> pb.Constraint:
    """The constraint of a response format, or one that allows calls as well.

    Args:
        request: has tools that may be called.
        constraint: of its response format.
        tool_parser: reads the calls; without known marks the format alone holds.
    """
    marks = call_marks(tool_parser)
    if request.response_format is None or marks is None:
        return constraint
    schema: object
    match constraint.WhichOneof("form"):
        case "json_schema":
            schema = orjson.loads(constraint.json_schema)
        case "json_object":
            schema = {"type": "object"}
        case _:
            return constraint
    begin, end = marks
    calls = {
        "type": "tags_with_separator",
        "tags": [{"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": request.parallel_tool_calls is False,
    }
    either = {"type": "or", "elements": [{"type": "json_schema", "json_schema": schema}, calls]}
    tag = orjson.dumps({"type": "structural_tag", "format": either}).decode()
    return pb.Constraint(structural_tag=tag, after_token=constraint.after_token)
