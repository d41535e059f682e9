"""The HTTP server of a process: uvicorn, on sockets and with TLS files of ours, without its signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from specdec.gateway.http.protocol import protocol_class
from specdec.wire.tls_files import TlsFiles

_BACKLOG = 1024
_KEEP_ALIVE_S = 75
"""Longer than the minute after which common proxies close idle connections, so that none is closed under a request."""


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class HttpServer:
    """Serves one application until told to stop."""

    def __init__(self, app: ASGIApp, *, tls: TlsFiles | None, header_s: float) -> None:
        """Serve nothing yet."""
        self._config = uvicorn.Config(
            app,
            http=protocol_class(header_s),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            backlog=_BACKLOG,
        )
        self._config.load()
        self._config.ssl = None if tls is None else _following(tls)
        self._server = _Server(self._config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Answer at bound sockets, from now on."""
        self._serving = asyncio.create_task(self._server.serve(list(sockets)), name="http")
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0)

    async def stop(self, grace_s: float) -> None:
        """Take no more connections, and cut off those that are not at their end after so long."""
        if self._serving is None:
            return
        self._config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await self._serving


def _following(tls: TlsFiles) -> ssl.SSLContext:
    """A context that hands each handshake to one with the files as they are then."""
    first = tls.current().ssl_context

    def exchange(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = tls.current().ssl_context

    first.sni_callback = exchange  # called for clients that name no host, too
    return first
