"""A response format in a form that the model's family writes: beside its calls, or in its final channel.

A format alone would forbid the family's calls, and an agent with a type of output could never call a tool. A model of
channels (harmony) would have to begin its answer without the thoughts that it was trained to write first.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import orjson

from specdec.gateway.api.chat import ChatRequest
from specdec.gateway.chat.messages import check_tools
from specdec.gateway.chat.tool_calls import calls_format, in_final_channel
from specdec.v1 import common_pb2 as pb


def as_family_writes(
    request: ChatRequest, constraint: pb.Constraint, *, reasoning_parser: str, tool_parser: str, may_call: bool
) -> pb.Constraint:
    """The constraint of a request, around which the model may write what its family does.

    Args:
        request: has no tool choice that forces calls.
        constraint: of its response format or structured outputs.
        reasoning_parser: harmony: the constraint is that of the final channel.
        tool_parser: reads the calls; if they cannot be told from an answer, the constraint alone holds.
        may_call: the request has tools that may be called. Structured outputs constrain the whole output.
    """
    has_channels = reasoning_parser == "harmony" and not request.continue_final_message
    calls = None
    if may_call and request.response_format is not None and (has_channels or tool_parser != "harmony"):
        names = [tool["function"]["name"] for tool in check_tools(request.tools)]
        calls = calls_format(tool_parser, names, parallel=request.parallel_tool_calls is not False)
    answer = _format_of(constraint) if has_channels or calls is not None else None
    if answer is None:
        return constraint
    whole = in_final_channel(answer, calls) if has_channels else {"type": "or", "elements": [answer, calls]}
    tag = orjson.dumps({"type": "structural_tag", "format": whole}).decode()
    return pb.Constraint(structural_tag=tag, after_token=constraint.after_token)


def _format_of(constraint: pb.Constraint) -> dict[str, Any] | None:
    """A constraint as a format of a structural tag.

    None: it is such a tag, which says itself where calls may stand, or a text that is no JSON, which will be refused.
    """
    match constraint.WhichOneof("form"):
        case "json_schema":
            with contextlib.suppress(orjson.JSONDecodeError):
                return {"type": "json_schema", "json_schema": orjson.loads(constraint.json_schema)}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": constraint.regex}
        case "grammar":
            return {"type": "grammar", "grammar": constraint.grammar}
        case "choice":
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in constraint.choice.texts)
            return {"type": "grammar", "grammar": f"start: {texts}"}
    return None
