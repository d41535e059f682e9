"""Find stop strings across chunks: text that may begin one is held back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The stop string that ended the text."""

    stop_string: str
    text: str
    """The text to emit: up to the match, or to its end if the stop string is kept."""


class StopStringScanner:
    """Watches one choice's text for stop strings.

    The match that is completed first wins; of those completed by one character, the longest. Text is emitted as soon
    as it cannot be part of a match, so at most the longest stop string less one character is held back. Cost per push:
    O(held and pushed text, times the number of stop strings).
    """

    def __init__(self, stop_strings: Sequence[str], keep_match: bool = False) -> None:
        self._stops = tuple(stop_strings)
        self._keep_match = keep_match
        self._held = ""

    def push(self, text: str) -> str | StopMatch:
        """Add text; returns the text to emit now, or the match that ends the choice."""
        if not self._stops:
            return text
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            start, stop = match
            self._held = ""
            return StopMatch(stop, text[: start + len(stop)] if self._keep_match else text[:start])
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """The held text of a choice that ended without a match."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of the text that is a prefix of the stop string."""
    first = stop[0]
    position = text.find(first, max(0, len(text) - len(stop) + 1))
    while position >= 0:
        if stop.startswith(text[position:]):
            return len(text) - position
        position = text.find(first, position + 1)
    return 0
