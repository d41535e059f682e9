"""The HTTP server of a /metrics page, which may face hostile clients.

A connection has one thread and at most `_LONGEST_S`, whatever it sends; above `_MOST_CONNECTIONS` the oldest is closed.
A request has at most `_MOST_REQUEST_BYTES`. One page is rendered at a time, because rendering takes the interpreter
from the process's other work.
"""

from __future__ import annotations

import contextlib
import io
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import CollectorRegistry, make_wsgi_app

from specdec.wire.tls_files import TlsFiles

_LONGEST_S = 10.0
_MOST_CONNECTIONS = 128
"""Open connections, at most; scrapers are few."""
_MOST_REQUEST_BYTES = 64 * 1024
_MOST_WAITING = 16
"""Requests that wait for the page, at most: a waiting thread does not notice that its connection was closed."""
_ACCEPTABLE = re.compile(r"[\w\-+*/.,;= ]{0,1024}", re.ASCII)
_VERSION = re.compile(r"version=\d{1,3}(\.\d{1,3}){0,2}(?![\w.])")
_log = structlog.get_logger(__name__)


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves a registry's page at one address, over TLS if there are files for it.

    The thread that accepts makes no handshake, so a silent client holds up no other.
    """

    daemon_threads = True
    request_queue_size = _MOST_CONNECTIONS

    def __init__(self, listener: socket.socket, registry: CollectorRegistry, tls: TlsFiles | None) -> None:
        """Listen with a bound socket. Raises OSError."""
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self._tls = tls
        self._began_s: dict[socket.socket, float] = {}
        """Start times of open connections, the oldest first."""
        self._lock = threading.Lock()
        self.server_name, self.server_port = listener.getsockname()[:2]
        self.setup_environ()
        self.set_app(_one_at_a_time(_tolerant(make_wsgi_app(registry))))
        self.server_activate()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, with the current certificate."""
        connection, peer = super().get_request()
        if self._tls is not None:
            context = self._tls.current().ssl_context
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            self._began_s[connection] = time.monotonic()
            num_surplus = len(self._began_s) - _MOST_CONNECTIONS
        self._cut_off(num_surplus, before_s=time.monotonic() - _LONGEST_S)
        return connection, peer

    def service_actions(self) -> None:
        """Close connections that take too long; called twice a second."""
        self._cut_off(0, before_s=time.monotonic() - _LONGEST_S)

    def close_request(self, request: Any) -> None:
        """Forget a closed connection."""
        with self._lock:
            self._began_s.pop(request, None)
        super().close_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection failed, for example in its handshake: log it without a traceback on stderr."""
        _log.debug("metrics_connection_failed", peer=str(client_address), exc_info=True)

    def _cut_off(self, num_surplus: int, before_s: float) -> None:
        """Shut down the oldest connections, so that their threads see the end."""
        with self._lock:
            began = list(self._began_s.items())
            for connection, began_s in began:
                if began_s > before_s and num_surplus <= 0:
                    break
                num_surplus -= 1
                # The plain socket's shutdown: another thread may be inside the TLS connection.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)
                self._began_s.pop(connection, None)


class _Handler(WSGIRequestHandler):
    """Answers without a log, and reads at most `_MOST_REQUEST_BYTES`."""

    timeout = _LONGEST_S
    rfile: Any

    def setup(self) -> None:
        """Bound the reader."""
        super().setup()
        self.rfile = io.BufferedReader(_Bounded(self.rfile.detach()))

    def finish(self) -> None:
        """End the answer; the peer may have gone."""
        with contextlib.suppress(OSError):
            super().finish()

    def get_stderr(self) -> Any:
        """Discard the library's tracebacks of failed connections."""
        return io.StringIO()

    def log_message(self, format: str, *args: Any) -> None:  # the base class's name
        """Log nothing."""


class _Bounded(io.RawIOBase):
    """A reader that ends after `_MOST_REQUEST_BYTES`."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw
        self._num_left = _MOST_REQUEST_BYTES

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read from the wrapped reader, up to the bound."""
        num_read = self._raw.readinto(memoryview(buffer)[: self._num_left]) if self._num_left else 0
        self._num_left -= num_read or 0
        return num_read

    def close(self) -> None:
        """Close the wrapped reader, too."""
        self._raw.close()
        super().close()


_App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def _tolerant(app: _App) -> _App:
    """The app, with malformed Accept headers dropped, on which the library fails."""

    def tolerant(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        accept = environ.get("HTTP_ACCEPT", "")
        versions = accept.count("version")
        if not _ACCEPTABLE.fullmatch(accept) or len(_VERSION.findall(accept)) != versions:
            environ = {**environ, "HTTP_ACCEPT": ""}
        try:
            return app(environ, start_response)
        except Exception as error:
            _log.error("metrics_failed", exc_info=error)
            start_response("500 Internal Server Error", [("Content-Type", "text/plain")])
            return [b"see metrics_failed in the log\n"]

    return tolerant


def _one_at_a_time(app: _App) -> _App:
    lock = threading.Lock()
    places = threading.BoundedSemaphore(_MOST_WAITING)

    def alone(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if not places.acquire(blocking=False):
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"too many requests at once\n"]
        try:
            with lock:
                return app(environ, start_response)
        finally:
            places.release()

    return alone
