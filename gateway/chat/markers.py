"""Markers in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


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
