"""The tool parsers by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from specdec.gateway.chat.deltas import PlainParser, StreamingParser
from specdec.gateway.chat.tool_calls.deepseek import DeepSeekParser
from specdec.gateway.chat.tool_calls.gemma4 import Gemma4Parser
from specdec.gateway.chat.tool_calls.harmony import HarmonyParser
from specdec.gateway.chat.tool_calls.kimi_k2 import KimiParser
from specdec.gateway.chat.tool_calls.llama3 import Llama3JsonParser
from specdec.gateway.chat.tool_calls.mistral import MistralParser
from specdec.gateway.chat.tool_calls.parameter_tags import FORMS, ParameterTagsParser
from specdec.gateway.chat.tool_calls.pythonic import PythonicParser
from specdec.gateway.chat.tool_calls.tagged import TaggedParser

ToolParser: TypeAlias = StreamingParser
"""A parser whose deltas are content and calls."""
_PARSERS: dict[str, Callable[[], StreamingParser]] = {
    "none": PlainParser,
    "hermes": TaggedParser,
    "qwen": TaggedParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "deepseek": DeepSeekParser,
    "kimi_k2": KimiParser,
    "gemma4": Gemma4Parser,
    "harmony": HarmonyParser,
}
TOOL_PARSERS = (*_PARSERS, *FORMS)
"""Names that `make_tool_parser` knows."""
_WITH_SPECIAL_TOKENS = ("llama3_json", "mistral", "pythonic", "deepseek", "harmony", "kimi_k2", "gemma4", *FORMS)


def make_tool_parser(name: str, schemas: Mapping[str, Any] | None = None) -> ToolParser:
    """Make a parser of one message.

    Args:
        name: one of `TOOL_PARSERS`.
        schemas: the JSON schema of each function's parameters, for models that write values without types.

    Raises:
        ValueError: the name is unknown.
    """
    if name in FORMS:
        return ParameterTagsParser(name, schemas)
    make = _PARSERS.get(name)
    if make is None:
        raise ValueError(f"{name!r} is none of {', '.join(TOOL_PARSERS)}")
    return make()


def marks_are_special_tokens(name: str) -> bool:
    """Whether markers of calls may be special tokens, so that the text must keep them (skip_special_tokens)."""
    return name in _WITH_SPECIAL_TOKENS
