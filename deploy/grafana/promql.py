"""PromQL expressions that several pages use."""

from __future__ import annotations

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
TOKENS_PER_S = "count:tok/s"
TIMES = "suffix:x"
OF_NAMESPACE = '{namespace=~"$namespace"}'
OF_INSTANCE = '{namespace=~"$namespace",instance=~"$instance"}'


def rate(selector: str, by: str = "") -> str:
    """The summed rate of a counter, by labels."""
    return f"sum{_by(by)}(rate({selector}[$__rate_interval]))"


def quantiles(histogram: str, selector: str = "") -> dict[str, str]:
    """Median, 95th and 99th percentile of a histogram, by legend."""
    return {
        name: f"histogram_quantile({share}, {rate(f'{histogram}_bucket{selector}', 'le')})"
        for name, share in QUANTILES.items()
    }


def mean(histogram: str, selector: str = "", by: str = "") -> str:
    """The mean of a histogram's observations."""
    return f"{rate(f'{histogram}_sum{selector}', by)} / {rate(f'{histogram}_count{selector}', by)}"


def ratio(part: str, whole: str, by: str = "") -> str:
    """The ratio of two counters' rates."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
