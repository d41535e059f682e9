"""Bytes to and from a gateway's HTTP server with a made-up application."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from specdec.gateway.http.server import HttpServer


@asynccontextmanager
async def raw_connection(
    app: Any, header_s: float = 20.0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server that runs an ASGI application; `header_s`: seconds for headers."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(app, tls=None, header_s=header_s, reader_stall_s=60)
    await server.start([listening])
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    try:
        async with asyncio.timeout(30):
            yield reader, writer
    finally:
        writer.close()
        await server.stop(0)
