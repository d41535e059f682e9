"""A request's trace: its own span, one for each phase before it runs, and one for each opening of a session.

Attributes follow OpenTelemetry's conventions for generative AI and RPC; what these have no name for is `specdec.*`.
No text of a prompt or an output is in a trace unless `trace_content` is set.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc
from opentelemetry.trace import INVALID_SPAN, NoOpTracer, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace import set_span_in_context as context_of
from opentelemetry.util.types import AttributeValue

from coordinator.sessions.tally import total
from specdec.rpc.errors import SpecdecError
from specdec.telemetry.tracing import Tracing, log_fields, traceparent_of
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

if TYPE_CHECKING:
    from coordinator.intake.validation import CheckedSampling
    from coordinator.sessions.session import Request, Session

_SPAN_NAMES = {"target": "verify session", "draft": "draft session"}
# For a server only these are errors of its own (OpenTelemetry's conventions for gRPC).
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
_TENANT_DIGITS = 16


class RequestTracer:
    """Begins the traces of requests."""

    def __init__(self, tracing: Tracing, with_content: bool) -> None:
        self._tracing = tracing
        self._with_content = with_content

    def begin(self, body: api.GenerateRequest, tenant: str, headers: Mapping[str, str]) -> RequestTrace:
        """The trace of a request that arrived now, as part of the trace that W3C `headers` name, if any."""
        if not self._tracing.is_on:
            return RequestTrace()
        operation = "chat" if body.WhichOneof("input") == "messages" else "text_completion"
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "specdec",
            "rpc.system": "grpc",
            "rpc.service": "specdec.v1.CoordinatorService",
            "rpc.method": "Generate",
        }
        if tenant:
            # Tenants may be names or addresses of people; whoever knows one finds its traces all the same.
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
        """`content` is the request if its text is to be recorded."""
        self._tracer = tracer or NoOpTracer()
        self._span = span
        self._context = context_of(span)
        self._began_s = time.monotonic()
        self._content = content
        self._texts: dict[int, list[str]] = {}
        self._open: dict[tuple[str, int], tuple[str, Span]] = {}
        self._counts = {"num_draft_fallbacks": 0, "num_target_reopens": 0, "num_draft_reopens": 0}
        self.is_recording = span.is_recording()
        self.log_fields = log_fields(span)
        """What log lines about the request carry."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the work on the request, as a span of its own."""
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
        """Something happened to the request; both names go out as specdec.<name>."""
        if self.is_recording:
            self._span.add_event(f"specdec.{name}", {f"specdec.{key}": value for key, value in attributes.items()})

    def accepted(self, request: Request, body: api.GenerateRequest, sampling: CheckedSampling, max_tokens: int) -> None:
        """The request was found to be in order: what it asks for."""
        if not self.is_recording:
            return
        operation = "chat" if body.WhichOneof("input") == "messages" else "text_completion"
        self._span.update_name(f"{operation} {request.model.name}")
        token_sampling = sampling.token_sampling
        self._set(
            {
                "gen_ai.request.model": body.model or request.model.name,
                "gen_ai.request.temperature": token_sampling.temperature,
                "gen_ai.request.top_p": token_sampling.top_p,
                "gen_ai.request.top_k": token_sampling.top_k,
                "gen_ai.request.frequency_penalty": token_sampling.frequency_penalty,
                "gen_ai.request.presence_penalty": token_sampling.presence_penalty,
                "gen_ai.request.max_tokens": max_tokens,
                "gen_ai.request.choice.count": sampling.n,
                "gen_ai.response.id": request.key[1],
                "gen_ai.response.model": request.model.name,
                "specdec.request_id": request.key[1],
                "specdec.priority": request.priority,
                "specdec.is_resumed": body.HasField("resume"),
            }
        )
        if body.sampling.HasField("seed") and body.sampling.seed <= _MAX_INT64:
            self._span.set_attribute("gen_ai.request.seed", body.sampling.seed)
        if self._content is not None:
            self._span.set_attribute("gen_ai.input.messages", json.dumps(_input_messages(body)))
            if sampling.stop:
                self._span.set_attribute("gen_ai.request.stop_sequences", list(sampling.stop))

    def wrote(self, chunk: api.GenerateResponse) -> None:
        """A chunk went to the client."""
        if self._content is not None and self.is_recording and chunk.HasField("delta"):
            self._texts.setdefault(chunk.delta.index, []).append(chunk.delta.text)

    def first_token(self) -> None:
        """Output begins."""
        if self.is_recording:
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - self._began_s)

    def draft_fallback(self, session: Session, cause: str) -> None:
        """A session goes on without its draft, for a while or for good."""
        self._counts["num_draft_fallbacks"] += 1
        self.event("draft_fallback", choice=session.choice, cause=cause)

    def session_opened(self, role: str, session: Session, address: str, epoch: int) -> str:
        """A session opens at a replica; returns the traceparent for it, empty when the request is not recorded."""
        if not self.is_recording:
            return ""
        self._end_session(role, session.choice, "reopened")
        if epoch > 1:
            self._counts[f"num_{role}_reopens"] += 1
        host, _, port = address.rpartition(":")
        attributes: dict[str, AttributeValue] = {
            "server.address": host,
            "server.port": int(port),
            "specdec.session_id": session.session_id,
            "specdec.choice": session.choice,
            "specdec.epoch": epoch,
            "specdec.position": session.position,
        }
        span = self._tracer.start_span(_SPAN_NAMES[role], self._context, SpanKind.CLIENT, attributes)
        self._open[role, session.choice] = address, span
        return traceparent_of(span)

    def session_closed(self, role: str, session: Session, address: str, reason: str) -> None:
        """A session ended at a replica."""
        if self._open and self._open.get((role, session.choice), ("",))[0] == address:
            self._end_session(role, session.choice, reason)

    def session_failed(self, role: str, session: Session, reason: str) -> None:
        """A replica ended a session with an error."""
        if (opened := self._open.get((role, session.choice))) is not None:
            opened[1].set_status(Status(StatusCode.ERROR))
            opened[1].set_attribute("error.type", reason)
            self._end_session(role, session.choice, "failed")
        self.event("session_failed", role=role, choice=session.choice, reason=reason)

    def end(self, request: Request, code: grpc.StatusCode, reason: str) -> None:
        """The stream ended with a status; `reason` is the error's, empty without one."""
        if not self.is_recording:
            return
        for role, choice in list(self._open):
            self._end_session(role, choice, "request ended")
        self._span.set_attribute("rpc.grpc.status_code", code.value[0])
        if code is not grpc.StatusCode.OK:
            self._span.set_attribute("error.type", reason or code.name)
        if code in _SERVER_ERRORS:
            self._span.set_status(Status(StatusCode.ERROR))
        if request.sessions:
            self._set(_result(request))
            self._set({f"specdec.{name}": count for name, count in self._counts.items()})
            if self._content is not None:
                messages = json.dumps(_output_messages(request, self._texts))
                self._span.set_attribute("gen_ai.output.messages", messages)
        self.is_recording = False
        self._span.end()

    def _end_session(self, role: str, choice: int, reason: str) -> None:
        if (opened := self._open.pop((role, choice), None)) is not None:
            opened[1].set_attribute("specdec.end_reason", reason)
            opened[1].end()

    def _set(self, attributes: Mapping[str, AttributeValue]) -> None:
        self._span.set_attributes(attributes)


def _result(request: Request) -> dict[str, AttributeValue]:
    sessions = request.sessions
    stats = total(session.tally for session in sessions)
    num_verified = sum(stats.verified_by_depth)
    return {
        "gen_ai.usage.input_tokens": sessions[0].num_prompt_tokens,
        "gen_ai.usage.output_tokens": sum(s.position - s.num_prompt_tokens for s in sessions),
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "gen_ai.response.finish_reasons": [_finish_reason(session) for session in sessions],
        "specdec.seed": str(sessions[0].sampling.seed),
        "specdec.verify_mode": pb.VerifyMode.Name(sessions[0].verify_mode).removeprefix("VERIFY_MODE_").lower(),
        "specdec.speculate": sessions[0].speculate,
        "specdec.acceptance_rate": sum(stats.accepted_by_depth) / num_verified if num_verified else 0.0,
        "specdec.mean_acceptance_length": stats.mean_acceptance_length,
        "specdec.hit_rate": stats.hit_rate,
        "specdec.num_steps": stats.num_steps,
        "specdec.num_verify_steps": stats.num_verify_steps,
        "specdec.num_proposed": stats.num_proposed,
        "specdec.num_accepted": stats.num_accepted,
        "specdec.hold_off_s": stats.hold_off_ms / 1e3,
    }


def _finish_reason(session: Session) -> str:
    reason = pb.FINISH_REASON_ABORT if session.finish is None else session.finish.reason
    return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def _input_messages(body: api.GenerateRequest) -> list[dict[str, object]]:
    match body.WhichOneof("input"):
        case "messages":
            return [_message(message.role, message.content) for message in body.messages.messages]
        case "prompt":
            return [_message("user", body.prompt)]
        case _:
            return []  # token ids: not text


def _output_messages(request: Request, texts: Mapping[int, Sequence[str]]) -> list[dict[str, object]]:
    return [
        {**_message("assistant", "".join(texts.get(session.choice, ()))), "finish_reason": _finish_reason(session)}
        for session in request.sessions
    ]


def _message(role: str, content: str) -> dict[str, object]:
    return {"role": role, "parts": [{"type": "text", "content": content}]}
