"""A time limit for code that runs between two steps and may never return.

A timer signal raises in the midst of the code. So the code's state must be dropped with it, it must not block in native
code, and it must run in the process's main thread; other threads have no limit.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Overdue(BaseException):
    """The time is up. It is no Exception, so that the interrupted code does not catch it as its own."""


class Deadline:
    """Limits the code inside by CPU time of the process, which a stall of the machine does not spend.

    Raises Overdue inside once the limit is spent. Cost: 2 us per entry.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._is_armed = False
        self._handler = self._ring

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGVTALRM) is not self._handler:
            signal.signal(signal.SIGVTALRM, self._handler)
        self._is_armed = True
        signal.setitimer(signal.ITIMER_VIRTUAL, self._limit_s)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_armed:
            self._is_armed = False
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if self._is_armed:
            self._is_armed = False
            raise Overdue
