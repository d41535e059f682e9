"""Metrics of the servicer process of a target or draft, in front of the engine."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from specdec.telemetry.registry import MetricGroup

_DIRECTION = {"direction": "in (from callers), out"}


class RelayMetrics(MetricGroup):
    """The servicer process of a target or draft: its streams, and its registration."""

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        self._prefix = service
        super().__init__(registry)
        self.streams = self._gauge(
            "open_streams", "Open streams of coordinators.", promql="sum by (instance) ($open_streams)"
        )
        self.links = self._gauge(
            "open_links",
            "Open direct links between this replica and replicas of the other role.",
            promql="sum by (instance) ($open_links)",
        )
        self.stream_ends = self._counter(
            "streams_total",
            "Streams that ended.",
            {"outcome": "closed, cancelled, aborted"},
            promql="sum by (outcome) (rate($streams_total[5m]))",
            initial=("closed", "cancelled", "aborted"),
        )
        self.messages = self._counter(
            "messages_total",
            "Messages relayed.",
            _DIRECTION,
            promql="sum by (direction) (rate($messages_total[5m]))",
        )
        self.message_bytes = self._counter(
            "message_bytes_total",
            "Bytes relayed.",
            _DIRECTION,
            promql="sum by (direction) (rate($message_bytes_total[5m]))",
        )
        self.store_up = self._gauge(
            "store_up",
            "1 if the last operation that reached Redis was answered, otherwise 0; without Redis always 1.",
            promql="min($store_up)",
        )
        self.store_up.set(1)
        self.announce_failures = self._counter(
            "announce_failures_total",
            "Renewals of the registration in Redis that failed.",
            promql="sum by (instance) (increase($announce_failures_total[5m]))",
        )
        self.engine_restarts = self._counter(
            "engine_restarts_total",
            "Engine processes that ended after they were ready, and were started again.",
            {"cause": "exited, killed, silent, stuck"},
            promql="sum by (instance, cause) (increase($engine_restarts_total[15m]))",
            initial=("exited", "killed", "silent", "stuck"),
        )
        self.engine_silence = self._gauge(
            "engine_silence_seconds",
            "Seconds since the engine process's last sign of life; it gives four a second.",
            promql="max by (instance) ($engine_silence_seconds)",
        )

    def num_open(self, *, is_link: bool) -> Gauge:
        """The gauge of open streams or links."""
        return self.links if is_link else self.streams
