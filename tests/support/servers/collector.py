"""An OTLP/gRPC collector on loopback that keeps its exports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

WAIT_S = 60.0


@dataclass(frozen=True)
class ReceivedSpan:
    """A span and its sender."""

    resource: dict[str, Any]
    span: trace_pb2.Span

    @property
    def service(self) -> str:
        return str(self.resource["service.name"])

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def attributes(self) -> dict[str, Any]:
        return _values(self.span.attributes)

    @property
    def events(self) -> dict[str, dict[str, Any]]:
        return {event.name: _values(event.attributes) for event in self.span.events}

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    def is_within(self, other: ReceivedSpan, slack_ns: int) -> bool:
        """Whether the span lies within the other one's time, widened by `slack_ns` at both ends."""
        start, end = other.span.start_time_unix_nano - slack_ns, other.span.end_time_unix_nano + slack_ns
        return start <= self.span.start_time_unix_nano <= self.span.end_time_unix_nano <= end


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps exports; answers while `gate` is set, which a test may clear."""

    def __init__(self) -> None:
        self.exports: list[bytes] = []
        self.metadata: list[dict[str, str]] = []
        self.clients: list[str] = []
        """Common names in the clients' certificates."""
        self.spans: list[ReceivedSpan] = []
        self.num_calls = 0
        self.gate = threading.Event()
        self.gate.set()
        self.endpoint = ""
        self._changed = threading.Condition()

    def Export(self, request: Any, context: grpc.ServicerContext) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._changed:
            self.num_calls += 1
            self._changed.notify_all()
        self.gate.wait()
        with self._changed:
            self.exports.append(request.SerializeToString())
            self.clients += [name.decode() for name in context.auth_context().get("x509_common_name", ())]
            self.metadata.append({key: str(value) for key, value in context.invocation_metadata()})
            for resource_spans in request.resource_spans:
                resource = _values(resource_spans.resource.attributes)
                for scope in resource_spans.scope_spans:
                    self.spans += [ReceivedSpan(resource, span) for span in scope.spans]
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on the received spans."""
        deadline_s = time.monotonic() + WAIT_S
        with self._changed:
            while not condition():
                remaining_s = deadline_s - time.monotonic()
                assert remaining_s > 0, f"only {[(s.service, s.name) for s in self.spans]} arrived"
                self._changed.wait(remaining_s)

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """Spans of a trace so far."""
        return [span for span in self.spans if span.trace_id == trace_id]

    def whole_trace(self, trace_id: str, num_spans: int) -> list[ReceivedSpan]:
        """Spans of a trace, once there are `num_spans`."""
        self.until(lambda: len(self.trace(trace_id)) >= num_spans)
        return self.trace(trace_id)


@contextmanager
def collecting(credentials: grpc.ServerCredentials | None = None) -> Iterator[Collector]:
    """Run a collector, over TLS if it has credentials."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    if credentials is None:
        collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        collector.endpoint = f"https://127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    try:
        yield collector
    finally:
        collector.gate.set()
        server.stop(0).wait()


def only(spans: list[ReceivedSpan], service: str, name: str) -> ReceivedSpan:
    """The one span of a service with this name."""
    found = [span for span in spans if span.service == f"specdec-{service}" and span.name == name]
    assert len(found) == 1, [(span.service, span.name) for span in spans]
    return found[0]


def _values(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)
