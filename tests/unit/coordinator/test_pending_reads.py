"""Above a number of requests that are being received, the oldest of the caller with the most is cut off."""

from __future__ import annotations

import asyncio

import pytest

from specdec.coordinator.intake.pending_reads import PendingReads
from specdec.wire.errors import Overloaded


async def test_the_oldest_read_of_the_caller_with_the_most_is_cut_off() -> None:
    reads = PendingReads(budget_bytes=20, max_message_bytes=1)
    never = asyncio.Event()

    async def read(caller: str) -> str:
        async with reads.reading(caller):
            await never.wait()
        return caller

    polite = [asyncio.create_task(read("polite")) for _ in range(3)]
    greedy = [asyncio.create_task(read("greedy")) for _ in range(17)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in (*polite, *greedy))
    newcomers = [asyncio.create_task(read(f"new {index}")) for index in range(2)]
    cut_off = greedy[:2]
    async with asyncio.timeout(30):
        await asyncio.wait(cut_off)
    for task in cut_off:
        with pytest.raises(Overloaded) as error:
            task.result()
        assert error.value.reason == "TOO_MANY_UNREAD"
    never.set()
    left = (*polite, *greedy[2:], *newcomers)
    assert await asyncio.gather(*left) == ["polite"] * 3 + ["greedy"] * 15 + ["new 0", "new 1"]


async def test_many_short_requests_may_begin_at_once() -> None:
    reads = PendingReads(budget_bytes=0, max_message_bytes=1)

    async def read() -> None:
        async with reads.reading("gateway"):
            await asyncio.sleep(0.001)

    await asyncio.gather(*(read() for _ in range(200)))


async def test_there_is_always_room_for_some_reads_and_a_cancelled_one_leaves() -> None:
    reads = PendingReads(budget_bytes=0, max_message_bytes=1)
    never = asyncio.Event()

    async def read() -> None:
        async with reads.reading("one"):
            await never.wait()

    tasks = [asyncio.create_task(read()) for _ in range(8)]
    await asyncio.sleep(0)
    tasks[3].cancel()
    await asyncio.gather(tasks[3], return_exceptions=True)
    tasks.append(asyncio.create_task(read()))
    await asyncio.sleep(0.3)
    assert sum(task.done() for task in tasks) == 1
    never.set()
    await asyncio.gather(*tasks[:3], *tasks[4:])
