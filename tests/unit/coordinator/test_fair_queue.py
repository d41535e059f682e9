"""Shares of tenants: what each is given, and that nothing is lost on the way."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.coordinator.intake.admission import AdmissionQueue, Place
from specdec.coordinator.intake.fair_queue import FairQueue
from specdec.coordinator.intake.line import Claim, Waiter
from specdec.coordinator.intake.load_shedding import LoadShedding
from specdec.wire.errors import Overloaded

TENANTS = ("a", "b", "c")
MOST_WORK = 100


async def crowd(queue: AdmissionQueue, *claims: Claim) -> list[asyncio.Task[Place]]:
    """These claims in line, in this order."""
    tasks = []
    for claim in claims:
        tasks.append(asyncio.create_task(queue.acquire(claim)))
        await asyncio.sleep(0)
    return tasks


@settings(max_examples=60, deadline=None)
@given(
    weights=st.tuples(*(st.sampled_from((0.5, 1.0, 2.0, 5.0)) for _ in TENANTS)),
    works=st.tuples(*(st.lists(st.integers(1, MOST_WORK), min_size=30, max_size=30) for _ in TENANTS)),
)
def test_tenants_that_wait_all_the_while_are_given_work_by_weight(
    weights: tuple[float, ...], works: tuple[list[int], ...]
) -> None:
    async def run() -> None:
        queue = FairQueue()
        for tenant, weight, sizes in zip(TENANTS, weights, works, strict=True):
            for size in sizes:
                queue.push(queue.new_waiter(Claim(tenant, work=size, weight=weight)))
        given_work = dict.fromkeys(TENANTS, 0.0)
        left = Counter(dict.fromkeys(TENANTS, 30))
        while min(left.values()):
            waiter = queue.head()
            assert waiter is not None
            queue.pop(waiter)
            claim = waiter.claim
            left[claim.tenant] -= 1
            given_work[claim.tenant] += claim.work / claim.weight
            slack = sum(MOST_WORK / weight for weight in sorted(weights)[:2])
            assert max(given_work.values()) - min(given_work.values()) <= slack

    asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(("come", "leave", "end", "turn")), st.integers(0, 30), st.integers(1, 6)), max_size=60
    ),
    max_running=st.integers(1, 4),
    max_waiting=st.integers(0, 6),
)
def test_no_place_is_lost_and_none_stays_empty_while_its_claim_waits(
    actions: list[tuple[str, int, int]], max_running: int, max_waiting: int
) -> None:
    async def run() -> None:
        queue = AdmissionQueue(max_running, max_waiting, 60.0)
        tasks: list[asyncio.Task[Place]] = []
        for action, which, size in actions:
            if action == "come":
                claim = Claim(TENANTS[which % 3], priority=which % 2, work=size, num_places=size)
                tasks.append(asyncio.create_task(queue.acquire(claim)))
            elif action == "turn":
                await asyncio.sleep(0)
            elif tasks:
                task = tasks[which % len(tasks)]
                if action == "leave":
                    task.cancel()
                elif task.done() and not task.cancelled() and task.exception() is None:
                    task.result().release(float(size))
        for _ in range(3):
            await asyncio.sleep(0)
            assert queue.num_taken <= max_running
        held = [t.result() for t in tasks if t.done() and not t.cancelled() and t.exception() is None]
        assert queue.num_running == sum(place.is_held for place in held)
        if queue.num_waiting:  # work conserving: whoever waits could not be given what it needs
            assert queue.num_wanted is not None
            assert queue.num_taken + queue.num_wanted > max_running
        for _ in range(len(tasks) + 3):
            for task in tasks:
                if task.done() and not task.cancelled() and task.exception() is None:
                    task.result().release()
            await asyncio.sleep(0)
        assert all(task.done() for task in tasks)
        assert (queue.num_running, queue.num_taken, queue.num_waiting) == (0, 0, 0)

    asyncio.run(run())


@settings(max_examples=200, deadline=None)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(("push", "push", "pop", "remove", "correct")), st.integers(0, 30), st.integers(1, 9)),
        max_size=200,
    )
)
def test_whose_turn_it_is_and_who_is_displaced_are_as_a_look_at_all_claims_would_find(
    actions: list[tuple[str, int, int]],
) -> None:
    async def run() -> None:
        queue = FairQueue()
        in_line: list[Waiter] = []
        granted: list[Claim] = []
        for action, which, size in actions:
            if action == "push":
                claim = Claim(f"t{which % 5}", priority=size % 3, work=size, weight=1.0 + which % 5)
                in_line.append(queue.new_waiter(claim))
                queue.push(in_line[-1])
            elif action == "pop" and (head := queue.head()) is not None:
                queue.pop(head)
                in_line.remove(head)
                granted.append(head.claim)
            elif action == "remove" and in_line:
                assert queue.remove(gone := in_line.pop(which % len(in_line)))
                assert not queue.remove(gone)
            elif action == "correct" and granted:
                queue.correct(granted.pop(which % len(granted)), float(size - 4))
            check_against_all(queue, in_line)

    asyncio.run(run())


def check_against_all(queue: FairQueue, in_line: list[Waiter]) -> None:
    """Hold head and last of a queue against what is in line."""
    assert len(queue) == len(in_line)
    head = queue.head()
    if not in_line:
        assert head is None
        return
    names = {waiter.claim.tenant for waiter in in_line}
    turns = {name: queue._tenants[name].turn for name in names}
    assert head is not None
    assert turns[head.claim.tenant] == min(turns.values())
    assert head is min(waiter for waiter in in_line if waiter.claim.tenant == head.claim.tenant)
    crowds = {name: sum(w.claim.tenant == name for w in in_line) / queue._tenants[name].weight for name in names}
    displaced = queue.displaced_by(Claim("newcomer", weight=1e9))
    assert displaced is not None
    assert crowds[displaced.claim.tenant] == max(crowds.values())
    assert displaced is max(waiter for waiter in in_line if waiter.claim.tenant == displaced.claim.tenant)


class CountedPriority(int):
    """Counts how often it is looked at."""

    num_looks = 0

    def __lt__(self, other: object) -> bool:
        CountedPriority.num_looks += 1
        return int(self) < int(other)  # type: ignore[call-overload]

    def __le__(self, other: object) -> bool:
        CountedPriority.num_looks += 1
        return int(self) <= int(other)  # type: ignore[call-overload]

    def __eq__(self, other: object) -> bool:
        CountedPriority.num_looks += 1
        return int(self) == int(other)  # type: ignore[call-overload]

    def __hash__(self) -> int:
        CountedPriority.num_looks += 1
        return int.__hash__(self)


@pytest.mark.parametrize("num_tenants", [1, 1000])
async def test_a_crowd_that_is_refused_or_leaves_costs_no_more_per_head_than_a_few(num_tenants: int) -> None:
    num, most_looks = 4000, 200
    queue = AdmissionQueue(1, num, 60.0)
    await queue.acquire(Claim("running"))

    def claim(number: int) -> Claim:
        return Claim(f"t{number % num_tenants}", priority=CountedPriority(0))

    tasks = [asyncio.create_task(queue.acquire(claim(number))) for number in range(num)]
    await asyncio.sleep(0)
    assert queue.num_waiting == num
    CountedPriority.num_looks = 0
    for number in range(100):
        with pytest.raises(Overloaded):
            await queue.acquire(claim(number))
    assert CountedPriority.num_looks < 100 * most_looks
    CountedPriority.num_looks = 0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert queue.num_waiting == 0
    assert CountedPriority.num_looks < num * most_looks


async def test_tenants_that_come_once_are_not_remembered_for_ever_and_who_owes_most_is() -> None:
    queue = FairQueue()
    queue.give(Claim("debtor", work=1e9))
    for number in range(100_000):
        claim = Claim(f"tenant {number}", work=100)
        queue.give(claim)
        queue.correct(claim, 90.0)
    assert len(queue._tenants) < 50_000
    debtor, newcomer = queue.new_waiter(Claim("debtor")), queue.new_waiter(Claim("newcomer"))
    queue.push(debtor)
    queue.push(newcomer)
    assert queue.head() is newcomer


async def test_one_that_comes_once_goes_before_the_rest_of_anothers_crowd() -> None:
    queue = AdmissionQueue(1, 300, 60.0)
    place = await queue.acquire(Claim("flood"))
    flood = await crowd(queue, *[Claim("flood", priority=-5) for _ in range(200)])
    (polite,) = await crowd(queue, Claim("polite"))
    place.release()
    await asyncio.sleep(0)
    for _ in range(2):
        if polite.done():
            break
        next(task for task in flood if task.done()).result().release()
        await asyncio.sleep(0)
    assert polite.done()
    for task in flood:
        task.cancel()


async def test_a_full_room_gives_up_the_last_of_whoever_has_most_in_it() -> None:
    queue = AdmissionQueue(1, 4, 60.0)
    await queue.acquire(Claim("flood"))
    flood = await crowd(queue, *[Claim("flood", priority=-5)] * 4)
    (polite,) = await crowd(queue, Claim("polite", priority=9))
    with pytest.raises(Overloaded):
        await flood[-1]
    assert not polite.done()
    with pytest.raises(Overloaded):
        await queue.acquire(Claim("flood", priority=-5))
    for task in (*flood, polite):
        task.cancel()


async def test_a_request_takes_a_place_for_each_choice_and_all_at_most() -> None:
    queue = AdmissionQueue(4, 10, 60.0)
    place = await queue.acquire(Claim("a", num_places=3))
    (two, one) = await crowd(queue, Claim("b", num_places=2), Claim("c"))
    assert not two.done()
    assert not one.done()  # nobody overtakes: else one who needs several would wait for ever
    place.release()
    await asyncio.gather(two, one)
    (everything,) = await crowd(queue, Claim("d", num_places=99))
    two.result().release()
    one.result().release()
    await everything
    assert queue.num_taken == 4


async def test_who_leaves_the_line_lets_through_those_it_held_up() -> None:
    queue = AdmissionQueue(2, 10, 60.0)
    await queue.acquire(Claim("a"))
    (wide, narrow) = await crowd(queue, Claim("b", num_places=2), Claim("c"))
    wide.cancel()
    await narrow


async def test_work_that_was_not_done_is_given_back_to_the_tenants_share() -> None:
    queue = AdmissionQueue(1, 10, 60.0)
    (await queue.acquire(Claim("x", work=1))).release(1)
    place = await queue.acquire(Claim("y", work=1000))
    order: list[str] = []

    async def run(tenant: str, work: float) -> None:
        held = await queue.acquire(Claim(tenant, work=work))
        order.append(tenant)
        held.release(1)

    tasks = [asyncio.create_task(run(tenant, 1000)) for tenant in ("x", "x", "y", "y")]
    await asyncio.sleep(0)
    place.release(1)
    await asyncio.gather(*tasks)
    assert order in (["x", "y", "x", "y"], ["y", "x", "y", "x"])


async def test_a_deadline_before_any_likely_place_is_refused_at_once() -> None:
    loop = asyncio.get_running_loop()
    queue = AdmissionQueue(1, 10, 60.0)
    claim = Claim("a")
    await queue.acquire(claim)
    (hopeful,) = await crowd(queue, Claim("a", deadline_s=loop.time() + 0.001))
    assert not hopeful.done()  # nothing is known yet of how long places are held
    for _ in range(20):
        queue.num_running += 1
        queue._count(claim, 1)
        queue.give_back(Place(claim, 1, 0, queue, time.monotonic() - 100.0), used=None)
    with pytest.raises(Overloaded) as caught:
        await queue.acquire(Claim("b", deadline_s=loop.time() + 1.0))
    assert caught.value.reason == "DEADLINE_UNREACHABLE"
    assert caught.value.retry_after_s > 0
    (patient,) = await crowd(queue, Claim("b", deadline_s=loop.time() + 10_000))
    assert not patient.done()
    hopeful.cancel()
    patient.cancel()


def test_speculation_goes_when_the_queue_stays_and_is_back_only_when_it_stays_empty() -> None:
    now_s = 0.0
    gate = LoadShedding(2.0, clock=lambda: now_s)
    states = []
    for at_s, num_waiting in (
        (0.0, 1),
        (1.9, 0),
        (2.5, 3),
        (3.0, 2),
        (4.6, 2),
        (4.7, 0),
        (9.0, 1),
        (9.1, 0),
        (14.2, 0),
    ):
        now_s = at_s
        gate.on_queue(num_waiting)
        states.append(gate.is_shedding)
    assert states == [False, False, False, False, True, True, True, True, False]


@settings(max_examples=150, deadline=None)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from(("come", "leave", "end", "one", "turn")), st.integers(0, 30), st.integers(1, 20)),
        max_size=60,
    ),
    max_running=st.integers(1, 20),
)
def test_divisible_claims_fill_all_places_but_those_of_other_tenants(
    actions: list[tuple[str, int, int]], max_running: int
) -> None:
    async def run() -> None:
        queue = AdmissionQueue(max_running, 100, 60.0)
        tasks: list[asyncio.Task[Place]] = []
        came = set[str]()

        def places() -> list[Place]:
            return [t.result() for t in tasks if t.done() and not t.cancelled() and t.result().is_held]

        for action, which, size in actions:
            if action == "come":
                claim = Claim(TENANTS[which % 3], work=size, num_places=size, is_divisible=True)
                came.add(claim.tenant)
                tasks.append(asyncio.create_task(queue.acquire(claim)))
            elif action == "turn":
                await asyncio.sleep(0)
            elif action == "leave" and tasks:
                tasks[which % len(tasks)].cancel()
            elif places():
                place = places()[which % len(places())]
                place.end_one() if action == "one" else place.release(float(size))
        for _ in range(3):
            await asyncio.sleep(0)
        held = Counter[str]()
        for place in places():
            held[place.claim.tenant] += place.num_held
        assert held.total() == queue.num_taken <= max_running
        least, most = (max(1, max_running // part) if max_running >= 8 else 0 for part in (16, 4))
        assert all(num <= max(1, max_running - least) for num in held.values())
        assert all(place.num_held for place in places() if place.num_missing)  # every request goes on
        wants = queue.num_waiting or any(place.num_missing for place in places())
        assert not wants or queue.num_taken >= max_running - (most if len(came) > 1 else least)
        for _ in range(len(tasks) + 3):
            for place in places():
                place.release()
            await asyncio.sleep(0)
        assert all(task.done() for task in tasks)
        assert (queue.num_running, queue.num_taken, queue.num_waiting) == (0, 0, 0)

    asyncio.run(run())
