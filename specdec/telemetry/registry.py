"""Declaration of metrics: one prefix per group, a meaning and a query beside every name."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from specdec import __version__
from specdec.telemetry.logs.writer import count_dropped_lines

# Steps of small models, and hops between processes, take well under 10 ms; steps of large models 10 to 100 ms.
FINE_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04,
    0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
GAP_S = (
    0.00002, 0.00004, 0.00006, 0.00008, 0.0001, 0.000125, 0.00015, 0.000175, 0.0002, 0.00025, 0.0003, 0.0004, 0.0005,
    0.00075, 0.001, 0.002, 0.005, 0.01, 0.05, 0.25,
)  # fmt: skip
COARSE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKENS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
BATCH_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

MetricType = Literal["counter", "gauge", "histogram"]
GaugeMerge = Literal["livesum", "livemax", "livemin"]
"""Value of a gauge that several processes set; processes that have ended never count."""


@dataclass(frozen=True, slots=True)
class MetricDoc:
    """A metric's entry in docs/metrics.md.

    Attributes:
        name: as exported; a histogram's series add _bucket, _sum and _count to it.
        type: counter, gauge or histogram.
        text: its meaning.
        labels: the values of each label.
        promql: a query that uses it.
    """

    name: str
    type: MetricType
    text: str
    labels: Mapping[str, str]
    promql: str

    @property
    def series(self) -> dict[str, frozenset[str]]:
        """Names of the series that queries may select, each with its labels."""
        labels = frozenset(self.labels)
        if self.type != "histogram":
            return {self.name: labels}
        return {f"{self.name}_bucket": labels | {"le"}, f"{self.name}_sum": labels, f"{self.name}_count": labels}


class MetricGroup:
    """Makes metrics named specdec_<prefix>_... in one registry, and keeps their entries of docs/metrics.md.

    In a query, ``$`` stands for the prefix of this group: ``rate($tokens_total[5m])``.
    """

    _prefix: str

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.docs: list[MetricDoc] = []

    def _counter(
        self,
        name: str,
        text: str,
        labels: Mapping[str, str] | None = None,
        *,
        promql: str,
        initial: Iterable[str] = (),
    ) -> Counter:
        """Declare a counter; `initial` are values of its only label that are exported as 0 from the start.

        For Prometheus a series that appears at 5 has a rate of 0: a burst of first failures would be missed.
        """
        doc = self._document("counter", name, text, labels, promql)
        counter = Counter(doc.name, text, tuple(doc.labels), registry=self._registry)
        for value in initial:
            counter.labels(value)
        return counter

    def _gauge(
        self,
        name: str,
        text: str,
        labels: Mapping[str, str] | None = None,
        *,
        promql: str,
        merge: GaugeMerge = "livesum",
    ) -> Gauge:
        doc = self._document("gauge", name, text, labels, promql)
        # A gauge that one process of a replica sets is 0 in the other processes' files: the sum is its value.
        return Gauge(doc.name, text, tuple(doc.labels), registry=self._registry, multiprocess_mode=merge)

    def _histogram(
        self,
        name: str,
        text: str,
        buckets: tuple[float, ...],
        labels: Mapping[str, str] | None = None,
        *,
        promql: str,
    ) -> Histogram:
        doc = self._document("histogram", name, text, labels, promql)
        return Histogram(doc.name, text, tuple(doc.labels), registry=self._registry, buckets=buckets)

    def _document(
        self, type_: MetricType, name: str, text: str, labels: Mapping[str, str] | None, promql: str
    ) -> MetricDoc:
        prefix = f"specdec_{self._prefix}_"
        doc = MetricDoc(f"{prefix}{name}", type_, text, labels or {}, promql.replace("$", prefix))
        self.docs.append(doc)
        return doc


class BuildInfo:
    """specdec_build_info of one service, always 1, with the running versions as labels; and the log's dropped lines.

    Each of several processes that share their metrics may make one: the series stays 1.
    """

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        doc = MetricDoc(
            "specdec_build_info",
            "gauge",
            "1, with the versions that run as labels.",
            {
                "service": "coordinator, target, draft, gateway",
                "version": "of specdec",
                "python": "version of the interpreter",
            },
            "count by (service, version) (specdec_build_info)",
        )
        dropped = MetricDoc(
            "specdec_log_lines_dropped_total",
            "counter",
            "Lines of the log that were dropped, because nothing reads it or its disk is full.",
            {},
            "sum by (instance) (rate(specdec_log_lines_dropped_total[5m]))",
        )
        self.docs = [doc, dropped]
        count_dropped_lines(Counter(dropped.name, dropped.text, registry=registry).inc)
        gauge = Gauge(doc.name, doc.text, tuple(doc.labels), registry=registry, multiprocess_mode="livemax")
        gauge.labels(service, __version__, platform.python_version()).set(1)
