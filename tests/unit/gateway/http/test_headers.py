"""What a client may send beside bodies: as many bytes, and as many headers, as there is memory for."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from specdec.gateway.http.heads import MOST_HEADER_BYTES
from specdec.gateway.http.server import HttpServer

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
LARGE = 4 * MOST_HEADER_BYTES


async def echo_length(_scope: Any, receive: Any, send: Any) -> None:
    num_bytes, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        num_bytes, more = num_bytes + len(message["body"]), message["more_body"]
    body = str(num_bytes).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def answer(data: bytes, app: Any = echo_length) -> bytes:
    """All that a server sends to who sends this, and then waits for the end of the connection."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(app, tls=None, header_s=60, reader_stall_s=60)
    await server.start([listening])
    try:
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(data)
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"a: b\r\n" * 1000 + b"\r\n",
        HEAD + b"a: " + b"b" * LARGE + b"\r\n\r\n",
        b"GET /?" + b"a" * LARGE + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        CHUNKED + b"0\r\na: " + b"b" * LARGE,
        CHUNKED + b"0\r\n" + b"a: b\r\n" * LARGE,
        CHUNKED + b"1;a=" + b"b" * LARGE,
    ],
    ids=["many headers", "a long header", "a long query", "a long trailer", "many trailers", "a long extension"],
)
def test_more_than_may_be_is_refused_or_ends_the_connection(data: bytes) -> None:
    told = asyncio.run(asyncio.wait_for(answer(data), 30))
    assert told == b"" or told.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
    if told:
        assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["code"] in ("headers_too_large", "invalid_http")


def test_a_body_in_chunks_of_a_byte_each_is_read() -> None:
    data = CHUNKED.replace(b"host: x", b"host: x\r\nconnection: close") + b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n"
    assert asyncio.run(asyncio.wait_for(answer(data), 30)).endswith(b"\r\n\r\n50000")


def test_a_trailer_is_no_header() -> None:
    names: list[bytes] = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        names.extend(name for name, _ in scope["headers"])
        await echo_length(scope, receive, send)

    data = (
        CHUNKED + b"1\r\na\r\n0\r\nspecdec-tenant: other\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    )
    told = asyncio.run(asyncio.wait_for(answer(data, note), 30))
    assert told.count(b"HTTP/1.1 200 ") == 2
    assert names == [b"host", b"transfer-encoding", b"host", b"connection"]


@pytest.mark.parametrize("version", [b"1.1", b"1.0", b"2.0"], ids=bytes.decode)
@pytest.mark.parametrize("hosts", [(), (b"x", b"x"), (b"x y",), (b"[::1]:80",), (b"",)], ids=str)
def test_http_1_1_needs_one_host(version: bytes, hosts: tuple[bytes, ...]) -> None:
    lines = b"".join(b"host: %s\r\n" % host for host in hosts)
    told = asyncio.run(asyncio.wait_for(answer(b"GET / HTTP/%s\r\n%sconnection: close\r\n\r\n" % (version, lines)), 30))
    is_right = version != b"2.0" and (hosts in ((b"[::1]:80",), (b"",)) or (version == b"1.0" and not hosts))
    assert told.startswith(b"HTTP/1.1 200 " if is_right else b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [(b"http://x", "/", b""), (b"HTTPS://x:8000?a=/b", "/", b"a=/b"), (b"http://x/v1/models?a", "/v1/models", b"a")],
)
def test_a_target_with_a_host_may_have_no_path(target: bytes, path: str, query: bytes) -> None:
    asked: list[tuple[str, bytes]] = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        asked.append((scope["path"], scope["query_string"]))
        await echo_length(scope, receive, send)

    data = b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % target
    assert asyncio.run(asyncio.wait_for(answer(data, note), 30)).startswith(b"HTTP/1.1 200 ")
    assert asked == [(path, query)]
