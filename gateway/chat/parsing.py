"""Parse an assistant's message: first its reasoning, then the calls in the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.gateway.chat.deltas import MessageDelta, PlainParser, StreamingParser
from specdec.gateway.chat.reasoning import ThinkParser, make_reasoning_parser
from specdec.gateway.chat.thoughts import CallsInThoughts
from specdec.gateway.chat.tool_calls.families import make_tool_parser
from specdec.gateway.chat.tool_calls.forced import ForcedCallsParser
from specdec.gateway.chat.tool_choice import ToolChoice


def make_message_parser(
    reasoning: str,
    tools: str,
    *,
    has_tools: bool,
    tool_choice: ToolChoice = None,
    forced: bool = False,
    sole_function: str = "",
    parallel_tool_calls: bool = True,
    thinking: bool | None = None,
    schemas: Mapping[str, Any] | None = None,
) -> MessageParser:
    """Make a parser of one choice's message.

    Parsing does not guarantee that a call is made, or that its arguments fit a schema. If the output was constrained
    to calls (`forced`), it is a list of them and nothing else.

    Args:
        reasoning: name of a reasoning parser (`reasoning.REASONING_PARSERS`).
        tools: name of a tool parser (`tool_calls.TOOL_PARSERS`).
        has_tools: the request has tools; without them, or with the tool choice none, all text is content.
        tool_choice: the request's.
        forced: the output is constrained to a JSON list of calls after the reasoning.
        sole_function: with `forced`, the only function that can be called; empty if there are several.
        parallel_tool_calls: False: drop calls after the first.
        thinking: the request's template variable; see `make_reasoning_parser`.
        schemas: see `make_tool_parser`.

    Raises:
        ValueError: a name is unknown, or the two parsers do not go together.
    """
    check_names(reasoning, tools)
    tool_parser = make_tool_parser(tools, schemas)
    if not has_tools or tool_choice == "none":
        tool_parser = PlainParser()
    elif forced:
        tool_parser = ForcedCallsParser(sole_function)
    elif tools == "harmony":
        return MessageParser(PlainParser(), tool_parser, parallel_tool_calls)
    thoughts = None
    if has_tools and tool_choice != "none" and not forced:
        thoughts = CallsInThoughts(lambda: make_tool_parser(tools, schemas))
    reasoning_parser = make_reasoning_parser(reasoning, thinking=thinking)
    return MessageParser(reasoning_parser, tool_parser, parallel_tool_calls, thoughts)


def begin(parser: StreamingParser, is_thinking: bool | None) -> None:
    """Tell a parser of messages whether the rendered prompt ends within a think section; None: unknown."""
    if isinstance(parser, MessageParser) and is_thinking is not None:
        parser.begin(is_thinking)


def check_names(reasoning: str, tools: str) -> None:
    """Raise ValueError if the two parsers do not go together."""
    if tools == "harmony" and reasoning != "harmony":
        raise ValueError("tool_parser harmony needs reasoning_parser harmony")
    if reasoning == "harmony" and tools not in ("harmony", "none"):
        raise ValueError(f"reasoning_parser harmony needs tool_parser harmony or none, not {tools}")


class MessageParser:
    """Passes content to a tool parser, and looks for calls in thoughts that never end."""

    def __init__(
        self,
        reasoning: StreamingParser,
        tools: StreamingParser,
        parallel_tool_calls: bool,
        thoughts: CallsInThoughts | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._parallel_tool_calls = parallel_tool_calls
        self._thoughts = thoughts if isinstance(reasoning, ThinkParser) else None

    def begin(self, is_thinking: bool) -> None:
        """Say before the first text whether the rendered prompt ends within a think section."""
        if isinstance(self._reasoning, ThinkParser):
            self._reasoning.begin(is_thinking)

    def push(self, text: str) -> list[MessageDelta]:
        """See `StreamingParser.push`."""
        return self._through(self._reasoning.push(text))

    def finish(self) -> list[MessageDelta]:
        """See `StreamingParser.finish`."""
        through = self._through(self._reasoning.finish())
        if self._thoughts is not None:
            through += filter(self._is_wanted, self._thoughts.finish())
        return [*through, *filter(self._is_wanted, self._tools.finish())]

    def _through(self, deltas: list[MessageDelta]) -> list[MessageDelta]:
        through: list[MessageDelta] = []
        for delta in deltas:
            if delta.reasoning and self._thoughts is not None:
                through += self._thoughts.push(delta.reasoning)
            elif delta.reasoning:
                through.append(MessageDelta(reasoning=delta.reasoning))
            if delta.content:
                through += self._closed()
                through += filter(self._is_wanted, self._tools.push(delta.content))
        return through + self._closed()

    def _closed(self) -> list[MessageDelta]:
        """The held reasoning, if the section has ended."""
        is_open = isinstance(self._reasoning, ThinkParser) and self._reasoning.is_open
        return [] if self._thoughts is None or is_open else self._thoughts.closed()

    def _is_wanted(self, delta: MessageDelta) -> bool:
        return self._parallel_tool_calls or delta.tool_call is None or delta.tool_call.index == 0
