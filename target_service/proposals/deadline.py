"""A limit for code that runs between two steps and may never return.

A timer signal raises in the midst of it. So it must be code whose state is given up with it, it must not wait in native
code, and it must run in the process's main thread; elsewhere there is no limit.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Overdue(BaseException):
    """The time is up. No Exception, so that what is interrupted does not take it for one of its own."""


class Deadline:
    """Bounds a piece of work by CPU time of the process: a machine that stands still says nothing of the code."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._is_armed = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Raise Overdue inside once the limit is spent. Cost: 3 us."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGVTALRM, self._ring)
        self._is_armed = True
        signal.setitimer(signal.ITIMER_VIRTUAL, self._limit_s)
        try:
            yield
        finally:
            self._is_armed = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            signal.signal(signal.SIGVTALRM, before)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self._is_armed:
            self._is_armed = False
            raise Overdue
