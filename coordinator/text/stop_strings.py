"""Find stop strings across chunks: text that may begin one is held back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    A special token that the text leaves out is pushed as hidden. A stop string matches with it, if it has the token's
    whole text, and without it.
    """

    def __init__(self, stop_strings: Sequence[str], keep_match: bool = False) -> None:
        self._stops = tuple(stop_strings)
        self._keep_match = keep_match
        self._held = ""
        self._hidden: list[range] = []
        """Places of hidden texts in the held text."""

    def push(self, text: str) -> str | StopMatch:
        """Add text; returns the text to emit now, or the match that ends the choice."""
        if not self._stops:
            return text
        self._held += text
        return self._advance_hidden() if self._hidden else self._advance()

    def push_hidden(self, text: str) -> str | StopMatch:
        """Add a special token's text, which is emitted only within a kept stop string."""
        self._hidden.append(range(len(self._held), len(self._held) + len(text)))
        self._held += text
        return self._advance_hidden()

    def finish(self) -> str:
        """The held text of a choice that ended without a match."""
        text, _ = self._shown()
        self._held, self._hidden = "", []
        return text

    def _advance(self) -> str | StopMatch:
        text = self._held
        match = min(self._matches(text), default=None)
        if match is not None:
            return self._match(text, *match[1:])
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _advance_hidden(self) -> str | StopMatch:
        """`_advance` where the held text has hidden parts."""
        whole, (shown, places) = self._held, self._shown()
        found = list(self._matches(shown))
        for end, start, stop in self._matches(whole):
            if start in places and end in places:
                found.append((places[end], places[start], stop))
        if found:
            return self._match(shown, *min(found)[1:])
        first = len(shown) - max(_overlap(shown, stop) for stop in self._stops)
        starts = [at for at, place in places.items() if place == first][-1:]
        starts += [at for at in places if any(stop.startswith(whole[at:]) for stop in self._stops)]
        start = min(starts)
        self._held = whole[start:]
        self._hidden = [range(at.start - start, at.stop - start) for at in self._hidden if at.start >= start]
        return shown[: places[start]]

    def _matches(self, text: str) -> Iterator[tuple[int, int, str]]:
        """End, start and stop string of the first match of each stop string."""
        for stop in self._stops:
            if (start := text.find(stop)) >= 0:
                yield start + len(stop), start, stop

    def _match(self, text: str, start: int, stop: str) -> StopMatch:
        self._held, self._hidden = "", []
        return StopMatch(stop, text[:start] + stop if self._keep_match else text[:start])

    def _shown(self) -> tuple[str, dict[int, int]]:
        """The held text without its hidden parts, and places in it by places in the whole that cut no hidden part."""
        shown, places, num_hidden, start = "", dict[int, int](), 0, 0
        for part in [*self._hidden, range(len(self._held), len(self._held))]:
            places |= {at: at - num_hidden for at in range(start, part.start + 1)}
            shown += self._held[start : part.start]
            num_hidden, start = num_hidden + len(part), part.stop
        return shown, places


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of the text that is a prefix of the stop string."""
    first = stop[0]
    position = text.find(first, max(0, len(text) - len(stop) + 1))
    while position >= 0:
        if stop.startswith(text[position:]):
            return len(text) - position
        position = text.find(first, position + 1)
    return 0
