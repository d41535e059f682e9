"""Times and ends of a run's requests: quantiles in bounded memory, and confidence intervals over runs."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_LEAST_S, _PER_DECADE, _DECADES = 1e-5, 200, 9
"""Shortest time that is told apart, classes per tenfold (1.2 % each), and tenfolds up to the longest time."""
_OF_QUOTAS = ("QUOTA_EXCEEDED", "TOO_MANY_REQUESTS_OF_TENANT")
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for 95 %, by degrees of freedom from 1."""


class TimeCounts:
    """Counts of times by classes of 1.2 %."""

    def __init__(self) -> None:
        self._counts = np.zeros(_PER_DECADE * _DECADES + 1)

    def __len__(self) -> int:
        return round(float(self._counts.sum()))

    def add(self, times_s: np.ndarray, weights: np.ndarray) -> None:
        """Count many times, each with a weight."""
        index = np.log10(np.maximum(times_s, _LEAST_S) / _LEAST_S) * _PER_DECADE
        classes = np.minimum(index.astype(np.int64), len(self._counts) - 1)
        self._counts += np.bincount(classes, weights, len(self._counts))

    def add_one(self, time_s: float, weight: float = 1.0) -> None:
        """Count one time."""
        index = int(math.log10(max(time_s, _LEAST_S) / _LEAST_S) * _PER_DECADE)
        self._counts[min(index, len(self._counts) - 1)] += weight

    def merge(self, other: TimeCounts) -> None:
        """Add the counts of another run."""
        self._counts += other._counts

    def quantile(self, share: float) -> float:
        """The time with at most a share of the times below it, within 1.2 %, as benchmarks count; 0.0 without times."""
        total = self._counts.sum()
        if not total:
            return 0.0
        index = int(np.searchsorted(np.cumsum(self._counts), share * total, side="right"))
        index = min(index, int(np.flatnonzero(self._counts)[-1]))
        return float(_LEAST_S * 10 ** ((index + 0.5) / _PER_DECADE))

    def share_above(self, time_s: float) -> float:
        """Share of the times above one; 0.0 without times."""
        total = self._counts.sum()
        index = int(math.log10(max(time_s, _LEAST_S) / _LEAST_S) * _PER_DECADE)
        return float(self._counts[index + 1 :].sum() / total) if total else 0.0


@dataclass(slots=True)
class RunTally:
    """A run's figures. A request is counted in exactly one of `num_ended`, `refusals`, `failures`, or runs."""

    first_token: TimeCounts = field(default_factory=TimeCounts)
    inter_token: TimeCounts = field(default_factory=TimeCounts)
    """Time between two commits of a stream over the tokens of the later one, once per token."""
    from_s: float = -math.inf
    """When measuring begins: times that began earlier, and tokens and ends before it, are not in the figures."""
    queued: TimeCounts = field(default_factory=TimeCounts)
    num_arrived: int = 0
    num_ended: int = 0
    last_end_s: float = 0.0
    """When the last request ended."""
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    """Of prompts that targets took, those of moved streams again."""
    num_cached_tokens: int = 0
    """Of these, those that the target had in its prefix cache."""
    tokens_of: Counter[str] = field(default_factory=Counter)
    """Output tokens by tenant."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Requests given up after their retries, by the last refusal's reason."""
    refused_of: Counter[str] = field(default_factory=Counter)
    """The same by tenant."""
    failures: Counter[str] = field(default_factory=Counter)
    num_refused_calls: int = 0
    """Refusals, those with a retry after them included."""
    num_moved: int = 0
    """Times that a stream went on at another target."""
    num_good: int = 0
    """Requests that ended within both objectives."""

    def begun(self, arrived_s: float, now_s: float) -> None:
        """A request has its first token."""
        if arrived_s >= self.from_s:
            self.first_token.add_one(now_s - arrived_s)

    def committed(self, last_s: np.ndarray, now_s: float, tokens: np.ndarray) -> None:
        """Streams that had tokens at `last_s` have some more."""
        if now_s < self.from_s:
            return
        self.num_tokens += int(tokens.sum())
        is_measured = last_s >= self.from_s
        self.inter_token.add((now_s - last_s) / tokens, tokens * is_measured)

    @property
    def num_running(self) -> int:
        """Requests that neither ended, failed nor were refused."""
        return self.num_arrived - self.num_ended - sum(self.refusals.values()) - sum(self.failures.values())

    @property
    def cached_share(self) -> float:
        """Share of the prompts' tokens that were cached."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    @property
    def served_share(self) -> float:
        """Share of the requests that have come to an end which ended well; 1.0 without any.

        Requests above their tenant's quota do not count: they are refused as is wanted.
        """
        of_quotas = sum(self.refusals[reason] for reason in _OF_QUOTAS)
        lost = sum(self.refusals.values()) - of_quotas + sum(self.failures.values())
        return self.num_ended / (self.num_ended + lost) if self.num_ended + lost else 1.0


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over runs with other seeds, and the half width of its 95 % confidence interval."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """By Student's t; one value has no width."""
        if len(values) < 2:
            return cls(values[0], 0.0)
        t = _T95[len(values) - 2] if len(values) - 2 < len(_T95) else 1.96
        return cls(statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(len(values)))

    def text(self, unit: float = 1.0) -> str:
        """Mean and half width in a unit, as `1304 ± 280`, never with an exponent."""
        half = unit * self.half
        return f"{_number(unit * self.mean, 3)} ± {_number(half, 2)}" if half else _number(unit * self.mean, 3)

    @property
    def low(self) -> float:
        """The lower bound, at least 0."""
        return max(0.0, self.mean - self.half)

    @property
    def high(self) -> float:
        """The upper bound."""
        return self.mean + self.half


def _number(value: float, digits: int) -> str:
    """A number with some significant digits."""
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"
