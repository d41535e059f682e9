"""Whether a series grows: its robust slope over the last two thirds of a run, against a stated bound."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1024 * 1024
LEAST_POINTS = 8


@dataclass(frozen=True, slots=True)
class Bound:
    """How much a series may grow over the time that is looked at: a share of its median, and something on top."""

    share: float
    extra: float

    def allows(self, median: float) -> float:
        """The most growth."""
        return self.share * median + self.extra


BOUNDS = {
    "rss_bytes": Bound(0.03, 4 * MIB),
    "uss_bytes": Bound(0.03, 4 * MIB),
    "descriptors": Bound(0.0, 4),
    "threads": Bound(0.0, 2),
    "sessions": Bound(0.3, 4),
    "requests_running": Bound(0.3, 4),
    "kv_blocks_used": Bound(0.3, 50),
    "kv_blocks_cached": Bound(0.1, 100),
    "keys": Bound(0.1, 50),
    "first_token_s p50": Bound(0.3, 0.05),
    "first_token_s p99": Bound(0.3, 0.2),
    "between_tokens_s p50": Bound(0.3, 0.005),
    "between_tokens_s p99": Bound(0.3, 0.05),
}
"""By what a series is of. What depends on the load's chance may waver more than memory and descriptors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A series over the last two thirds of a run."""

    name: str
    median: float
    least: float
    most: float
    growth: float
    """The robust slope times the time looked at."""
    allowed: float

    @property
    def is_flat(self) -> bool:
        """Whether it grows no more than it may."""
        return self.growth <= self.allowed


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """The median of the slopes between all pairs of points (Theil and Sen), which single peaks do not move.

    Raises:
        ValueError: fewer than two different times.
    """
    slopes = [
        (values[later] - values[earlier]) / (times[later] - times[earlier])
        for earlier in range(len(times))
        for later in range(earlier + 1, len(times))
        if times[later] != times[earlier]
    ]
    if not slopes:
        raise ValueError("a slope takes two points")
    return statistics.median(slopes)


def growths(times: Sequence[float], samples: Sequence[dict[str, float]]) -> list[Growth]:
    """Every series that has a bound and enough points, in alphabetical order."""
    names = sorted({name for sample in samples for name in sample})
    begins_s = times[0] + (times[-1] - times[0]) / 3
    found = []
    for name in names:
        bound = BOUNDS.get(name.partition(" ")[2])
        points = [(at, s[name]) for at, s in zip(times, samples, strict=True) if name in s and at >= begins_s]
        if bound is None or len(points) < LEAST_POINTS:
            continue
        at, values = [point[0] for point in points], [point[1] for point in points]
        median = statistics.median(values)
        found.append(
            Growth(
                name=name,
                median=median,
                least=min(values),
                most=max(values),
                growth=slope(at, values) * (at[-1] - at[0]),
                allowed=bound.allows(median),
            )
        )
    return found
