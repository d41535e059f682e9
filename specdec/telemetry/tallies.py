"""Sums up the counts of a step, and writes each series once.

An update of a series takes a lock, and with several processes a write to a mapped file: 1 to 3 us. A step of eight
sessions makes some 300 updates, mostly of the same few series.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from prometheus_client import Counter, Histogram


class Tallies:
    """Counts for counters and histograms, with their labels given, until they are written."""

    def __init__(self) -> None:
        self._counts: defaultdict[Counter, float] = defaultdict(float)
        self._observed: defaultdict[Histogram, defaultdict[float, int]] = defaultdict(lambda: defaultdict(int))

    def count(self, counter: Counter, amount: float = 1) -> None:
        """As `counter.inc(amount)`."""
        self._counts[counter] += amount

    def observe(self, histogram: Histogram, value: float, times: int = 1) -> None:
        """As `histogram.observe(value)`, `times` times."""
        if times:
            self._observed[histogram][value] += times

    def write(self) -> None:
        """Bring the metrics up to date. Cost: one update for each series that changed."""
        for counter, amount in self._counts.items():
            if amount:
                counter._value.inc(amount)  # `Counter.inc` checks each call for twice as long
        self._counts.clear()
        for histogram, values in self._observed.items():
            _observe_all(histogram, values)
        self._observed.clear()


def _observe_all(histogram: Histogram, values: dict[float, int]) -> None:
    """As `Histogram.observe` for many values, for which it has no method."""
    buckets: defaultdict[int, int] = defaultdict(int)
    for value, times in values.items():
        buckets[bisect_left(histogram._upper_bounds, value)] += times
    histogram._sum.inc(sum(value * times for value, times in values.items()))
    for index, times in buckets.items():
        histogram._buckets[index].inc(times)
