"""Load under the names of the Gateway API's model-server protocol, by which an endpoint picker chooses among pods.

The names are vLLM's, which the reference picker reads of pods without a label of another engine. There is no
vllm:lora_requests_info: the picker takes its absence for a server without adapters, which this one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry

from specdec.telemetry.registry import MetricDoc, MetricGroup, MetricType


class PickerMetrics(MetricGroup):
    """Requests of a coordinator or gateway that wait and run."""

    _prefix = "vllm"

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.waiting = self._gauge(
            "num_requests_waiting",
            "At a coordinator requests that wait for a place; at a gateway those without output.",
            promql="sum($num_requests_waiting)",
        )
        self.running = self._gauge(
            "num_requests_running",
            "At a coordinator requests that have a place; at a gateway those with output.",
            promql="sum($num_requests_running)",
        )

    @contextmanager
    def request(self) -> Iterator[Callable[[], None]]:
        """A request that waits at first; what is yielded is called when it runs."""
        at = self.waiting
        at.inc()

        def run() -> None:
            nonlocal at
            at.dec()
            at = self.running
            at.inc()

        try:
            yield run
        finally:
            at.dec()

    def _document(
        self, type_: MetricType, name: str, text: str, labels: Mapping[str, str] | None, promql: str
    ) -> MetricDoc:
        doc = MetricDoc(f"vllm:{name}", type_, text, labels or {}, promql.replace("$", "vllm:"))
        self.docs.append(doc)
        return doc


class CoordinatorPickerMetrics(PickerMetrics):
    """Requests of a coordinator, and the KV caches of its targets."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.kv_use = self._gauge(
            "kv_cache_usage_perc",
            "Share of the KV blocks of all targets that are in use, 0 to 1; of several processes the largest.",
            promql="max($kv_cache_usage_perc)",
            merge="livemax",
        )
        self.block_size = self._gauge(
            "cache_config_info",
            "1; a picker counts prefixes in blocks of this size.",
            {"block_size": "tokens", "num_gpu_blocks": "empty: the picker's own number"},
            promql="max by (block_size) ($cache_config_info)",
            merge="livemax",
        )
