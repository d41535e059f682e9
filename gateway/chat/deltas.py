"""The pieces of a chat message as a client sees them, the form of the parsers that find them, and markers in text."""

from __future__ import annotations

from collections.abc import Sequence
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


def split_at_marker(text: str, markers: Sequence[str]) -> tuple[str, str, str]:
    """Split at the first of some markers.

    Returns:
        The text before the marker, the marker, and what follows it. Without a marker: the text that is part of none, an
        empty string, and the end of the text that may be the start of one.
    """
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        at, marker = min(found)
        return text[:at], marker, text[at + len(marker) :]
    num_held = max((_num_held(text, marker) for marker in markers), default=0)
    return text[: len(text) - num_held], "", text[len(text) - num_held :]


def may_become(text: str, marker: str) -> bool:
    """Whether a text is the start of a marker, but not all of it."""
    return len(text) < len(marker) and marker.startswith(text)


def _num_held(text: str, marker: str) -> int:
    """How many characters at the end are a start of the marker."""
    for num in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:num]):
            return num
    return 0
