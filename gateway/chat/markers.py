"""Find markers in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


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
