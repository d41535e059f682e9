"""Summaries of values: medians, quartiles, percentiles."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) < 2:
        return {"median": values[0], "q1": values[0], "q3": values[0]} if values else {}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def percentiles(values: Sequence[float], wanted: Sequence[int] = (50, 90, 99)) -> dict[str, float]:
    """Percentiles by name (`p50`); empty without values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{part}": ordered[min(len(ordered) - 1, len(ordered) * part // 100)] for part in wanted}
