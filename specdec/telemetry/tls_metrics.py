"""Metrics of the TLS files that a service uses."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from specdec.telemetry.registry import MetricGroup

_USE = {"use": "server, replicas (of a coordinator's calls), coordinators (of a gateway's), redis, otlp"}


class TlsMetrics(MetricGroup):
    """Certificates in use, and refused ones; a use without TLS files has no series."""

    _prefix = "tls"

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.expiry = self._gauge(
            "certificate_expiry_timestamp_seconds",
            "Expiry of the certificate in use, or of an earlier one in its chain, in seconds since 1970.",
            _USE,
            promql="min by (instance, use) ($certificate_expiry_timestamp_seconds) - time()",
            merge="livemin",
        )
        self.lifetime = self._gauge(
            "certificate_lifetime_seconds",
            "Seconds from the beginning to the end of that certificate's validity.",
            _USE,
            promql="($certificate_expiry_timestamp_seconds - time()) / $certificate_lifetime_seconds",
            merge="livemin",
        )
        self.refused = self._gauge(
            "files_refused",
            "1 while the files on disk cannot be used and the last good ones are in use; otherwise 0.",
            _USE,
            promql="max by (instance, use) ($files_refused)",
            merge="livemax",
        )
        self.failures = self._counter(
            "renewal_failures_total",
            "Renewals of files that cannot be used.",
            _USE,
            promql="sum by (instance, use) (increase($renewal_failures_total[1h]))",
        )
