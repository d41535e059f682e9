"""The server's side of a client's call: who calls, and the one message that is read within a time."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import Message

from specdec.coordinator.intake.planning import RequestCaller
from specdec.coordinator.intake.reads.later_reads import LaterReads
from specdec.coordinator.intake.reads.pending_reads import PendingReads
from specdec.coordinator.intake.reads.reading import read_request, receive_request
from specdec.coordinator.tasks import let_others_run
from specdec.coordinator.tenants.api_keys import AUTHORIZATION_KEY, Authenticator
from specdec.coordinator.tenants.quotas import Allowance
from specdec.service.byte_budget import ByteBudget
from specdec.telemetry.tracing import TRACE_HEADERS
from specdec.wire.errors import InvalidRequest

TENANT_KEY = "specdec-tenant"
"""Metadata key of the tenant, which owns request ids and prefix cache."""
_MAX_TENANT_CHARS = 128
"""Characters of a tenant's name, as in the file of API keys: the name is part of keys in the store."""
_SMALL_BYTES = 1024
"""Bytes of a message that needs no room: questions, and aborts of what takes all of it, are always read."""


class Callers:
    """Identifies callers, and makes handlers that read a request only from whom they know."""

    def __init__(
        self,
        authenticator: Authenticator,
        request_read_s: float,
        prompt_bytes: ByteBudget,
        reads: PendingReads,
        later_reads: LaterReads,
    ) -> None:
        """`request_read_s`: seconds that a client may take to send a request. `prompt_bytes`: must have room for it.
        `reads`: the requests that are being received. `later_reads`: those of streams after
        their first.
        """
        self._request_read_s = request_read_s
        self._prompt_bytes = prompt_bytes
        self._reads = reads
        self._later_reads = later_reads
        self._authenticator = authenticator

    def identify(self, context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, Allowance]:
        """The caller's tenant and allowance. Raises Unauthenticated or PermissionDenied."""
        return self._authenticator.identify(_metadata(context, AUTHORIZATION_KEY), _tenant(context))

    def request_caller(self, context: grpc.aio.ServicerContext[Any, Any], held: ExitStack) -> RequestCaller:
        """The caller of a request that keeps resources in `held`. Raises Unauthenticated or PermissionDenied."""
        remaining_s: Any = context.time_remaining()  # None without a deadline, unlike its annotation
        deadline_s = None if remaining_s is None else time.monotonic() + remaining_s
        tenant, allowance = self.identify(context)
        trace_headers = {name: values[0] for name in TRACE_HEADERS if (values := _metadata(context, name))}
        return RequestCaller(tenant, deadline_s, allowance, trace_headers, held=held)

    async def receive(self, context: grpc.aio.ServicerContext[Any, Any], tenant: str) -> bytes:
        """A call's first message.

        Raises:
            DeadlineExceeded: it did not come in time.
            InvalidRequest: the call ended without it.
            Overloaded: too many are being received, or no room is left for it. It is not parsed then.
        """
        async with self._reads.reading(f"{tenant} {peer_host(context.peer())}"):
            data = await receive_request(context, self._request_read_s)
        if len(data) > _SMALL_BYTES:
            self._prompt_bytes.check(tenant, len(data))
        return data

    @asynccontextmanager
    async def reading_later(self, context: grpc.aio.ServicerContext[Any, Any], tenant: str) -> AsyncIterator[None]:
        """Wait for one of a stream's messages after the first.

        Raises:
            Overloaded: memory is short, and too many streams of this caller wait.
        """
        async with self._later_reads.reading(f"{tenant} {peer_host(context.peer())}"):
            yield

    def handler(
        self,
        make: Callable[..., Any],
        behavior: Callable[..., Any],
        request_type: type[Message],
        *,
        is_open: bool = False,
    ) -> Any:
        """A handler for a call with one request; `make` is gRPC's, for streams of requests.

        Declared as streams of requests, equal on the wire: gRPC would wait for a unary request for ever. `is_open`:
        callers need no key.
        """

        async def checked(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            # Callers are known before their request is even received.
            tenant = "" if is_open else self.identify(context)[0]
            data = await self.receive(context, tenant)
            request = read_request(request_type, data)
            await let_others_run(len(data))
            del data
            return await behavior(request, context)

        return make(checked, request_deserializer=None, response_serializer=encode)


def peer_host(peer: str) -> str:
    """The host in gRPC's name of a peer, such as ipv4:10.0.0.1:4711."""
    return peer.rpartition(":")[0]


def until_answered(context: grpc.aio.ServicerContext[Any, Any]) -> ExitStack:
    """A stack that closes when the call has ended, with the answer sent or the caller gone."""
    held = ExitStack()
    when_done: Any = context.add_done_callback  # its annotation is wrong
    when_done(lambda _: held.close())
    return held


def encode(response: Message | bytes) -> bytes:
    """A response as bytes; one that is encoded already stays."""
    return response if isinstance(response, bytes) else response.SerializeToString()


def _tenant(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    for tenant in _metadata(context, TENANT_KEY):
        if len(tenant) > _MAX_TENANT_CHARS:
            raise InvalidRequest(TENANT_KEY, f"must be at most {_MAX_TENANT_CHARS} characters")
        return tenant
    return None


def _metadata(context: grpc.aio.ServicerContext[Any, Any], name: str) -> list[str]:
    values = [value for key, value in context.invocation_metadata() or () if key == name]
    return [value if isinstance(value, str) else value.decode("utf-8", "replace") for value in values]
