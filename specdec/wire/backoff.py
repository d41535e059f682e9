"""Waits before a retry."""

from __future__ import annotations

import random
from dataclasses import dataclass

_MOST_DOUBLINGS = 64
"""Doublings after which a float would overflow; the longest wait is reached long before."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double with each failure in a row, from the first up to a longest one. Times in seconds."""

    first_s: float
    longest_s: float
    spread: tuple[float, float] = (1.0, 1.0)
    """Bounds of the random factor of each wait: peers that failed together do not retry together."""

    def wait_s(self, num_failures: int, longest_s: float | None = None) -> float:
        """The wait after this many failures in a row, at least one; `longest_s` may set a lower limit this once."""
        doubled_s = self.first_s * 2.0 ** min(num_failures - 1, _MOST_DOUBLINGS)
        longest_s = self.longest_s if longest_s is None else min(self.longest_s, longest_s)
        return min(doubled_s, longest_s) * random.uniform(*self.spread)
