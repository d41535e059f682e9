"""A real gateway in the test's event loop, on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai

from specdec.gateway.service import Gateway
from specdec.gateway.settings import GatewaySettings


class GatewayAtHand(Gateway):
    """A gateway with its URL and clients."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, api_key: str = "none") -> openai.AsyncOpenAI:
        """OpenAI's own client, without retries."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0)

    def http(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.url, timeout=60.0)


@asynccontextmanager
async def gateway(*coordinators: str, **settings: Any) -> AsyncIterator[GatewayAtHand]:
    """Run a gateway of these coordinators."""
    fields = {"host": "127.0.0.1", "port": 0, "coordinators": coordinators, **settings}
    one = GatewayAtHand(GatewaySettings(**fields))
    await one.start()
    try:
        yield one
    finally:
        await one.stop(0)


async def raw_request(
    one: Gateway, data: bytes, *, address: str = "127.0.0.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection from `address` and send `data`; returns its reader and writer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", one.port, local_addr=(address, 0))
    writer.write(data)
    await writer.drain()
    return reader, writer


def post(path: str, body: bytes) -> bytes:
    """Bytes of a POST request."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body
