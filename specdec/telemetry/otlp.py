"""The OpenTelemetry SDK as specdec uses it: sampler, resource, queue and OTLP/gRPC exporter."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from specdec import __version__
from specdec.telemetry.tracing_settings import TracingSettings


class Pipeline:
    """A tracer whose spans are exported. The standard OTEL_* variables hold for what settings leave open:
    OTEL_RESOURCE_ATTRIBUTES, OTEL_SERVICE_NAME, OTEL_BSP_*, OTEL_SPAN_*, OTEL_EXPORTER_OTLP_{HEADERS,CERTIFICATE,
    CLIENT_KEY,CLIENT_CERTIFICATE,COMPRESSION,TIMEOUT}.
    """

    def __init__(self, settings: TracingSettings, service: str, sample_ratio: float) -> None:
        self._exporter = _exporter(settings)
        sampler = ParentBased(TraceIdRatioBased(sample_ratio))
        # Not at exit: `flush_and_stop` is bounded, the SDK's own is not.
        self._provider = TracerProvider(sampler, _resource(service), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self.tracer = self._provider.get_tracer("specdec", __version__)

    def flush_and_stop(self) -> None:
        """Export what is queued, and end the thread. May take as long as the collector does."""
        self._provider.shutdown()

    def cancel(self) -> None:
        """Break off the export under way and all that wait, so that `flush_and_stop` returns."""
        self._exporter.shutdown()


def _exporter(settings: TracingSettings) -> OTLPSpanExporter:
    endpoint = settings.otlp_endpoint
    is_plain = urlsplit(endpoint or "").scheme == "http"
    ca = settings.otlp_ca_file
    credentials = None if ca is None else grpc.ssl_channel_credentials(root_certificates=ca.read_bytes())
    return OTLPSpanExporter(
        endpoint=endpoint, insecure=is_plain, credentials=credentials, headers=settings.otlp_metadata() or None
    )


def _resource(service: str) -> Resource:
    own = Resource.create(
        {
            "service.name": f"specdec-{service}",
            "service.version": __version__,
            "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
        }
    )
    # What the environment says wins: operators name services as they like.
    return own.merge(OTELResourceDetector().detect())
