"""Coroutines of asyncio on SimPy's clock."""

from __future__ import annotations

import asyncio

import pytest
import simpy

from specdec.coordinator.intake.admission import AdmissionQueue, Place
from specdec.coordinator.intake.line import Claim
from specdec.coordinator.tenants.quotas import QuotaRate, TokenQuotas
from specdec.plan.simulation.clock import SimulatedLoop
from specdec.wire.errors import Overloaded


def new_loop() -> SimulatedLoop:
    return SimulatedLoop(simpy.Environment())


def test_time_passes_only_in_simulation_and_callbacks_keep_their_order() -> None:
    loop, seen = new_loop(), list[tuple[str, float]]()

    async def sleeper(name: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        seen.append((name, asyncio.get_running_loop().time()))

    with loop.running():
        for name, delay_s in (("late", 3600.0), ("first", 1.0), ("second", 1.0)):
            loop.start(sleeper(name, delay_s))
    loop.run(7200.0)
    assert seen == [("first", 1.0), ("second", 1.0), ("late", 3600.0)]
    assert loop.time() == 7200.0


def test_a_task_that_fails_ends_the_run() -> None:
    loop = new_loop()

    async def fails() -> None:
        raise ValueError("broken")

    with loop.running():
        loop.start(fails())
    with pytest.raises(RuntimeError, match="broken"):
        loop.run(1.0)


def test_the_coordinators_admission_measures_waits_and_places_on_the_simulated_clock() -> None:
    loop = new_loop()
    queue = AdmissionQueue(1, 10, 30.0, clock=loop.time)
    reasons: list[tuple[str, float]] = []

    async def hold(seconds: float) -> None:
        place: Place = await queue.acquire(Claim())
        await asyncio.sleep(seconds)
        place.release()

    async def wait(deadline_s: float | None) -> None:
        try:
            await queue.acquire(Claim(deadline_s=deadline_s))
        except Overloaded as error:
            reasons.append((error.reason, loop.time()))

    async def scenario() -> None:
        for _ in range(10):
            await hold(500.0)
        held = asyncio.ensure_future(hold(500.0))
        await asyncio.sleep(1.0)
        await wait(loop.time() + 20.0)
        await wait(None)
        await held

    with loop.running():
        loop.start(scenario())
    loop.run(10_000.0)
    assert reasons == [("DEADLINE_UNREACHABLE", 5001.0), ("QUEUE_TIMEOUT", 5031.0)]


def test_quotas_refill_on_the_simulated_clock() -> None:
    loop, quotas = new_loop(), None
    quotas = TokenQuotas(clock=loop.time)
    rate, admitted_s = QuotaRate(10.0, 100.0), list[float]()

    async def caller() -> None:
        for _ in range(3):
            try:
                await quotas.admit("a", rate, 200)
                admitted_s.append(loop.time())
            except Overloaded as error:
                await asyncio.sleep(error.retry_after_s)

    with loop.running():
        loop.start(caller())
    loop.run(1000.0)
    assert admitted_s[0] == 0.0
    assert admitted_s[1] == pytest.approx(10.1, abs=0.01)
