"""A request's trace: its own span, one for each phase before it runs, and one for each opening of a session.

Attributes follow OpenTelemetry's conventions for generative AI and RPC; others are named `specdec.*`. No text of a
prompt or an output is in a trace unless `trace_content` is set.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from opentelemetry.trace import INVALID_SPAN, NoOpTracer, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace import set_span_in_context as context_of
from opentelemetry.util.types import AttributeValue

from specdec.telemetry.tracing import Tracing, log_fields, traceparent_of
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import SpecdecError

_SPAN_NAMES = {"target": "verify session", "draft": "draft session"}
# The server's own errors by OpenTelemetry's conventions for gRPC.
_SERVER_ERRORS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
_MAX_INT64 = 2**63 - 1
"""The largest integer of an attribute; seeds go up to 2**64 - 1."""
_TENANT_DIGITS = 16
"""Hexadecimal digits of a tenant's hash: 64 bits distinguish tenants."""


@dataclass(frozen=True, slots=True)
class RequestResult:
    """Result of a request that was admitted."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Output tokens of all choices."""
    num_cached_tokens: int
    finish_reasons: Sequence[pb.FinishReason.ValueType]
    """One reason per choice."""
    seed: int
    verify_mode: pb.VerifyMode.ValueType
    speculate: bool
    stats: api.SpeculationStats


class RequestTracer:
    """Begins the traces of requests."""

    def __init__(self, tracing: Tracing, with_content: bool) -> None:
        self._tracing = tracing
        self._with_content = with_content

    def begin(self, body: api.GenerateRequest, tenant: str, headers: Mapping[str, str]) -> RequestTrace:
        """Begin the trace of a request, as part of the trace in W3C `headers`, if any."""
        if not self._tracing.is_on:
            return RequestTrace()
        operation = _operation(body)
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "specdec",
            "rpc.system": "grpc",
            "rpc.service": "specdec.v1.CoordinatorService",
            "rpc.method": "Generate",
        }
        if tenant:
            # Tenants may be people's names; an operator can hash a name to find its traces.
            attributes["specdec.tenant_hash"] = hashlib.sha256(tenant.encode()).hexdigest()[:_TENANT_DIGITS]
        if body.model:
            attributes["gen_ai.request.model"] = body.model
        name = f"{operation} {body.model}".rstrip()
        parent = self._tracing.parent(headers)
        span = self._tracing.tracer.start_span(name, parent, SpanKind.SERVER, attributes)
        return RequestTrace(self._tracing.tracer, span, body if self._with_content else None)


class RequestTrace:
    """One request's trace; of one that is not recorded all methods return at once."""

    def __init__(
        self, tracer: Tracer | None = None, span: Span = INVALID_SPAN, content: api.GenerateRequest | None = None
    ) -> None:
        """`content`: the request, if its text is recorded."""
        self._tracer = tracer or NoOpTracer()
        self._span = span
        self._context = context_of(span)
        self._began_s = time.monotonic()
        self._content = content
        self._texts: dict[int, list[str]] = {}
        self._open: dict[tuple[str, int, str], Span] = {}
        """Spans by role, choice and address: a choice may be open at two drafts."""
        self._counts = {"num_draft_fallbacks": 0, "num_target_reopens": 0, "num_draft_reopens": 0}
        self.is_recording = span.is_recording()
        self.log_fields = log_fields(span)
        """Fields of each log event about the request."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase of the request, as a span of its own."""
        if not self.is_recording:
            yield
            return
        span = self._tracer.start_span(name, self._context)
        try:
            yield
        except SpecdecError as error:
            span.set_attribute("error.type", error.reason)
            raise
        finally:
            span.end()

    def event(self, name: str, **attributes: AttributeValue) -> None:
        """Record an event; its name and attributes get the prefix `specdec.`."""
        if self.is_recording:
            self._span.add_event(f"specdec.{name}", {f"specdec.{key}": value for key, value in attributes.items()})

    def accepted(
        self,
        body: api.GenerateRequest,
        *,
        request_id: str,
        model: str,
        sampling: pb.TokenSampling,
        num_choices: int,
        max_tokens: int,
        stop: Sequence[str],
    ) -> None:
        """Record the parameters of a checked request, with defaults filled in."""
        if not self.is_recording:
            return
        self._span.update_name(f"{_operation(body)} {model}")
        self._set(
            {
                "gen_ai.request.model": body.model or model,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": sampling.top_k,
                "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
                "gen_ai.request.presence_penalty": sampling.presence_penalty,
                "gen_ai.request.max_tokens": max_tokens,
                "gen_ai.request.choice.count": num_choices,
                "gen_ai.response.id": request_id,
                "gen_ai.response.model": model,
                "specdec.request_id": request_id,
                "specdec.priority": body.priority,
                "specdec.is_resumed": body.HasField("resume"),
            }
        )
        if body.sampling.HasField("seed") and body.sampling.seed <= _MAX_INT64:
            self._span.set_attribute("gen_ai.request.seed", body.sampling.seed)
        if self._content is not None:
            self._span.set_attribute("gen_ai.input.messages", json.dumps(_input_messages(body)))
            if stop:
                self._span.set_attribute("gen_ai.request.stop_sequences", list(stop))

    def wrote(self, chunk: api.GenerateResponse) -> None:
        """A chunk went to the client."""
        if self._content is not None and self.is_recording and chunk.HasField("delta"):
            self._texts.setdefault(chunk.delta.index, []).append(chunk.delta.text)

    def first_token(self) -> None:
        """The first output token came."""
        if self.is_recording:
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - self._began_s)

    def draft_fallback(self, choice: int, cause: str) -> None:
        """A session goes on without its draft."""
        self._counts["num_draft_fallbacks"] += 1
        self.event("draft_fallback", choice=choice, cause=cause)

    def session_opened(
        self, role: str, choice: int, *, session_id: str, address: str, epoch: int, position: int
    ) -> str:
        """A session opens at a replica; returns the traceparent for it, empty if the request is not recorded."""
        if not self.is_recording:
            return ""
        self._end_session(role, choice, address, "reopened")
        if epoch > 1:
            self._counts[f"num_{role}_reopens"] += 1
        host, _, port = address.rpartition(":")
        attributes: dict[str, AttributeValue] = {
            "server.address": host,
            "server.port": int(port),
            "specdec.session_id": session_id,
            "specdec.choice": choice,
            "specdec.epoch": epoch,
            "specdec.position": position,
        }
        span = self._tracer.start_span(_SPAN_NAMES[role], self._context, SpanKind.CLIENT, attributes)
        self._open[role, choice, address] = span
        return traceparent_of(span)

    def session_closed(self, role: str, choice: int, address: str, reason: str) -> None:
        """A session ended at a replica."""
        if self._open:
            self._end_session(role, choice, address, reason)

    def session_failed(self, role: str, choice: int, address: str, reason: str) -> None:
        """A replica ended a session with an error."""
        if (span := self._open.get((role, choice, address))) is not None:
            span.set_status(Status(StatusCode.ERROR))
            span.set_attribute("error.type", reason)
            self._end_session(role, choice, address, "failed")
        self.event("session_failed", role=role, choice=choice, reason=reason)

    def end(self, code: grpc.StatusCode, reason: str, result: RequestResult | None) -> None:
        """The stream ended with a status.

        Args:
            code: the status.
            reason: the error's; empty without an error.
            result: the request's result; None if it was not admitted.
        """
        if not self.is_recording:
            return
        for role, choice, address in list(self._open):
            self._end_session(role, choice, address, "request ended")
        self._span.set_attribute("rpc.grpc.status_code", code.value[0])
        if code is not grpc.StatusCode.OK:
            self._span.set_attribute("error.type", reason or code.name)
        if code in _SERVER_ERRORS:
            self._span.set_status(Status(StatusCode.ERROR))
        if result is not None:
            self._set(_result_attributes(result))
            self._set({f"specdec.{name}": count for name, count in self._counts.items()})
            if self._content is not None:
                messages = json.dumps(_output_messages(result, self._texts))
                self._span.set_attribute("gen_ai.output.messages", messages)
        self.is_recording = False
        self._span.end()

    def _end_session(self, role: str, choice: int, address: str, reason: str) -> None:
        if (span := self._open.pop((role, choice, address), None)) is not None:
            span.set_attribute("specdec.end_reason", reason)
            span.end()

    def _set(self, attributes: Mapping[str, AttributeValue]) -> None:
        self._span.set_attributes(attributes)


def _operation(body: api.GenerateRequest) -> str:
    return "chat" if body.WhichOneof("input") == "messages" else "text_completion"


def _result_attributes(result: RequestResult) -> dict[str, AttributeValue]:
    stats = result.stats
    num_verified = sum(stats.verified_by_depth)
    return {
        "gen_ai.usage.input_tokens": result.num_prompt_tokens,
        "gen_ai.usage.output_tokens": result.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": result.num_cached_tokens,
        "gen_ai.response.finish_reasons": [_finish_reason(reason) for reason in result.finish_reasons],
        "specdec.seed": str(result.seed),
        "specdec.verify_mode": pb.VerifyMode.Name(result.verify_mode).removeprefix("VERIFY_MODE_").lower(),
        "specdec.speculate": result.speculate,
        "specdec.acceptance_rate": sum(stats.accepted_by_depth) / num_verified if num_verified else 0.0,
        "specdec.mean_acceptance_length": stats.mean_acceptance_length,
        "specdec.hit_rate": stats.hit_rate,
        "specdec.num_steps": stats.num_steps,
        "specdec.num_verify_steps": stats.num_verify_steps,
        "specdec.num_proposed": stats.num_proposed,
        "specdec.num_accepted": stats.num_accepted,
        "specdec.hold_off_s": stats.hold_off_ms / 1e3,
    }


def _finish_reason(reason: pb.FinishReason.ValueType) -> str:
    return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def _input_messages(body: api.GenerateRequest) -> list[dict[str, object]]:
    match body.WhichOneof("input"):
        case "messages":
            return [_message(message.role, message.content) for message in body.messages.messages]
        case "prompt":
            return [_message("user", body.prompt)]
        case _:
            return []  # token ids: not text


def _output_messages(result: RequestResult, texts: Mapping[int, Sequence[str]]) -> list[dict[str, object]]:
    return [
        {**_message("assistant", "".join(texts.get(choice, ()))), "finish_reason": _finish_reason(reason)}
        for choice, reason in enumerate(result.finish_reasons)
    ]


def _message(role: str, content: str) -> dict[str, object]:
    return {"role": role, "parts": [{"type": "text", "content": content}]}
