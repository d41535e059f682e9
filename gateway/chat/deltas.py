"""Pieces of a chat message, the protocol of the parsers that produce them, and markers in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
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


def split_at_marker(text: str, markers: Sequence[str]) -> tuple[str, str, str]:
    """Split at the first of several markers.

    Returns:
        The text before the marker, the marker, and the text after it. Without a marker: the text that is part of none,
        an empty string, and the end of the text that may begin one.
    """
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        at, marker = min(found)
        return text[:at], marker, text[at + len(marker) :]
    num_held = max((_num_held(text, marker) for marker in markers), default=0)
    return text[: len(text) - num_held], "", text[len(text) - num_held :]


def may_become(text: str, marker: str) -> bool:
    """Whether a text is a proper prefix of a marker."""
    return len(text) < len(marker) and marker.startswith(text)


def _num_held(text: str, marker: str) -> int:
    """Length of the longest suffix of the text that is a proper prefix of the marker."""
    for num in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:num]):
            return num
    return 0
