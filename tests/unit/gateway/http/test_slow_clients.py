"""Clients that send or read slowly, and large bodies, cost themselves: others keep places and memory."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from specdec.gateway.http import body
from specdec.gateway.http.places import Places
from specdec.gateway.http.server import HttpServer
from tests.support.services.gateways import GatewayAtHand, gateway, post, raw_request

NOWHERE = "127.0.0.1:1"
PIECE = b"x" * 65536


async def status_of(reader: asyncio.StreamReader) -> int:
    return int((await reader.readline()).split()[1])


def head(num_bytes: int, key: str = "") -> bytes:
    told = "content-type: application/json\r\n" + (f"authorization: Bearer {key}\r\n" if key else "")
    return f"POST /tokenize HTTP/1.1\r\nhost: x\r\n{told}content-length: {num_bytes}\r\n\r\n".encode()


async def begun(
    one: GatewayAtHand, key: str, num_bytes: int = 10, address: str = "127.0.0.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request whose body does not end."""
    num_running = one.edge.num_running
    reader, writer = await raw_request(one, head(num_bytes + 1, key) + b" " * num_bytes, address=address)
    async with asyncio.timeout(30):
        while one.edge.num_running == num_running:  # noqa: ASYNC110 - the product has no event for it
            await asyncio.sleep(0.005)
    return reader, writer


async def test_a_client_whose_bodies_do_not_end_leaves_places_to_others() -> None:
    async with gateway(NOWHERE, max_concurrent_requests=40) as one:
        held = [await begun(one, "greedy") for _ in range(10)]
        reader, _ = await raw_request(one, head(1, "greedy"))
        assert await status_of(reader) == 429
        reader, _ = await raw_request(one, post("/tokenize", b"[]"))
        assert await status_of(reader) == 400
        held += [await begun(one, f"key {index}") for index in range(10)]
        reader, _ = await raw_request(one, head(1, "one key more"))
        assert await status_of(reader) == 429  # half of all places are this address's
        for _, writer in held:
            writer.close()


def test_shares_are_by_key_and_by_address() -> None:
    places = Places(40)
    for index in range(10):
        places.take("key", f"address {index}")
    refused = places.refusal("key", "elsewhere")
    assert refused is not None and refused.status == 429
    assert places.refusal("other", "elsewhere") is None
    for _ in range(20):
        places.take("address", "address")
    assert places.refusal("other", "address") is not None
    places.leave("key", "address 0")
    assert places.refusal("key", "elsewhere") is None
    for index in range(11):
        places.take(f"last {index}", f"far {index}")
    assert places.refusal("nobody", "nowhere") is not None


async def test_a_body_that_dribbles_is_refused_long_before_the_time_of_a_whole_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "_PATIENCE_S", 0.1)
    async with gateway(NOWHERE, body_read_s=60.0) as one:
        reader, writer = await raw_request(one, head(1000))

        async def dribble() -> None:
            while True:
                writer.write(b" ")
                await asyncio.sleep(0.02)

        dribbling = asyncio.create_task(dribble())
        async with asyncio.timeout(30):
            assert await status_of(reader) == 408
        dribbling.cancel()


async def test_bodies_hold_bytes_as_they_come_and_a_client_no_more_than_its_share() -> None:
    async with gateway(NOWHERE, max_held_body_bytes=400_000) as one:
        greedy = await begun(one, "greedy", 90_000)
        reader, writer = await raw_request(one, head(20_001, "greedy") + b" " * 20_000)
        async with asyncio.timeout(30):
            assert await status_of(reader) == 429
        other = await begun(one, "other", 90_000)
        reader, _ = await raw_request(one, head(50_001, "third") + b" " * 50_000)
        async with asyncio.timeout(30):
            assert await status_of(reader) == 429  # half of all bytes are this address's
        # Alone, a client may send a body of any size, as long as there is room for all.
        third = await begun(one, "third", 200_000, "127.0.0.2")
        reader, _ = await raw_request(one, head(50_001, "fourth") + b" " * 50_000, address="127.0.0.3")
        async with asyncio.timeout(30):
            assert await status_of(reader) == 429
        for _, opened in (greedy, other, third):
            opened.close()
        writer.close()


async def endless(_scope: Any, receive: Any, send: Any) -> None:
    """An answer without an end."""
    await send({"type": "http.response.start", "status": 200, "headers": []})

    async def write() -> None:
        while True:
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})

    writing = asyncio.create_task(write())
    while (await receive())["type"] != "http.disconnect":
        pass
    writing.cancel()
    _ended.set()


async def test_little_is_made_for_a_client_that_reads_nothing() -> None:
    """64 KiB wait in the event loop, and a few in the kernel, whose buffer holds four times that."""
    num_sent, is_gone = 0, asyncio.Event()

    async def answer(_scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_sent
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def write() -> None:
            nonlocal num_sent
            while True:
                await send({"type": "http.response.body", "body": PIECE[:1024], "more_body": True})
                num_sent += 1024
                await asyncio.sleep(0)

        writing = asyncio.create_task(write())
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        is_gone.set()

    listening = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(answer, tls=None, header_s=60, reader_stall_s=0.3)
    await server.start([listening])
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, listening.getsockname())
        await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(30):
            await is_gone.wait()
    await server.stop(0)
    assert 65536 <= num_sent < 2 * 65536


_ended = asyncio.Event()


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_reads_nothing_is_cut_off_and_one_that_reads_slowly_is_not(reads: bool) -> None:
    _ended.clear()
    listening = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(endless, tls=None, header_s=60, reader_stall_s=1.5 if reads else 0.3)
    await server.start([listening])
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        await loop.sock_connect(client, listening.getsockname())
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        if not reads:
            async with asyncio.timeout(30):
                await _ended.wait()
            return
        for _ in range(60):
            await loop.sock_recv(client, 32768)
            await asyncio.sleep(0.05)
        assert not _ended.is_set()
    finally:
        client.close()
        await server.stop(0)
