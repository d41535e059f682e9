"""A bounded number of places, a bounded queue, priorities."""

from __future__ import annotations

import asyncio
import time

import pytest

from specdec.coordinator.intake.admission import AdmissionQueue
from specdec.coordinator.intake.line import Claim
from specdec.wire.errors import Overloaded


async def waiting(queue: AdmissionQueue, *priorities: int) -> list[asyncio.Task[object]]:
    """Tasks in line, in this order of arrival."""
    tasks: list[asyncio.Task[object]] = []
    for priority in priorities:
        tasks.append(asyncio.create_task(queue.acquire(Claim(priority=priority))))
        await asyncio.sleep(0)
    return tasks


async def test_places_are_given_at_once_while_there_are_any() -> None:
    queue = AdmissionQueue(2, 0, 1.0)
    places = [await queue.acquire(Claim()), await queue.acquire(Claim())]
    assert queue.num_running == 2
    for place in places:
        place.release()
        place.release()
    assert queue.num_running == 0


async def test_who_finds_the_targets_full_waits_in_turn_and_is_before_a_tenant_that_fills_them() -> None:
    capacity = 0
    queue = AdmissionQueue(100, 10, 10.0, capacity=lambda: capacity)
    unknown = [await queue.acquire(Claim(num_places=30)) for _ in range(2)]
    for place in unknown:
        place.release()
    capacity = 16
    order: list[str] = []

    async def run(tenant: str, num_places: int) -> None:
        place = await queue.acquire(Claim(tenant, work=num_places, num_places=num_places))
        order.append(tenant)
        place.release()

    filling = await queue.acquire(Claim("greedy", work=16, num_places=16))
    tasks = []
    for tenant, num_places in (("greedy", 16), ("greedy", 16), ("polite", 1)):
        tasks.append(asyncio.create_task(run(tenant, num_places)))
        await asyncio.sleep(0)
    assert (queue.num_taken, queue.num_waiting) == (16, 3)
    filling.release()
    await asyncio.gather(*tasks)
    assert order == ["polite", "greedy", "greedy"]
    larger = await queue.acquire(Claim(num_places=32))  # alone, a request may want more than there is
    assert queue.num_taken == 32
    larger.release()


async def test_lower_priorities_go_first_then_first_come_first_served() -> None:
    queue = AdmissionQueue(1, 10, 10.0)
    place = await queue.acquire(Claim())
    order: list[str] = []

    async def run(name: str, priority: int) -> None:
        place = await queue.acquire(Claim(priority=priority))
        order.append(name)
        place.release()

    tasks = []
    for name, priority in (("late", 5), ("first", 0), ("second", 0), ("urgent", -3)):
        tasks.append(asyncio.create_task(run(name, priority)))
        await asyncio.sleep(0)
    place.release()
    await asyncio.gather(*tasks)
    assert order == ["urgent", "first", "second", "late"]
    assert (queue.num_running, queue.num_waiting) == (0, 0)


async def test_a_full_queue_refuses_and_says_when_to_retry() -> None:
    queue = AdmissionQueue(1, 1, 10.0)
    await queue.acquire(Claim())
    (task,) = await waiting(queue, 0)
    with pytest.raises(Overloaded) as caught:
        await queue.acquire(Claim())
    assert caught.value.retry_after_s > 0
    task.cancel()


async def test_a_full_queue_gives_up_its_last_for_one_that_goes_before_it() -> None:
    queue = AdmissionQueue(1, 2, 10.0)
    place = await queue.acquire(Claim())
    first, last = await waiting(queue, 1, 7)
    (urgent,) = await waiting(queue, 0)
    with pytest.raises(Overloaded):
        await last
    place.release()
    await urgent
    first.cancel()


async def test_a_queue_of_none_admits_or_refuses() -> None:
    queue = AdmissionQueue(1, 0, 10.0)
    await queue.acquire(Claim())
    with pytest.raises(Overloaded):
        await queue.acquire(Claim(priority=-100))


async def test_waiting_too_long_is_overload() -> None:
    queue = AdmissionQueue(1, 1, 0.01)
    await queue.acquire(Claim())
    with pytest.raises(Overloaded) as caught:
        await queue.acquire(Claim())
    assert caught.value.reason == "QUEUE_TIMEOUT"
    assert queue.num_waiting == 0


async def test_a_place_given_to_one_that_is_cancelled_in_the_same_turn_goes_to_the_next() -> None:
    queue = AdmissionQueue(1, 2, 10.0)
    place = await queue.acquire(Claim())
    first, second = await waiting(queue, 0, 0)
    place.release()
    first.cancel()
    await second
    assert queue.num_running == 1


async def test_a_place_that_comes_in_the_turn_in_which_the_wait_ends_is_not_lost() -> None:
    queue = AdmissionQueue(1, 1, 0.05)
    place = await queue.acquire(Claim())
    (task,) = await waiting(queue, 0)
    loop = asyncio.get_running_loop()
    loop.call_soon(time.sleep, 0.06)
    loop.call_soon(
        loop.call_soon, lambda: place.release()
    )  # in the next turn, in which the loop finds the wait's timer due
    await task
    assert queue.num_running == 1


async def test_places_that_come_free_go_to_the_running_claim_of_the_tenant_that_holds_fewest() -> None:
    queue = AdmissionQueue(16, 10, 10.0)
    crowd = await queue.acquire(Claim("crowd", num_places=64, is_divisible=True))
    other = await queue.acquire(Claim("other", num_places=16, is_divisible=True))
    assert (crowd.num_held, other.num_held) == (15, 1)
    for _ in range(7):
        crowd.end_one()
    assert (crowd.num_held, other.num_held) == (8, 8)
    crowd.end_one()  # what it gives back may come back to it, and neither falls behind
    other.end_one()
    assert (crowd.num_held, other.num_held) == (8, 8)
