"""TLS of a server: files that are re-read when they change, and who may call; and of a client.

Secrets are renewed under a running process (cert-manager swaps a symbolic link), so the files are read again
before every handshake of a server. Connections that are open keep what they have; new ones get the new certificate.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from wsgiref.simple_server import WSGIServer

import grpc
import structlog

from specdec.rpc.errors import PermissionDenied, abort_with
from specdec.rpc.settings import ServiceSettings

_T = TypeVar("_T")

_HEALTH = "/grpc.health.v1.Health/"
# A renewal may come between two reads; then key and certificate are read again.
_MAX_READS = 3
_log = structlog.get_logger(__name__)


class TlsFilesBroken(Exception):
    """A TLS file cannot be used; the message names the setting and says why."""


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """One consistent state of the files: PEM bytes, checked."""

    key: bytes = field(repr=False)
    chain: bytes
    client_ca: bytes | None
    ssl_context: ssl.SSLContext = field(compare=False)
    """The same for Python's own servers."""

    def grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        """The same for gRPC."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], self.client_ca)


class TlsFiles:
    """A server's certificate, key and client authorities, always as they are on disk. Safe for any thread.

    Files that change to something unusable are logged once and the last good state is kept.
    """

    def __init__(self, cert_file: Path, key_file: Path, client_ca_file: Path | None) -> None:
        """Read the files. Raises TlsFilesBroken."""
        self._cert_file = cert_file
        self._key_file = key_file
        self._client_ca_file = client_ca_file
        self._lock = threading.Lock()
        self._refused = ""
        self._current = self._load()

    @property
    def demands_client_certificate(self) -> bool:
        """Whether clients must show a certificate of the client authorities."""
        return self._client_ca_file is not None

    def current(self) -> TlsMaterial:
        """The newest good state; the same object until it changes. Never raises."""
        with self._lock:
            try:
                if self._read() != (self._current.key, self._current.chain, self._current.client_ca):
                    self._current = self._load()
                    _log.info("tls_files_renewed", tls_cert_file=str(self._cert_file))
                self._refused = ""
            except TlsFilesBroken as error:
                if str(error) != self._refused:
                    _log.error("tls_files_refused", reason=str(error), kept="the last good certificate")
                self._refused = str(error)
            return self._current

    def _load(self) -> TlsMaterial:
        content, context = _load_consistent(self._read, lambda content: self._check(content[2]))
        return TlsMaterial(*content, context)

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        return (
            _read_file("tls_key_file", self._key_file),
            _read_file("tls_cert_file", self._cert_file),
            None if self._client_ca_file is None else _read_file("tls_client_ca_file", self._client_ca_file),
        )

    def _check(self, client_ca: bytes | None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _load_pair(context, "tls_", self._cert_file, self._key_file)
        if client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            _load_authorities(context, "tls_client_ca_file", client_ca)
        return context


def server_tls_files(settings: ServiceSettings) -> TlsFiles | None:
    """The files that a service's settings name; None without TLS. Raises TlsFilesBroken."""
    if settings.tls_cert_file is None or settings.tls_key_file is None:
        return None
    return TlsFiles(settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file)


def channel_credentials(ca_file: Path | None, cert_file: Path | None, key_file: Path | None) -> grpc.ChannelCredentials:
    """Credentials of the settings replica_tls_*, as the files are now. Raises TlsFilesBroken."""

    def read() -> tuple[bytes | None, bytes | None, bytes | None]:
        return (
            None if ca_file is None else _read_file("replica_tls_ca_file", ca_file),
            None if key_file is None else _read_file("replica_tls_key_file", key_file),
            None if cert_file is None else _read_file("replica_tls_cert_file", cert_file),
        )

    # gRPC would take broken files and only fail to connect, again and again.
    def check(content: tuple[bytes | None, bytes | None, bytes | None]) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if content[0] is not None:
            _load_authorities(context, "replica_tls_ca_file", content[0])
        if cert_file is not None and key_file is not None:
            _load_pair(context, "replica_tls_", cert_file, key_file)
        return context

    return grpc.ssl_channel_credentials(*_load_consistent(read, check)[0])


def _load_consistent(read: Callable[[], _T], check: Callable[[_T], ssl.SSLContext]) -> tuple[_T, ssl.SSLContext]:
    """What was read and checked while nothing changed in between. Raises TlsFilesBroken."""
    for _ in range(_MAX_READS):
        content = read()
        try:
            context = check(content)
        except TlsFilesBroken:
            if read() == content:
                raise
            continue
        if read() == content:
            return content, context
    raise TlsFilesBroken("the TLS files change while they are read")


def _load_pair(context: ssl.SSLContext, prefix: str, cert_file: Path, key_file: Path) -> None:
    try:
        # Without a password OpenSSL would ask the terminal for that of an encrypted key.
        context.load_cert_chain(cert_file, key_file, password="")
    except (OSError, ValueError) as error:
        raise TlsFilesBroken(f"{prefix}cert_file, {prefix}key_file: {_why(error)}") from error


def _load_authorities(context: ssl.SSLContext, setting: str, pem: bytes) -> None:
    try:
        context.load_verify_locations(cadata=pem.decode("ascii"))
    except (OSError, ValueError) as error:
        raise TlsFilesBroken(f"{setting}: {_why(error)}") from error


def _read_file(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsFilesBroken(f"{setting}: {error}") from error


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return "the key does not belong to the certificate"
    if isinstance(error, ssl.SSLError):
        return f"not usable PEM ({(error.reason or str(error)).replace('_', ' ').lower()})"
    return str(error)


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
        return latest.grpc_configuration()

    return grpc.dynamic_ssl_server_credentials(given.grpc_configuration(), fetch, files.demands_client_certificate)


def follow_files(server: WSGIServer, files: TlsFiles) -> None:
    """Makes every handshake of a running HTTPS server use the files as they are then.

    Handshakes move from the thread that accepts to that of the connection, so that a silent client holds up no
    other, and failed ones are logged in place of a traceback on stderr.
    """

    def before_handshake(connection: ssl.SSLObject, server_name: str | None, initial: ssl.SSLContext) -> None:
        connection.context = files.current().ssl_context

    def on_error(request: object, client_address: object) -> None:
        _log.debug("metrics_connection_failed", peer=str(client_address), exc_info=True)

    listener: Any = server.socket
    listener.context.sni_callback = before_handshake
    listener.do_handshake_on_connect = False
    vars(server)["handle_error"] = on_error


class ClientNameInterceptor(grpc.aio.ServerInterceptor):
    """Refuses with PERMISSION_DENIED whoever's certificate has none of the allowed names; health is for all.

    A name is a DNS name among the certificate's alternative names, or its common name. Upper and lower case are
    the same; wildcards mean nothing.
    """

    def __init__(self, allowed_names: Iterable[str]) -> None:
        self._allowed_names = frozenset(name.lower() for name in allowed_names)

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
            self._checked(getattr(handler, kind)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _checked(self, behavior: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isasyncgenfunction(behavior):

            @functools.wraps(behavior)
            async def generate(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
                await self._check(context)
                async with contextlib.aclosing(behavior(request, context)) as responses:
                    async for response in responses:
                        yield response

            return generate

        @functools.wraps(behavior)
        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            await self._check(context)
            return await behavior(request, context)

        return call

    async def _check(self, context: grpc.aio.ServicerContext) -> None:
        names = certificate_names(context.auth_context())
        if self._allowed_names.isdisjoint(name.lower() for name in names):
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
