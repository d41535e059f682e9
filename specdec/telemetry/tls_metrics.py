"""What every service exports of the TLS files that it uses."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from specdec.telemetry.registry import MetricGroup

_USE = {"use": "server, replicas (of a coordinator's calls), redis, otlp"}


class TlsMetrics(MetricGroup):
    """Certificates in use, and those that were refused; a use without TLS files has no series."""

    _prefix = "tls"

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.expiry = self._gauge(
            "certificate_expiry_timestamp_seconds",
            "When the certificate in use expires, or one of its chain that does so sooner, in seconds since 1970.",
            _USE,
            promql="min by (instance, use) ($certificate_expiry_timestamp_seconds) - time()",
            merge="livemin",
        )
        self.lifetime = self._gauge(
            "certificate_lifetime_seconds",
            "For how long that certificate is good in all.",
            _USE,
            promql="($certificate_expiry_timestamp_seconds - time()) / $certificate_lifetime_seconds",
            merge="livemin",
        )
        self.refused = self._gauge(
            "files_refused",
            "1 while the files on disk cannot be used, and the last good ones are; else 0.",
            _USE,
            promql="max by (instance, use) ($files_refused)",
            merge="livemax",
        )
        self.failures = self._counter(
            "renewal_failures_total",
            "Times that files were renewed with something that cannot be used.",
            _USE,
            promql="sum by (instance, use) (increase($renewal_failures_total[1h]))",
        )
