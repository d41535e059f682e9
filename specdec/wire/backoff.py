"""Waits before a retry, and before a process that ended is started again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

_MOST_DOUBLINGS = 64
"""Doublings after which a float would overflow; the longest wait is reached long before."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double with each failure in a row, from the first up to a longest one. Times in seconds."""

    first_s: float
    longest_s: float
    spread: tuple[float, float] = (1.0, 1.0)
    """Bounds of the random factor of each wait: peers that failed together do not retry together."""
    uniform: Callable[[float, float], float] | None = None
    """Draws the factor; None: `random.uniform`."""

    def wait_s(self, num_failures: int, longest_s: float | None = None) -> float:
        """Seconds to wait after `num_failures` (at least 1) in a row; `longest_s` may lower the limit for this call."""
        doubled_s = self.first_s * 2.0 ** min(num_failures - 1, _MOST_DOUBLINGS)
        longest_s = self.longest_s if longest_s is None else min(self.longest_s, longest_s)
        return min(doubled_s, longest_s) * (self.uniform or random.uniform)(*self.spread)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Waits before a process is started again, and the number of failures allowed. Times in seconds."""

    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=0.25, longest_s=10.0))
    steady_s: float = 30.0
    """Time of life after which the waits begin anew."""
    max_futile: int = 5
    """Starts in a row that end before the process is ready, after which no start is tried."""


class RestartCount:
    """Counts the ends of one process without a steady life in between."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._num_ends = 0
        self.num_futile = 0
        """Starts in a row that ended before the process was ready."""

    def wait_after_end(self, lived_s: float | None) -> float:
        """Seconds until the next start. `lived_s`: time for which the process was ready; None: it never was."""
        is_steady = lived_s is not None and lived_s >= self._policy.steady_s
        self.num_futile = self.num_futile + 1 if lived_s is None else 0
        self._num_ends = 1 if is_steady else self._num_ends + 1
        return self._policy.backoff.wait_s(self._num_ends)

    @property
    def is_hopeless(self) -> bool:
        """Whether no further start should be tried."""
        return self.num_futile >= self._policy.max_futile
