"""The HTTP server: uvicorn with our sockets and TLS files, without its signal handlers."""

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
"""Seconds before an idle connection is closed: longer than common proxies' minute, so that no request meets a close."""


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signal."""
        yield


class HttpServer:
    """Serves one application until told to stop."""

    def __init__(self, app: ASGIApp, *, tls: TlsFiles | None, header_s: float, reader_stall_s: float) -> None:
        """Serve nothing yet."""
        self._config = uvicorn.Config(
            app,
            http=protocol_class(header_s, reader_stall_s),
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
        """Start to answer at bound sockets."""
        self._serving = asyncio.create_task(self._server.serve(list(sockets)), name="http")
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0)

    async def stop(self, grace_s: float) -> None:
        """Take no more connections, and close the others after `grace_s`."""
        if self._serving is None:
            return
        self._config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await self._serving


def _following(tls: TlsFiles) -> ssl.SSLContext:
    """A context whose handshakes use the current files."""
    first = tls.current().ssl_context

    def exchange(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = tls.current().ssl_context

    first.sni_callback = exchange  # also called for clients that name no host
    return first
