"""Calls in a think section that never ends: a model that forgot the end of its thoughts has still called."""

from __future__ import annotations

import json
from collections.abc import Callable

from specdec.gateway.chat.deltas import MessageDelta, StreamingParser, split_at_marker
from specdec.gateway.chat.tool_calls.parts.buffered import BufferedParser


class CallsInThoughts:
    """Holds reasoning back while it may be the message's last calls. What follows them shows that they are thoughts.

    Each character is read once, so that the deltas are equal however the text is cut.
    """

    def __init__(self, make_tools: Callable[[], StreamingParser]) -> None:
        """`make_tools` makes a parser of calls; one that finds them only at a message's start finds none here."""
        self._make_tools = make_tools
        parser = make_tools()
        self._starts = parser.starts if isinstance(parser, BufferedParser) else ()
        self._parser: StreamingParser | None = None
        """Reads what may be calls; None: no start of a call was seen."""
        self._held = ""
        """Text that may begin the start of a call."""
        self._read_so_far: list[str] = []
        """What the parser of calls has read."""
        self._calls: list[MessageDelta] = []

    def push(self, text: str) -> list[MessageDelta]:
        """Deltas of more reasoning."""
        if not self._starts:
            return _reasoning(text)
        told = ""
        while text:
            if self._parser is not None:
                read, num_read = self._read(self._parser, text)
                told, text = told + read, text[num_read:]
                continue
            before, marker, rest = split_at_marker(self._held + text, self._starts)
            told += before
            self._held, text = ("", rest) if marker else (rest, "")
            if marker:
                self._parser, self._read_so_far = self._make_tools(), [marker]
                self._calls = self._parser.push(marker)
        return _reasoning(told)

    def closed(self) -> list[MessageDelta]:
        """Deltas of what is held when the section ends: it is reasoning."""
        return _reasoning(self._release())

    def _release(self) -> str:
        held = self._held + "".join(self._read_so_far)
        self._held, self._read_so_far, self._parser = "", [], None
        return held

    def finish(self) -> list[MessageDelta]:
        """Deltas of what is held when the message ends in the section: calls, if they are whole."""
        if self._parser is None:
            return self.closed()
        self._calls += self._parser.finish()
        is_all = not any(delta.content.strip() for delta in self._calls)
        calls = [delta for delta in self._calls if delta.tool_call is not None]
        return calls if is_all and _are_whole(calls) else self.closed()

    def _read(self, parser: StreamingParser, text: str) -> tuple[str, int]:
        """Read what may be calls, character by character, until it turns out to be reasoning.

        Returns:
            The reasoning, and how many characters were read.
        """
        for num_read, character in enumerate(text, 1):
            self._read_so_far.append(character)
            deltas = parser.push(character)
            if any(delta.content.strip() for delta in deltas):
                return self._release(), num_read
            self._calls += deltas
        return "", len(text)


def _reasoning(text: str) -> list[MessageDelta]:
    return [MessageDelta(reasoning=text)] if text else []


def _are_whole(calls: list[MessageDelta]) -> bool:
    """Whether there are calls, and the arguments of each are a JSON object."""
    arguments: dict[int, list[str]] = {}
    for delta in calls:
        if delta.tool_call is not None:
            arguments.setdefault(delta.tool_call.index, []).append(delta.tool_call.arguments)
    try:
        return bool(arguments) and all(isinstance(json.loads("".join(all_of)), dict) for all_of in arguments.values())
    except (ValueError, RecursionError):
        return False
