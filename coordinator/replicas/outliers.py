"""Eject replicas that fail too often for a while; then they are on probation, then trusted again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

FIRST_EJECTION_S = 10.0
"""Seconds of a replica's first ejection, as long as a service takes to restart; each further one is twice as long."""
LONGEST_EJECTION_S = 300.0
"""Seconds of the longest ejection: a replica that was mended gets sessions again within five minutes."""
_MOST_DOUBLINGS = 30
"""Doublings of an ejection's time, at most, so that the float does not overflow."""


class Standing(StrEnum):
    """A replica's trust."""

    TRUSTED = "trusted"
    EJECTED = "ejected"
    PROBATION = "probation"


@dataclass(frozen=True, slots=True)
class EjectionSettings:
    """Bounds of ejections. Times in seconds."""

    num_failures: int = 5
    """Consecutive failures that eject a replica."""
    first_s: float = FIRST_EJECTION_S
    most_s: float = LONGEST_EJECTION_S
    num_successes: int = 2
    """Consecutive successes on probation after which a replica is trusted again."""


@dataclass(slots=True)
class _Record:
    num_failures: int = 0
    num_successes: int = 0
    num_ejections: int = 0
    ends_s: float | None = None
    """Monotonic time at which the ejection ends; None: trusted."""


class OutlierDetector:
    """Counts successes and failures by replica. Keeps records only of replicas that failed.

    Invariant: a replica is ejected only while the caller has another one to use.
    """

    def __init__(self, settings: EjectionSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def standing(self, replica: str) -> Standing:
        """A replica's trust now."""
        record = self._records.get(replica)
        if record is None or record.ends_s is None:
            return Standing.TRUSTED
        return Standing.EJECTED if self._clock() < record.ends_s else Standing.PROBATION

    def remaining_s(self, replica: str) -> float:
        """Seconds left of the replica's ejection; 0 if it is not ejected."""
        record = self._records.get(replica)
        return 0.0 if record is None or record.ends_s is None else max(0.0, record.ends_s - self._clock())

    def failed(self, replica: str, num_others: int, *, is_proven: bool = False) -> bool:
        """A replica failed; returns whether that ejects it.

        Args:
            replica: its address.
            num_others: other replicas that could take its place; with 0 it is not ejected.
            is_proven: eject it for this failure alone.
        """
        record = self._records.setdefault(replica, _Record())
        standing = self.standing(replica)
        record.num_successes = 0
        record.num_failures += 1
        is_enough = is_proven or standing is Standing.PROBATION or record.num_failures >= self._settings.num_failures
        if standing is Standing.EJECTED or not is_enough or num_others == 0:
            return False
        length_s = self._settings.first_s * 2 ** min(record.num_ejections, _MOST_DOUBLINGS)
        record.ends_s = self._clock() + min(length_s, self._settings.most_s)
        record.num_ejections += 1
        record.num_failures = 0
        return True

    def succeeded(self, replica: str) -> bool:
        """A replica succeeded; returns whether that ends its probation.

        A replica that is trusted again keeps its record, so its next ejection is longer, until it has succeeded
        `num_successes` times more.
        """
        record = self._records.get(replica)
        if record is None:
            return False
        record.num_failures = 0
        standing = self.standing(replica)
        if standing is Standing.EJECTED:
            return False
        record.num_successes += 1
        if record.num_successes < self._settings.num_successes:
            return False
        if standing is Standing.PROBATION:
            record.ends_s, record.num_successes = None, 0
            return True
        del self._records[replica]
        return False

    def forget(self, replica: str) -> None:
        """The replica was removed."""
        self._records.pop(replica, None)
