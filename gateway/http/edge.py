"""The outer layer of every request: id, concurrency limit, metrics, span and access log."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

import structlog
from opentelemetry.trace import Span, SpanKind
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec.gateway.api.errors import SERVER_ERROR, ApiError, cut
from specdec.gateway.http.places import Places, address_of, client_of
from specdec.gateway.http.sent import ANTHROPIC_PATHS, Sent
from specdec.gateway.upstream.caller import Metadata
from specdec.gateway.upstream.coordinators import Health
from specdec.service.byte_budget import ByteBudget
from specdec.telemetry import GatewayMetrics
from specdec.telemetry.tracing import Tracing, traceparent_of

_ID_HEADER = "x-request-id"
_ANTHROPIC_ID_HEADER = "request-id"
"""The same for Anthropic's clients, which put it into their errors."""
IGNORED = "specdec-ignored-fields"
"""Fields that the gateway does not know."""
NOT_ENFORCED = "specdec-not-enforced"
"""Keywords of the request's schemas that are not enforced."""
_MOST_CHARS = 1024
"""Characters of a header's value, at most."""
_MOST_NAME_CHARS = 256
_SEPARATORS = re.compile(r"[^!-+\--~]")
"""Characters that a name in a list must not have."""
_ID = re.compile(r"[!-~]{1,128}")
_PRINTABLE = re.compile(r"[ -~]*")
_PASSED_ON = ("authorization", "specdec-tenant")
_ANTHROPIC_KEY = "x-api-key"
"""Header in which Anthropic's clients send their key."""
_TRACE = ("traceparent", "tracestate")
_MOST_KEY_CHARS = 6 * 1024
"""Characters of keys and tenant together, at most: gRPC refuses metadata above 8 KiB at random, above 16 KiB always."""
_MOST_TRACE_CHARS = 512
"""Characters of a header about the trace that is passed on, as many as W3C's specification demands."""
_UNCOUNTED = ("/health", "/ping", "/metrics", "/version")
_GONE = 499
_log = structlog.get_logger(__name__)


class Edge:
    """An ASGI application that wraps another."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: GatewayMetrics,
        health: Health,
        tracing: Tracing,
        places: Places,
        budget: ByteBudget,
        logs_access: bool,
        answer: Any,
    ) -> None:
        """Answer nothing yet.

        Args:
            app: the wrapped application.
            metrics: the gateway's metrics.
            health: whether the gateway takes new requests.
            tracing: where spans go.
            places: of requests, without those to operators' paths.
            budget: of the bytes that requests hold.
            logs_access: log each request that ended.
            answer: makes a response of an ApiError for a path.
        """
        self._app = app
        self._metrics = metrics
        self._health = health
        self._tracing = tracing
        self._places = places
        self._budget = budget
        self._logs_access = logs_access
        self._answer = answer
        self._running: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Running requests, without those to operators' paths."""
        return len(self._running)

    async def wait_idle(self) -> None:
        """Wait until no request runs."""
        await self._idle.wait()

    def cut_off(self) -> None:
        """Cancel all running requests; streams end with an error event."""
        for task in self._running:
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        wanted = headers.get(_ID_HEADER, "")
        request_id = wanted if _ID.fullmatch(wanted) else uuid.uuid4().hex
        ids = {_ID_HEADER: request_id}
        if scope["path"].startswith(ANTHROPIC_PATHS):
            ids[_ANTHROPIC_ID_HEADER] = request_id
        began_s, sent = time.perf_counter(), Sent(send, ids, scope["path"])
        state = scope.setdefault("state", {})
        with self._span(scope, headers) as span:
            state.update(request_id=request_id, is_client_gone=False, metadata=self._metadata(headers, span))
            state.update(sent=sent, send=sent.after_start, headers=sent.headers, arrived_s=time.monotonic())
            await self._within_limits(scope, receive, sent)
            self._record(scope, sent, began_s, request_id, span)

    async def _within_limits(self, scope: Scope, receive: Receive, sent: Sent) -> None:
        if scope["path"] in _UNCOUNTED:
            await self._answered(scope, receive, sent)
            return
        headers = Headers(scope=scope)
        client, address = client_of(scope, headers), address_of(scope)
        if (refusal := self._draining() or _too_long(headers) or self._places.refusal(client, address)) is not None:
            response: Response = self._answer(refusal, path=scope["path"])
            await response(scope, receive, sent)
            return
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("requests are answered in tasks")
        self._running.add(task)
        self._places.take(client, address)
        self._idle.clear()
        self._metrics.running.set(len(self._running))
        try:
            with self._budget.hold(client, address=address) as scope["state"]["held"]:
                await self._answered(scope, receive, sent)
        finally:
            self._running.discard(task)
            self._places.leave(client, address)
            self._metrics.running.set(len(self._running))
            if not self._running:
                self._idle.set()

    def _draining(self) -> ApiError | None:
        if self._health.is_draining:
            message = "the gateway is shutting down"
            return ApiError(503, message, type=SERVER_ERROR, code="service_unavailable", retry_after_s=0.0)
        return None

    async def _answered(self, scope: Scope, receive: Receive, sent: Sent) -> None:
        try:
            await self._app(scope, receive, sent)
        except asyncio.CancelledError:
            # Cut off by a drain that took too long, or by the server.
            if not sent.status:
                refusal = self._draining() or ApiError(503, "cut off", type=SERVER_ERROR)
                await self._answer(refusal, path=scope["path"])(scope, receive, sent)
        except Exception as error:  # it has been answered and logged (gateway.app)
            _log.debug("request_failed", error=repr(error))

    def _span(self, scope: Scope, headers: Headers) -> Any:
        parent = self._tracing.parent({name: headers[name] for name in _TRACE if name in headers})
        name = f"{scope['method']} {scope['path']}" if scope["path"].startswith("/v1/") else scope["method"]
        return self._tracing.tracer.start_as_current_span(name, parent, SpanKind.SERVER)

    def _metadata(self, headers: Headers, span: Span) -> Metadata:
        """Metadata of the calls: the client's key and tenant, and the request's trace."""
        told = [(name, headers[name]) for name in _PASSED_ON if name in headers and _PRINTABLE.fullmatch(headers[name])]
        if "authorization" not in headers and _PRINTABLE.fullmatch(key := headers.get(_ANTHROPIC_KEY, "\n")):
            told.append(("authorization", f"Bearer {key}"))
        if own := traceparent_of(span):
            return (*told, ("traceparent", own))
        traced = [(name, headers[name]) for name in _TRACE if _PRINTABLE.fullmatch(headers.get(name, "\n"))]
        return (*told, *(pair for pair in traced if len(pair[1]) <= _MOST_TRACE_CHARS))

    def _record(self, scope: Scope, sent: Sent, began_s: float, request_id: str, span: Span) -> None:
        route = getattr(scope.get("route"), "path_format", "other")
        seconds, is_gone = time.perf_counter() - began_s, scope["state"]["is_client_gone"]
        status = sent.status or _GONE
        self._metrics.requests.labels(route, status).inc()
        self._metrics.request_seconds.labels(route).observe(seconds)
        if is_gone:
            self._metrics.clients_gone.inc()
        span.set_attributes({"http.route": route, "http.response.status_code": status, "request.id": request_id})
        if self._logs_access:
            _log.info(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status,
                seconds=round(seconds, 6),
                request_id=request_id,
                client_gone=is_gone,
            )


def _too_long(headers: Headers) -> ApiError | None:
    """The answer to a request whose key or tenant is longer than what can be passed on."""
    num_chars = {name: len(headers.get(name, "")) for name in (*_PASSED_ON, _ANTHROPIC_KEY)}
    if sum(num_chars.values()) <= _MOST_KEY_CHARS:
        return None
    name = max(num_chars, key=num_chars.__getitem__)
    message = f"{name} has {num_chars[name]} characters; keys and tenant may have {_MOST_KEY_CHARS} together"
    return ApiError(431, message, param=name, code="headers_too_large")


def tell_names(request: Request, header: str, names: Sequence[str]) -> None:
    """Name these fields; without any there is no header."""
    if names:
        shown = [name[:_MOST_NAME_CHARS].encode("ascii", "backslashreplace").decode() for name in names[:_MOST_CHARS]]
        value = cut(", ".join(_SEPARATORS.sub("?", name) for name in shown), _MOST_CHARS)
        request.scope.setdefault("state", {}).setdefault("headers", {})[header] = value
