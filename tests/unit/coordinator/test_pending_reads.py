"""Above a number of requests that are received others wait, and the slowest of the greediest caller is cut off."""

from __future__ import annotations

import asyncio

import pytest

from specdec.coordinator.intake.reads import pending_reads
from specdec.coordinator.intake.reads.pending_reads import PendingReads
from specdec.wire.errors import Overloaded


async def test_the_oldest_read_of_the_caller_with_the_most_is_cut_off_for_who_waits() -> None:
    reads = PendingReads(budget_bytes=20, max_message_bytes=1)
    never, begun = asyncio.Event(), list[str]()

    async def read(caller: str) -> str:
        async with reads.reading(caller):
            begun.append(caller)
            await never.wait()
        return caller

    polite = [asyncio.create_task(read("polite")) for _ in range(3)]
    greedy = [asyncio.create_task(read("greedy")) for _ in range(17)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in (*polite, *greedy))
    newcomers = [asyncio.create_task(read(f"new {index}")) for index in range(2)]
    await asyncio.sleep(0)
    assert len(begun) == 20  # they wait, and nothing of theirs is received
    cut_off = greedy[:2]
    async with asyncio.timeout(30):
        await asyncio.wait(cut_off)
        while len(begun) < 22:  # noqa: ASYNC110 - a read has no event
            await asyncio.sleep(0.005)
    for task in cut_off:
        with pytest.raises(Overloaded) as error:
            task.result()
        assert error.value.reason == "TOO_MANY_UNREAD"
    never.set()
    left = (*polite, *greedy[2:], *newcomers)
    assert await asyncio.gather(*left) == ["polite"] * 3 + ["greedy"] * 15 + ["new 0", "new 1"]


async def test_many_short_requests_may_begin_at_once_and_few_are_received_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pending_reads, "_MOMENT_S", 60.0)  # a busy machine may stop this process for a while
    reads = PendingReads(budget_bytes=0, max_message_bytes=1)
    num, most = 0, 0

    async def read() -> None:
        nonlocal num, most
        async with reads.reading("gateway"):
            num, most = num + 1, max(most, num + 1)
            await asyncio.sleep(0.001)
            num -= 1

    await asyncio.gather(*(read() for _ in range(400)))
    assert (num, most) == (0, 8)


async def test_who_has_fewest_under_way_is_next_before_a_crowd_that_came_first() -> None:
    reads = PendingReads(budget_bytes=0, max_message_bytes=1)
    never, order = asyncio.Event(), list[str]()

    async def read(caller: str, *, for_ever: bool = True) -> None:
        async with reads.reading(caller):
            order.append(caller)
            if for_ever:
                await never.wait()

    crowd = [asyncio.create_task(read("crowd")) for _ in range(1000)]
    await asyncio.sleep(0)
    await asyncio.wait_for(read("polite", for_ever=False), 30)
    assert order.count("crowd") <= 16
    for task in crowd:
        task.cancel()
    await asyncio.gather(*crowd, return_exceptions=True)
    await read("polite", for_ever=False)  # nothing is left of them


async def test_a_cancelled_read_leaves_and_a_wait_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_reads, "_MOST_WAIT_S", 0.05)
    monkeypatch.setattr(pending_reads, "_MOMENT_S", 60.0)
    reads = PendingReads(budget_bytes=0, max_message_bytes=1)
    never = asyncio.Event()

    async def read() -> None:
        async with reads.reading("one"):
            await never.wait()

    tasks = [asyncio.create_task(read()) for _ in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="8 requests"):
        await read()
    tasks[3].cancel()
    await asyncio.gather(tasks[3], return_exceptions=True)
    tasks.append(asyncio.create_task(read()))
    await asyncio.sleep(0)
    assert sum(task.done() for task in tasks) == 1
    never.set()
    await asyncio.gather(*tasks[:3], *tasks[4:])


async def test_a_wait_that_ends_as_its_turn_comes_does_not_fail_the_read_that_made_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = PendingReads(budget_bytes=0, max_message_bytes=1)
    never, done = asyncio.Event(), asyncio.Event()

    async def read(until: asyncio.Event) -> str:
        async with reads.reading("one"):
            await until.wait()
        return "received"

    others = [asyncio.create_task(read(never)) for _ in range(7)]
    ending = asyncio.create_task(read(done))
    await asyncio.sleep(0)
    monkeypatch.setattr(pending_reads, "_MOST_WAIT_S", 0.0)
    late = asyncio.create_task(read(never))
    await asyncio.sleep(0)
    done.set()
    assert await ending == "received"
    with pytest.raises(Overloaded):
        await late
    never.set()
    assert await asyncio.gather(*others) == ["received"] * 7
