"""Crowds of clients that read nothing or leave: whoever reads goes on, and nothing of the others is left."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from specdec.client import Client
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import expected_ids
from tests.support.services.faults import eventually, scrape
from tests.support.services.gateways import post
from tests.support.services.one_service import running

pytestmark = [pytest.mark.long, pytest.mark.integration]
NUM_SLOW, NUM_CANCELLED, AT_ONCE = 1000, 10_000, 100
STALL_S, WITHIN_S = 5.0, 10.0
VICTIM_TOKENS = 200
LOGPROBS = 20
"""Events are large, so that few of them fill what the kernel and the gateway hold for a reader."""
STEP_S = 0.2
"""Seconds of a target's step: as a real one with a thousand sessions, it does not outrun two cores of services."""
MOST_MORE_RSS_BYTES = 320 * 2**20
"""A gateway takes 90 MiB when nobody is there, and may take 512 by deploy/compose.yaml."""


def asked(max_tokens: int, seed: int) -> bytes:
    fields = {"prompt": [5, 6, 7], "max_tokens": max_tokens, "seed": seed, "stream": True, "logprobs": LOGPROBS}
    return post("/v1/completions", json.dumps({**fields, "ignore_eos": True, "return_token_ids": True}).encode())


@dataclass
class Front:
    """A gateway process before a coordinator process; their target is in this one."""

    port: int
    target: ScriptedTarget
    client: Client
    gateway: psutil.Process

    @property
    def rss_bytes(self) -> int:
        """The gateway's memory."""
        return int(self.gateway.memory_info().rss)

    async def all_gone(self) -> None:
        """Wait until neither gateway, coordinator nor target has anything left of the crowd."""

        async def is_gone() -> bool:
            samples = await asyncio.to_thread(scrape, self.port)
            status = await self.client.status()
            num_running = samples["specdec_gateway_requests_running"] + status.num_running + status.num_waiting
            return not num_running and not self.target.sessions

        await eventually(is_gone, "the crowd is gone")

    async def victim(self, seed: int, on_output: Callable[[], None] = lambda: None) -> tuple[list[int], float]:
        """Token ids of a stream that is read, and its longest pause in seconds; `on_output` is called in a thread."""
        return await asyncio.to_thread(_read, self.port, seed, on_output)


def _read(port: int, seed: int, on_output: Callable[[], None]) -> tuple[list[int], float]:
    ids: list[int] = []
    longest_s, last_s = 0.0, time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as lines:
        connection.sendall(asked(VICTIM_TOKENS, seed))
        for line in lines:
            if line.startswith(b"data: {"):
                now_s = time.monotonic()
                longest_s, last_s = max(longest_s, now_s - last_s), now_s
                on_output()
                event = json.loads(line[6:])
                assert "choices" in event, event
                for choice in event["choices"]:
                    ids += choice.get("token_ids") or []
            elif line.startswith(b"data: [DONE]"):
                break
    return ids, longest_s


@asynccontextmanager
async def served(folder: Path, **settings: object) -> AsyncIterator[Front]:
    """A gateway before a coordinator with room for the crowd."""
    target = ScriptedTarget()
    target.step_s = STEP_S
    await target.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(target.stop)
        room = {"targets": target.address, "max_running": 2000, "max_waiting": 2000}
        coordinator = await stack.enter_async_context(running("coordinator", room, folder))
        address = coordinator.spec.address
        one = await stack.enter_async_context(running("gateway", {"coordinators": address, **settings}, folder))
        client = await stack.enter_async_context(Client(address))
        await eventually(client.is_serving, "the coordinator serves")
        port = int(one.spec.address.rpartition(":")[2])

        async def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        await eventually(listens, "the gateway listens")
        yield Front(port, target, client, psutil.Process(one.pid))


@pytest.fixture(autouse=True)
def enough_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_thousand_readers_that_read_nothing_are_ended_and_one_that_reads_goes_on(tmp_path: Path) -> None:
    async with served(tmp_path, reader_stall_s=STALL_S) as front, AsyncExitStack() as stack:
        loop, reads = asyncio.get_running_loop(), asyncio.Event()
        reading = asyncio.create_task(front.victim(7, lambda: loop.call_soon_threadsafe(reads.set)))
        await reads.wait()
        before_bytes = most_bytes = front.rss_bytes
        for seed in range(NUM_SLOW):
            slow = stack.enter_context(socket.socket())
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            slow.setblocking(False)
            await loop.sock_connect(slow, ("127.0.0.1", front.port))
            await loop.sock_sendall(slow, asked(4000, seed))
        while not reading.done():
            await asyncio.wait({reading}, timeout=0.2)
            most_bytes = max(most_bytes, front.rss_bytes)
        ids, longest_s = await reading
        assert ids == expected_ids(front.target, VICTIM_TOKENS, seed=7)
        assert longest_s < WITHIN_S
        await front.all_gone()
        assert most_bytes - before_bytes < MOST_MORE_RSS_BYTES


async def test_ten_thousand_clients_that_leave_leave_nothing_and_one_that_stays_goes_on(tmp_path: Path) -> None:
    async with served(tmp_path) as front:

        async def leave(seed: int) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(asked(4000, seed))
            for _ in range(seed % 12):  # some leave before the headers, some in mid-stream
                await reader.readline()
            writer.transport.abort()

        async def crowd() -> None:
            for begin in range(0, NUM_CANCELLED, AT_ONCE):
                await asyncio.gather(*(leave(seed) for seed in range(begin, begin + AT_ONCE)))

        leaving = asyncio.create_task(crowd())
        while not leaving.done():
            ids, longest_s = await front.victim(seed=7)
            assert ids == expected_ids(front.target, VICTIM_TOKENS, seed=7)
            assert longest_s < WITHIN_S
        await leaving
        await front.all_gone()
