"""How long to wait before something is tried again, and when a process that ended is started again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

_MOST_DOUBLINGS = 64
"""More would overflow a float long after the longest wait is reached."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that double with each failure in a row, from the first up to a longest one. Times in seconds."""

    first_s: float
    longest_s: float
    spread: tuple[float, float] = (1.0, 1.0)
    """Each wait is multiplied by a random factor between these: many who failed together do not return together."""

    def wait_s(self, num_failures: int, longest_s: float | None = None) -> float:
        """The wait after this many failures in a row, at least one; `longest_s` may set a lower limit this once."""
        doubled_s = self.first_s * 2.0 ** min(num_failures - 1, _MOST_DOUBLINGS)
        longest_s = self.longest_s if longest_s is None else min(self.longest_s, longest_s)
        return min(doubled_s, longest_s) * random.uniform(*self.spread)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How long to wait before a process is started again, and how often it may fail. Times in seconds."""

    backoff: Backoff = field(default_factory=lambda: Backoff(first_s=0.25, longest_s=10.0))
    steady_s: float = 30.0
    """Life after which a process begins with the first wait again."""
    max_futile: int = 5
    """Starts in a row that end before the process is ready: the cause is there to stay."""


class RestartCount:
    """The ends of one process in a row, without a steady life in between."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._num_ends = 0
        self.num_futile = 0
        """Starts in a row that ended before the process was ready."""

    def wait_after_end(self, lived_s: float | None) -> float:
        """Seconds until the next start. `lived_s`: how long the process was ready; None: it never was."""
        is_steady = lived_s is not None and lived_s >= self._policy.steady_s
        self.num_futile = self.num_futile + 1 if lived_s is None else 0
        self._num_ends = 1 if is_steady else self._num_ends + 1
        return self._policy.backoff.wait_s(self._num_ends)

    @property
    def is_hopeless(self) -> bool:
        """Whether another start would be one too many."""
        return self.num_futile >= self._policy.max_futile
