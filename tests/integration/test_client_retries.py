"""What a client's gRPC tries again by itself, and what not."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from specdec.cli.local.cluster import free_port
from specdec.client import Client
from specdec.rpc.errors import NoTarget
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import expected_ids, request, running
from tests.support.services.faults import another, eventually, scrape

pytestmark = pytest.mark.integration

WAIT_S = 2.0


async def test_a_call_for_which_the_coordinator_waited_in_vain_ends_after_that_one_wait(tmp_path: Path) -> None:
    target = ScriptedTarget()
    await target.start()
    metrics_port = free_port()
    settings = {"targets": [target.address], "target_timeout_s": WAIT_S, "metrics_port": metrics_port}
    context = another("coordinator", tmp_path, **settings)
    cluster = await asyncio.to_thread(context.__enter__)  # in a thread: the target, which it waits for, is served here
    try:
        await target.stop()
        async with Client(cluster.address) as client:

            async def is_down() -> bool:
                return [replica.state for replica in (await client.status()).replicas] == ["down"]

            await eventually(is_down, "the coordinator knows that its target is gone")
            started_s = time.monotonic()
            with pytest.raises(NoTarget) as caught:
                await client.complete(request())
            waited_s = time.monotonic() - started_s
        samples = await asyncio.to_thread(scrape, metrics_port)
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)
    assert caught.value.reason == "NO_TARGET"
    assert waited_s >= WAIT_S * 0.9
    assert samples["specdec_coordinator_requests_total{outcome=UNAVAILABLE}"] == 1


async def test_a_call_whose_connection_breaks_before_its_first_chunk_is_tried_again() -> None:
    target = ScriptedTarget()
    async with (
        running([target]) as harness,
        first_connection_breaks(harness.address) as (address, broken),
        Client(address) as client,
    ):
        completion = await client.complete(request())
        assert broken.is_set()
    assert completion.choices[0].token_ids == expected_ids(target, 20)


@asynccontextmanager
async def first_connection_breaks(upstream: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Yield an address in front of another one; the first connection there is cut off when a request has come."""
    broken = asyncio.Event()
    relays: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, breaks: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if breaks and b"Generate" in data:
                    broken.set()
                    break
                writer.write(data)
        writer.transport.abort()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = upstream.rpartition(":")
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        breaks = not broken.is_set()
        relays.add(asyncio.create_task(relay(up_reader, writer, False)))
        await relay(reader, up_writer, breaks)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", broken
    finally:
        server.close()
        for task in relays:
            task.cancel()
