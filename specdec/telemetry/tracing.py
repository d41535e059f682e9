"""Traces: a service's tracer, and the export of its spans to a collector.

Ended spans are queued, and a thread of its own exports them, so neither a slow nor an absent collector delays requests;
a full queue drops spans. Only servicers, coordinators and gateways export: an engine process sends a session's span
to its servicer (`specdec.replica.worker.trace`), which turns it into spans.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog
from google.protobuf.message import DecodeError
from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, SpanKind, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specdec.telemetry.tracing_settings import TracingSettings
from specdec.v1 import trace_pb2
from specdec.wire.tls_files import TlsFiles

if TYPE_CHECKING:
    from specdec.telemetry.otlp import Pipeline

TRACE_HEADERS = ("traceparent", "tracestate")
"""Metadata of a call that names its trace (W3C Trace Context)."""
_CANCEL_S = 1.0
_log = structlog.get_logger(__name__)


class Tracing:
    """A service's tracing, from its start to its stop. Off (no thread, no exporter) without `otlp_endpoint`."""

    def __init__(self, settings: TracingSettings, service: str, sample_ratio: float = 1.0) -> None:
        """Start tracing. Raises TlsFilesBroken, which names the setting or the variable.

        Args:
            service: coordinator, target or draft; exported as service.name specdec-<service>.
            sample_ratio: share of the traces beginning here that are recorded; the caller decides on all others.
        """
        self._pipeline: Pipeline | None = None
        self.tracer: Tracer = NoOpTracer()
        self._propagator = TraceContextTextMapPropagator()
        if settings.otlp_endpoint is not None:
            from specdec.telemetry.otlp import Pipeline  # the SDK is loaded only with tracing on

            self._pipeline = Pipeline(settings, service, sample_ratio)
            self.tracer = self._pipeline.tracer
            _log.info("tracing", endpoint=settings.otlp_endpoint, sample_ratio=sample_ratio)

    @property
    def is_on(self) -> bool:
        """Whether spans are exported."""
        return self._pipeline is not None

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files that exports follow, if any."""
        return None if self._pipeline is None else self._pipeline.tls_files

    def parent(self, headers: Mapping[str, str]) -> Context:
        """The context in W3C headers; an empty one without headers, with malformed ones, or with tracing off."""
        return self._propagator.extract(headers, Context()) if self.is_on else Context()

    def record(self, encoded: bytes) -> None:
        """Export an encoded SessionSpan; one that does not parse is logged and dropped."""
        if not self.is_on:
            return
        try:
            session = trace_pb2.SessionSpan.FromString(encoded)
        except DecodeError as error:
            _log.warning("bad_session_span", error=str(error))
            return
        self._record(session.span, self.parent({"traceparent": session.traceparent}), SpanKind.SERVER)

    def _record(self, told: trace_pb2.Span, parent: Context, kind: SpanKind) -> None:
        attributes = {fact.key: getattr(fact, fact.WhichOneof("value") or "text") for fact in told.attributes}
        span = self.tracer.start_span(told.name, parent, kind, attributes, start_time=told.start_unix_ns)
        context = set_span_in_context(span, parent)
        for child in told.children:
            self._record(child, context, SpanKind.INTERNAL)
        span.end(told.end_unix_ns)

    async def close(self, timeout_s: float = 2.0) -> None:
        """Export the queued spans, for at most `timeout_s`, and stop; the rest is dropped.

        Returns within about a second more, even if the collector hangs.
        """
        if self._pipeline is None:
            return
        pipeline, self._pipeline = self._pipeline, None
        self.tracer = NoOpTracer()
        flush = threading.Thread(target=pipeline.flush_and_stop, name="otlp-flush", daemon=True)
        flush.start()
        await asyncio.to_thread(flush.join, timeout_s)
        if flush.is_alive():
            _log.warning("traces_dropped", timeout_s=timeout_s, reason="the collector did not accept them in time")
            pipeline.cancel()
            await asyncio.to_thread(flush.join, _CANCEL_S)


def traceparent_of(span: Span) -> str:
    """W3C traceparent of a span; empty for a span that is not recorded."""
    context = span.get_span_context()
    if not context.is_valid or not context.trace_flags.sampled:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def log_fields(span: Span) -> dict[str, str]:
    """Fields of log lines about a span; none when tracing is off."""
    context = span.get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
