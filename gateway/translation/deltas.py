"""What comes to a chat's message, and a parser for models that say nothing but content."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """A piece of a message."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None


class StreamingParser(Protocol):
    """Takes the output's text as it comes."""

    def push(self, text: str) -> list[MessageDelta]:
        """What can be told now."""

    def finish(self) -> list[MessageDelta]:
        """What was held back."""


class PlainParser:
    """All is content."""

    def push(self, text: str) -> list[MessageDelta]:
        """The text."""
        return [MessageDelta(content=text)] if text else []

    def finish(self) -> list[MessageDelta]:
        """Nothing is held back."""
        return []
