"""When a long queue stops speculation."""

from __future__ import annotations

import time
from collections.abc import Callable

_RECOVERED_S = 5.0
"""Seconds of an empty queue before speculation resumes: the queue may be empty only because nobody speculates."""


class LoadShedding:
    """Decides whether new sessions may speculate: not while requests have queued for longer than a burst lasts.

    Speculation is the only work that can be left out without losing a token.
    """

    def __init__(self, shed_after_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`shed_after_s`: how long the queue must exist without a break; None: sessions may always speculate."""
        self._shed_after_s = shed_after_s
        self._clock = clock
        self._since_s = -float("inf")
        self._has_queue = False
        self._is_shedding = False

    def on_queue(self, num_waiting: int) -> None:
        """The number of waiting requests has changed."""
        if (num_waiting > 0) != self._has_queue:
            self._update()
            self._has_queue = num_waiting > 0
            self._since_s = self._clock()

    @property
    def is_shedding(self) -> bool:
        """Sessions that open now are to decode plainly."""
        self._update()
        return self._is_shedding

    def _update(self) -> None:
        lasted_s = self._clock() - self._since_s
        if self._has_queue:
            if self._shed_after_s is not None and lasted_s >= self._shed_after_s:
                self._is_shedding = True
        elif lasted_s >= _RECOVERED_S:
            self._is_shedding = False
