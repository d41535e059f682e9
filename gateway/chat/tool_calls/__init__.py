"""Streaming parsers of tool calls, one for each form that model families use."""

from specdec.gateway.chat.tool_calls.families import (
    TOOL_PARSERS,
    ToolParser,
    call_marks,
    make_tool_parser,
    marks_are_special_tokens,
)

__all__ = ["TOOL_PARSERS", "ToolParser", "call_marks", "make_tool_parser", "marks_are_special_tokens"]
