"""TLS of servers and clients, whose files are read again when they change, and the check of clients' names.

A server reads its files before every handshake. A gRPC channel keeps its first certificate: see `ReplicaChannel`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol

import grpc
import structlog

from specdec.wire.abort import abort_with
from specdec.wire.errors import PermissionDenied
from specdec.wire.settings import PeerSettings, client_tls_paths
from specdec.wire.tls_files import TlsFiles, TlsMaterial, TlsPaths, client_context, server_context

_HEALTH = "/grpc.health.v1.Health/"
_FOR_DRAFTS = frozenset(f"/specdec.v1.TargetService/{name}" for name in ("Link", "GetReplicaInfo", "GetTokenizer"))
"""Methods that drafts call."""
_log = structlog.get_logger(__name__)


class ServesTls(Protocol):
    """Settings with the files of a server."""

    def server_tls_paths(self) -> TlsPaths | None: ...


def server_tls_files(settings: ServesTls) -> TlsFiles | None:
    """The files that a service's settings name; None without TLS. Raises TlsFilesBroken."""
    paths = settings.server_tls_paths()
    return None if paths is None else TlsFiles(server_context, paths)


def replica_tls_files(settings: PeerSettings) -> TlsFiles | None:
    """The files for calls to replicas; None without TLS.

    Raises TlsFilesBroken: gRPC would accept broken files, and fail to connect again and again.
    """
    if not settings.replica_tls:
        return None
    return TlsFiles(client_context, client_tls_paths(settings, "replica_tls"))


def channel_credentials(material: TlsMaterial) -> grpc.ChannelCredentials:
    """Credentials of a client."""
    return grpc.ssl_channel_credentials(material.authorities, material.key, material.chain)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials of a gRPC port that follow the files."""
    given = files.current()

    # None for "no change" is missing from grpc's annotations.
    def fetch() -> Any:
        nonlocal given
        latest = files.current()
        if latest is given:
            return None
        given = latest
        return _grpc_configuration(latest)

    return grpc.dynamic_ssl_server_credentials(_grpc_configuration(given), fetch, files.names_authorities)


def _grpc_configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    pairs = [] if material.key is None or material.chain is None else [(material.key, material.chain)]
    return grpc.ssl_server_certificate_configuration(pairs, material.authorities)


class ClientNameInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls whose client certificate has none of the allowed names, with PERMISSION_DENIED. Health is exempt.

    A name is a DNS name among the certificate's alternative names, or its common name. Case is ignored; wildcards
    are not supported.
    """

    def __init__(self, allowed_names: Iterable[str], draft_names: Iterable[str] = ()) -> None:
        """`draft_names` may call only what drafts need: a target's link, model and tokenizer."""
        self._allowed_names = frozenset(name.lower() for name in allowed_names)
        self._names_for_drafts = self._allowed_names | {name.lower() for name in draft_names}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, behind the check."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_HEALTH):
            return handler
        kind = "_".join(
            "stream" if many else "unary" for many in (handler.request_streaming, handler.response_streaming)
        )
        make_handler: Any = getattr(grpc, f"{kind}_rpc_method_handler")
        return make_handler(
            self._checked(getattr(handler, kind), self._names_for(handler_call_details.method)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _names_for(self, method: str) -> frozenset[str]:
        return self._names_for_drafts if method in _FOR_DRAFTS else self._allowed_names

    def _checked(self, behavior: Callable[..., Any], names: frozenset[str]) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(behavior):

            @functools.wraps(behavior)
            async def generate(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
                await self._check(context, names)
                async with contextlib.aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        yield response

            return generate

        @functools.wraps(behavior)
        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            await self._check(context, names)
            return await behavior(request, context)

        return call

    async def _check(self, context: grpc.aio.ServicerContext, allowed_names: frozenset[str]) -> None:
        names = certificate_names(context.auth_context())
        if allowed_names.isdisjoint(name.lower() for name in names):
            shown = ", ".join(sorted(names)) or "none"
            _log.warning("client_name_refused", peer=context.peer(), names=sorted(names))
            message = f"the names of the client's certificate ({shown}) are not in tls_allowed_client_names"
            await abort_with(context, PermissionDenied(message, reason="CLIENT_NAME_NOT_ALLOWED"))


def certificate_names(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[str]:
    """The DNS names and the common name of the peer's verified certificate; empty without one."""
    properties = ("peer_dns", "x509_common_name")
    return frozenset(
        value.decode("utf-8", "replace") for name in properties for value in auth_context.get(name, ()) if value
    )
