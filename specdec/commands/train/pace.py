"""Time of long work: its rate of late and its end at that rate, and when to do what takes time from it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_WINDOW_S = 60.0
"""Seconds of the past from which the rate comes, so that the end is right on a machine whose load changes."""
_LEAST_S = 1.0


class Pace:
    """Counts finished parts of one kind of work."""

    def __init__(
        self, total: int, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        """`total`: number of parts; `now`: seconds since the epoch, for the time of the end."""
        self._total = total
        self._clock, self._now = clock, now
        self._seen: deque[tuple[float, int]] = deque()

    def at(self, done: int) -> str:
        """Text for `done` finished parts: the rate and the end as soon as the former is known."""
        now_s = self._clock()
        self._seen.append((now_s, done))
        while len(self._seen) > 2 and self._seen[1][0] <= now_s - _WINDOW_S:
            self._seen.popleft()
        text = f"{done} of {self._total}"
        began_s, first = self._seen[0]
        if done == first or now_s - began_s < _LEAST_S:
            return text
        each_s = (now_s - began_s) / (done - first)
        left_s = each_s * (self._total - done)
        end = time.strftime("%H:%M", time.localtime(self._now() + left_s))
        return f"{text}, {_rate(each_s)}, {_duration(left_s)} left, until {end}"


class Seldom:
    """When to do what is worth little time beside the work, such as saving: `if it.due: with it: ...`."""

    def __init__(self, every_s: float, share: float = 0.05, clock: Callable[[], float] = time.monotonic) -> None:
        """Due every `every_s` seconds, or as seldom as needed to take at most `share` of the time."""
        self._every_s, self._share, self._clock = every_s, share, clock
        self._began_s = self._ended_s = clock()

    @property
    def due(self) -> bool:
        """Whether it is time."""
        wait_s = max(self._every_s, (self._ended_s - self._began_s) / self._share)
        return self._clock() - self._ended_s > wait_s

    def __enter__(self) -> None:
        self._began_s = self._clock()

    def __exit__(self, *_: object) -> None:
        self._ended_s = self._clock()


def _rate(each_s: float) -> str:
    return f"{each_s:.1f} s each" if each_s >= 1 else f"{1 / each_s:.3g}/s"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
