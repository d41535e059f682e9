"""Pieces of a chat message, and the protocol of the parsers that produce them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next piece of a call."""

    index: int
    """Number of the call in its message, from 0."""
    id: str = ""
    """Unique id of the call, in its first delta only."""
    name: str = ""
    """Name of the function, in the first delta of a call only."""
    arguments: str = ""
    """A piece of JSON text. If the model ended the call well, all pieces form one JSON value."""


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """The next piece of an assistant's message: some content, some reasoning, or a piece of a call."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None


class StreamingParser(Protocol):
    """Parses one message in pieces. All deltas together are equal, however the text is cut.

    No text is an error: malformed text is content, or a call that ends with the text.
    """

    def push(self, text: str) -> list[MessageDelta]:
        """Deltas of the next piece of text; text that may begin a marker is held back."""

    def finish(self) -> list[MessageDelta]:
        """Deltas of the held text, at the end. No push may follow."""


class PlainParser:
    """Treats all text as content."""

    def push(self, text: str) -> list[MessageDelta]:
        """See `StreamingParser.push`."""
        return [MessageDelta(content=text)] if text else []

    def finish(self) -> list[MessageDelta]:
        """See `StreamingParser.finish`."""
        return []
