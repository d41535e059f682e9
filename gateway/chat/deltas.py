"""What a piece of output means to a chat client, and the form of the parsers that find it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next piece of a call."""

    index: int
    """Of the call in its message, from 0 on."""
    id: str = ""
    """In the first delta of a call only; of no other call."""
    name: str = ""
    """Of the function; in the first delta of a call only."""
    arguments: str = ""
    """A piece of JSON text. All pieces of a call that the model ended well are one JSON value."""


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """The next piece of an assistant's message: some content, some reasoning, or a piece of a call."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None


class StreamingParser(Protocol):
    """Parses one message, in pieces as they come. However a text is cut, all deltas together are the same.

    No text is an error: what is not well-formed is content, or a call that ends as the text does.
    """

    def push(self, text: str) -> list[MessageDelta]:
        """What the next piece of text lets be told now; what may be the start of a marker is held back."""

    def finish(self) -> list[MessageDelta]:
        """What was held back, at the end of the text. Nothing is pushed after it."""


class PlainParser:
    """Takes everything for content."""

    def push(self, text: str) -> list[MessageDelta]:
        """See `StreamingParser.push`."""
        return [MessageDelta(content=text)] if text else []

    def finish(self) -> list[MessageDelta]:
        """See `StreamingParser.finish`."""
        return []
