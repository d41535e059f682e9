"""Forms of PromQL that several pages use."""

from __future__ import annotations

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def rate(selector: str, by: str = "") -> str:
    """The summed rate of a counter, by labels."""
    return f"sum{_by(by)}(rate({selector}[$__rate_interval]))"


def rate_or_zero(selector: str, by: str = "") -> str:
    """As `rate`, and zero where a counter with labels has not counted yet: no failure is good news, not no data."""
    return f"{rate(selector, by)} or vector(0)"


def quantiles(histogram: str, selector: str = "") -> dict[str, str]:
    """Median, 95th and 99th percentile of a histogram, by legend."""
    return {
        name: f"histogram_quantile({share}, {rate(f'{histogram}_bucket{selector}', 'le')})"
        for name, share in QUANTILES.items()
    }


def mean(histogram: str, selector: str = "", by: str = "") -> str:
    """The mean of what a histogram observed."""
    return f"{rate(f'{histogram}_sum{selector}', by)} / {rate(f'{histogram}_count{selector}', by)}"


def ratio(part: str, whole: str, by: str = "") -> str:
    """The ratio of two counters' rates."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
