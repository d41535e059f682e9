"""How long to wait before a stream is opened again."""

from __future__ import annotations

import random

_MOST_FIRST_WAITS_IN_NEED = 5


class BackOff:
    """Waits that double up to a longest one, each spread by a quarter, and begin anew after a stream that lasted."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def wait_s(self, lasted_s: float, in_need: bool) -> float:
        """How long to wait now.

        Args:
            lasted_s: how long the stream, or the attempt to open it, lasted.
            in_need: somebody waits for this very replica: the wait stays short.
        """
        if lasted_s > self._longest_s:
            self._next_s = self._first_s
        longest_s = self._longest_s
        if in_need:
            longest_s = min(longest_s, _MOST_FIRST_WAITS_IN_NEED * self._first_s)
        wait_s = min(self._next_s, longest_s)
        self._next_s = min(2 * self._next_s, longest_s)
        return wait_s * random.uniform(0.75, 1.25)
