"""Streaming parsers of tool calls, one for each form that model families use, and those forms as formats."""

from specdec.gateway.chat.tool_calls.call_formats import calls_format, forced_harmony_call, in_final_channel
from specdec.gateway.chat.tool_calls.families import (
    TOOL_PARSERS,
    ToolParser,
    make_tool_parser,
    marks_are_special_tokens,
)

__all__ = [
    "TOOL_PARSERS",
    "ToolParser",
    "calls_format",
    "forced_harmony_call",
    "in_final_channel",
    "make_tool_parser",
    "marks_are_special_tokens",
]
