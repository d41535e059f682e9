"""Connections whose requests are answered early, begin with line breaks, or offer another protocol."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.services.raw_http1 import raw_connection

HEADER_S = 1.0
OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Sends the body back; of a request to /refused it reads none."""
    body, more = b"", scope["path"] != "/refused"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": 200 if body else 413, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


def head(path: str, num_bytes: int, more: bytes = b"") -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n%s\r\n" % (path.encode(), num_bytes, more)


async def until_closed(writer: asyncio.StreamWriter) -> None:
    """Send until the server has closed the connection."""
    with pytest.raises(ConnectionError):
        while True:
            writer.write(b"\r\n")
            await writer.drain()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("more", [b"", b"connection: close\r\n"], ids=["kept alive", "to be closed"])
async def test_a_client_that_sends_on_reads_its_refusal_and_is_closed(more: bytes) -> None:
    async with raw_connection(app, HEADER_S) as (reader, writer):
        writer.write(head("/refused", 2**30, more))
        writer.write(b"x" * 2**20)
        await writer.drain()
        told = await reader.read()
        assert told.startswith(b"HTTP/1.1 413 ") and b"connection: close" in told
        await until_closed(writer)


async def test_a_client_that_sends_without_end_after_its_refusal_is_cut_off() -> None:
    async with raw_connection(app) as (reader, writer):
        writer.write(head("/refused", 2**30))
        assert await reader.read()
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b"x" * 2**20)
                await writer.drain()


async def test_line_breaks_do_not_keep_a_connection() -> None:
    async with raw_connection(app, HEADER_S) as (reader, writer):
        writer.write(head("/", 1) + b"x")
        assert (await reader.readuntil(b"\r\n\r\nx")).startswith(b"HTTP/1.1 200 ")
        await until_closed(writer)


@pytest.mark.parametrize("at", [0, 20, 60, 95, 140, 180, -1])
async def test_a_request_that_offers_http_2_keeps_its_body(at: int) -> None:
    async with raw_connection(app) as (reader, writer):
        whole = head("/", 5, OFFER) + b"hello"
        for piece in (whole[:at], whole[at:], whole + head("/", 3) + b"end"):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        told = [await reader.readuntil(b"\r\n\r\n" + body) for body in (b"hello", b"hello", b"end")]
        assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in told)
