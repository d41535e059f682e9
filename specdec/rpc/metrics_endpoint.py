"""The /metrics page of a process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

from specdec.addresses import join_address
from specdec.rpc.listening import bound_sockets
from specdec.rpc.settings import ServiceSettings
from specdec.rpc.startup import StartupFailed
from specdec.rpc.tls import server_tls_files
from specdec.telemetry import scrape_registry
from specdec.tls_files import TlsFiles

_SILENCE_S = 10.0
_log = structlog.get_logger(__name__)


@contextlib.contextmanager
def metrics_endpoint(
    settings: ServiceSettings, registry: CollectorRegistry, tls: TlsFiles | None = None
) -> Iterator[int | None]:
    """Serve /metrics where the settings say; yields the port, None if metrics are off. Raises StartupFailed.

    `tls` are the server's files, for who has them already: with `metrics_tls` they are used here, too.
    """
    if settings.metrics_port is None:
        yield None
        return
    tls = (tls or server_tls_files(settings)) if settings.metrics_tls else None
    try:
        listeners = bound_sockets(settings.host, settings.metrics_port, socket.SO_REUSEADDR)
        servers = [_MetricsServer(listener, scrape_registry(registry), tls) for listener in listeners]
    except OSError as error:
        address = join_address(settings.host, settings.metrics_port)
        raise StartupFailed(f"metrics_port: cannot listen on {address}: {error.strerror}") from error
    for server in servers:
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    try:
        yield servers[0].server_port
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """Shows a registry at one address, over TLS if there are files for it; a thread per connection.

    The thread that accepts makes no handshake, so a silent client holds up no other.
    """

    daemon_threads = True

    def __init__(self, listener: socket.socket, registry: CollectorRegistry, tls: TlsFiles | None) -> None:
        """Listen with a bound socket. Raises OSError."""
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self._tls = tls
        self.server_name, self.server_port = listener.getsockname()[:2]
        self.setup_environ()
        self.set_app(make_wsgi_app(registry))
        self.server_activate()

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next connection, with the certificate of this moment."""
        connection, peer = super().get_request()
        if self._tls is None:
            return connection, peer
        context = self._tls.current().ssl_context
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), peer

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection failed, such as by its handshake; not worth a traceback on stderr."""
        _log.debug("metrics_connection_failed", peer=str(client_address), exc_info=True)


class _Handler(WSGIRequestHandler):
    """Answers without a log, and hangs up on clients that say nothing."""

    timeout = _SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:  # the base class's name
        """Log nothing."""
