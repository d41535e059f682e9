"""The OpenTelemetry SDK as specdec uses it: sampler, resource, queue and OTLP/gRPC exporter."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from specdec import __version__
from specdec.telemetry.tracing_settings import TracingSettings
from specdec.wire.tls_files import TlsFile, TlsFiles, TlsFilesBroken, TlsMaterial, TlsPaths, client_context


class Pipeline:
    """A tracer whose spans are exported. The standard OTEL_* variables complete the settings:
    OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME, OTEL_BSP_*, OTEL_SPAN_*, OTEL_EXPORTER_OTLP_{HEADERS,CERTIFICATE,
    CLIENT_KEY,CLIENT_CERTIFICATE,COMPRESSION,TIMEOUT}.
    """

    def __init__(self, settings: TracingSettings, service: str, sample_ratio: float) -> None:
        """Start the exporting thread. Raises TlsFilesBroken."""
        self._exporter = _FollowingExporter(settings)
        sampler = ParentBased(TraceIdRatioBased(sample_ratio))
        # Not at exit: `flush_and_stop` is bounded in time, the SDK's own shutdown is not.
        self._provider = TracerProvider(sampler, _resource(service), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer = self._provider.get_tracer("specdec", __version__)

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files that exports follow, if any."""
        return self._exporter.files

    def flush_and_stop(self) -> None:
        """Export the queued spans, and end the thread. A hanging collector makes it hang."""
        self._provider.shutdown()

    def cancel(self) -> None:
        """Break off the running and the waiting exports, so that `flush_and_stop` returns."""
        self._exporter.shutdown()


class _FollowingExporter(SpanExporter):
    """Exports with the present TLS files: OpenTelemetry's exporter keeps its first certificate."""

    def __init__(self, settings: TracingSettings) -> None:
        self._settings = settings
        self.files = _tls_files(settings)
        self._tls = None if self.files is None else self.files.current()
        self._exporter = _exporter(settings, self._tls)
        self._lock = threading.Lock()
        self._is_shut_down = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans; called by one thread at a time."""
        self._renew()
        return self._exporter.export(spans)

    def shutdown(self) -> None:
        """Break off the running export and refuse new ones. May be called by any thread, and again."""
        with self._lock:
            if not self._is_shut_down:
                self._is_shut_down = True
                self._exporter.shutdown()

    def _renew(self) -> None:
        latest = None if self.files is None else self.files.current()
        with self._lock:
            if latest is self._tls or self._is_shut_down:
                return
            former, self._exporter = self._exporter, _exporter(self._settings, latest)
            self._tls = latest
        former.shutdown()


def _exporter(settings: TracingSettings, tls: TlsMaterial | None) -> OTLPSpanExporter:
    credentials = None if tls is None else grpc.ssl_channel_credentials(tls.authorities, tls.key, tls.chain)
    return OTLPSpanExporter(
        endpoint=settings.otlp_endpoint,
        insecure=not _is_encrypted(settings),
        credentials=credentials,
        headers=settings.otlp_metadata() or None,
    )


def _tls_files(settings: TracingSettings) -> TlsFiles | None:
    """The files of otlp_ca_file and of OpenTelemetry's variables; None without any. Raises TlsFilesBroken."""
    ca, chain, key = (_variable_file(name) for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"))
    ca = TlsFile.of("otlp_ca_file", settings.otlp_ca_file) or ca
    if not _is_encrypted(settings) or (ca, chain, key) == (None, None, None):
        return None
    alone = chain if key is None else key if chain is None else None
    if alone is not None:
        raise TlsFilesBroken(f"{alone.setting}: set the certificate and its key together")
    return TlsFiles(client_context, TlsPaths(chain, key, ca))


def _variable_file(name: str) -> TlsFile | None:
    for variable in (f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}"):
        if path := os.environ.get(variable):
            return TlsFile(variable, Path(path))
    return None


def _is_encrypted(settings: TracingSettings) -> bool:
    return urlsplit(settings.otlp_endpoint or "").scheme == "https"


def _resource(service: str) -> Resource:
    own = Resource.create(
        {
            "service.name": f"specdec-{service}",
            "service.version": __version__,
            "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
        }
    )
    # The environment's attributes win: operators name services as they like.
    return own.merge(OTELResourceDetector().detect())
