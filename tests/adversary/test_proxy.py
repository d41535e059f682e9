"""The proxy keeps what TCP guarantees, and breaks what it may."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.adversary.proxy_link import Flow
from tests.adversary.proxy_process import ProxyProcess

pytestmark = pytest.mark.integration
HOST = "127.0.0.1"
LINK = "a>b"
LONG_S = 30.0
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def echo_behind_proxy() -> AsyncIterator[tuple[ProxyProcess, int]]:
    """A server that sends back what it gets, and the port of a link to it."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1000):
                writer.write(data)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(echo, HOST, 0) as server, ProxyProcess() as proxy:
        yield proxy, await proxy.listen("b", server.sockets[0].getsockname()[1], source="a")


async def echoed(connection: Connection, data: bytes) -> bytes:
    reader, writer = connection
    writer.write(data)
    return await asyncio.wait_for(reader.readexactly(len(data)), LONG_S)


SLOW = Flow(delay_s=0.01, jitter_s=0.02, max_piece_bytes=7, piece_gap_s=0.0005, loss=0.05, resend_s=0.02)


@pytest.mark.parametrize("flow", [Flow(), SLOW, Flow(delay_s=0.05, jitter_s=0.1)])
async def test_bytes_arrive_whole_and_in_order_however_slowly_they_travel(flow: Flow) -> None:
    data = random.Random(1).randbytes(5_000)
    async with echo_behind_proxy() as (proxy, port):
        await proxy.set_flow(LINK, forth=flow, back=flow)
        connection = await asyncio.open_connection(HOST, port)
        for start in range(0, len(data), 1000):
            assert await echoed(connection, data[start : start + 1000]) == data[start : start + 1000]


async def test_sockets_of_one_host_are_not_reached_from_another() -> None:
    async with echo_behind_proxy() as (proxy, port):
        assert await echoed(await asyncio.open_connection(HOST, port), b"..specdec-link-01") == b"..specdec-link-01"
        apart = await proxy.listen("c", port, source="a", is_between_hosts=True)
        assert await echoed(await asyncio.open_connection(HOST, apart), b"..specdec-link-01") == b"..specdec-none-01"


async def test_exchanging_the_flow_while_bytes_travel_loses_and_reorders_nothing() -> None:
    data = random.Random(2).randbytes(200_000)
    flows = [SLOW, Flow(), Flow(held=True), Flow(delay_s=0.02, jitter_s=0.05), Flow()]
    async with echo_behind_proxy() as (proxy, port):
        reader, writer = await asyncio.open_connection(HOST, port)

        async def send() -> None:
            for start in range(0, len(data), 500):
                writer.write(data[start : start + 500])
                await writer.drain()
                if start % 10_000 == 0:
                    await proxy.set_flow(LINK, forth=flows[start // 10_000 % 5], back=flows[start // 10_000 % 3])
            await proxy.set_flow(LINK)

        sending = asyncio.create_task(send())
        assert await asyncio.wait_for(reader.readexactly(len(data)), LONG_S) == data
        await sending


async def test_a_black_hole_swallows_nothing_and_gives_all_back_when_it_ends() -> None:
    async with echo_behind_proxy() as (proxy, port):
        connection = reader, writer = await asyncio.open_connection(HOST, port)
        assert await echoed(connection, b"before") == b"before"
        await proxy.set_flow(LINK, back=Flow(held=True))
        writer.write(b"within")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.3)
        await proxy.heal(LINK)
        assert await asyncio.wait_for(reader.readexactly(6), LONG_S) == b"within"


async def test_an_end_that_leaves_is_not_missed_behind_a_black_hole_until_it_is_over() -> None:
    ended = asyncio.Event()

    async def wait_for_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"here")
        await reader.read()
        ended.set()
        writer.close()

    async with await asyncio.start_server(wait_for_end, HOST, 0) as server, ProxyProcess() as proxy:
        port = await proxy.listen("b", server.sockets[0].getsockname()[1], source="a")
        reader, writer = await asyncio.open_connection(HOST, port)
        assert await reader.readexactly(4) == b"here"
        await proxy.set_flow(LINK, forth=Flow(held=True))
        writer.close()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ended.wait(), 0.3)
        await proxy.heal(LINK)
        await asyncio.wait_for(ended.wait(), LONG_S)


async def test_a_reset_ends_connections_at_once_and_new_ones_are_carried() -> None:
    async with echo_behind_proxy() as (proxy, port):
        connection = await asyncio.open_connection(HOST, port)
        assert await echoed(connection, b"before") == b"before"
        assert await proxy.reset(LINK) == 1
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(connection[0].read(1), LONG_S)
        assert await echoed(await asyncio.open_connection(HOST, port), b"after") == b"after"


@pytest.mark.parametrize("address", [HOST, f"::ffff:{HOST}"])
async def test_links_to_one_port_are_told_apart_by_the_process_that_connects(address: str) -> None:
    def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x")

    async with await asyncio.start_server(greet, HOST, 0) as server, ProxyProcess() as proxy:
        port = await proxy.listen("b", server.sockets[0].getsockname()[1])
        await proxy.set_owner("me", os.getpid())
        await proxy.set_flow("you>b", forth=Flow(held=True))
        reader, _ = await asyncio.open_connection(address, port)
        assert await asyncio.wait_for(reader.readexactly(1), LONG_S) == b"x"
        assert await proxy.connections() == {"me>b": 1}


async def test_a_connection_that_was_asked_for_behind_a_black_hole_opens_when_it_ends() -> None:
    async with echo_behind_proxy() as (proxy, port):
        await proxy.set_flow(LINK, forth=Flow(held=True), back=Flow(held=True))
        connection = await asyncio.open_connection(HOST, port)
        asking = asyncio.create_task(echoed(connection, b"hello"))
        started_s = time.monotonic()
        assert not (await asyncio.wait([asking], timeout=0.3))[0], f"answered after {time.monotonic() - started_s} s"
        await proxy.heal(LINK)
        assert await asking == b"hello"
