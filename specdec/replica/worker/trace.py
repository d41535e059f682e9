"""An engine process's record of a traced session, sent to its servicer once, when the session ends.

The engine has no tracer and no exporter: a further thread would slow the steps. An untraced session has no
`SessionTrace`, and costs nothing.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from specdec.v1 import trace_pb2

Value = str | int | float | bool
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


@dataclass(slots=True)
class SessionTrace:
    """Times and sums of one opening of a session. Times are of time.monotonic."""

    traceparent: str
    """W3C context of the parent span."""
    opened_at_s: float = field(default_factory=time.monotonic)
    first_step_at_s: float | None = None
    """Start of its first step, until which it was queued."""
    prefilled_at_s: float | None = None
    """Time at which its prompt was computed."""
    attributes: dict[str, Value] = field(default_factory=dict)
    """Attributes of the span, by name."""

    @classmethod
    def begin(cls, traceparent: str) -> SessionTrace | None:
        """The trace of a session that opens now; None unless `traceparent` is valid and sampled."""
        match = _TRACEPARENT.fullmatch(traceparent)
        return cls(traceparent) if match is not None and int(match[3], 16) & _SAMPLED else None

    @property
    def log_fields(self) -> dict[str, str]:
        """Fields of each log event about the session."""
        _, trace_id, span_id, _ = self.traceparent.split("-")
        return {"trace_id": trace_id, "span_id": span_id}

    def add(self, **amounts: int | float) -> None:
        """Add to sums named specdec.<keyword>."""
        attributes = self.attributes
        for name, amount in amounts.items():
            key = f"specdec.{name}"
            before = attributes.get(key, 0)
            attributes[key] = amount + before if isinstance(before, int | float) else amount

    def stepped(self, began_at_s: float) -> None:
        """A step with the session has ended."""
        if self.first_step_at_s is None:
            self.first_step_at_s = began_at_s

    def prefilled(self) -> None:
        """The prompt is computed; only the first call counts."""
        if self.prefilled_at_s is None:
            self.prefilled_at_s = time.monotonic()

    def encode(self, name: str, last_phase: str) -> bytes:
        """The session as an encoded SessionSpan that ends now, with its phases: queue, prefill, `last_phase`."""
        now_s = time.monotonic()
        epoch_ns = time.time_ns() - int(now_s * 1e9)
        told = trace_pb2.SessionSpan(traceparent=self.traceparent)
        told.span.name = name
        for key, value in self.attributes.items():
            told.span.attributes.append(_attribute(key, value))
        bounds = [self.opened_at_s, self.first_step_at_s, self.prefilled_at_s, now_s]
        _set_times(told.span, self.opened_at_s, now_s, epoch_ns)
        for phase, start_s, end_s in zip(("queue", "prefill", last_phase), bounds, bounds[1:], strict=False):
            if start_s is None:
                break
            _set_times(told.span.children.add(name=phase), start_s, now_s if end_s is None else end_s, epoch_ns)
        return told.SerializeToString()


def _set_times(span: trace_pb2.Span, start_s: float, end_s: float, epoch_ns: int) -> None:
    span.start_unix_ns = epoch_ns + int(start_s * 1e9)
    span.end_unix_ns = epoch_ns + int(end_s * 1e9)


def _attribute(key: str, value: Value) -> trace_pb2.SpanAttribute:
    match value:
        case bool():
            return trace_pb2.SpanAttribute(key=key, flag=value)
        case int() if -(2**63) <= value < 2**63:  # an owner may send any epoch
            return trace_pb2.SpanAttribute(key=key, integer=value)
        case float():
            return trace_pb2.SpanAttribute(key=key, number=value)
        case _:
            return trace_pb2.SpanAttribute(key=key, text=str(value))
