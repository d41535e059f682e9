"""What coordinators tell each other of the tokens that tenants use."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from specdec.coordinator.tenants.quotas import QuotaRate
from specdec.coordinator.tenants.shared_quotas import SharedQuotas
from specdec.store.guarded import GuardedStore
from specdec.store.interface import StoreUnavailable
from specdec.store.memory import MemoryStore
from specdec.wire.errors import Overloaded
from tests.support.services.departing_store import DepartingStore, guarded
from tests.support.services.faults import eventually

RATE = QuotaRate(tokens_per_s=1e-6, burst_tokens=1000.0)
SLOW_RATE = QuotaRate(tokens_per_s=0.001, burst_tokens=100.0)
PATIENCE_S = 20.0


class StoreUnderLoad(MemoryStore):
    """While it takes tokens of a busy tenant, that tenant uses more."""

    def __init__(self) -> None:
        super().__init__()
        self.quotas: SharedQuotas | None = None
        self.taken: list[tuple[str, float]] = []
        self.has_taken_of_quiet = asyncio.Event()

    async def take_tokens(
        self, bucket: str, amount: float, rate_per_s: float, burst: float, force: bool = False
    ) -> float:
        await asyncio.sleep(0)
        self.taken.append((bucket, amount))
        if bucket == "busy" and self.quotas is not None:
            self.quotas.charge("busy", RATE, 1)
        if bucket == "quiet":
            self.has_taken_of_quiet.set()
        return await super().take_tokens(bucket, amount, rate_per_s, burst, force)

    def num_taken(self, tenant: str) -> int:
        return sum(bucket == tenant for bucket, _ in self.taken)


async def test_a_tenant_that_uses_tokens_all_the_while_does_not_keep_others_from_being_counted() -> None:
    store = StoreUnderLoad()
    quotas = store.quotas = SharedQuotas(GuardedStore(store))
    quotas.start()
    quotas.charge("quiet", RATE, 7)
    quotas.charge("busy", RATE, 1)
    async with asyncio.timeout(PATIENCE_S):
        await store.has_taken_of_quiet.wait()
    assert ("quiet", 7) in store.taken
    assert store.num_taken("busy") <= 2  # an operation each time the store is told, not one after the other
    store.quotas = None
    await quotas.close()
    assert sum(amount for bucket, amount in store.taken if bucket == "busy") == store.num_taken("busy")


@pytest.mark.parametrize("num_answers", [0, 1])
async def test_a_client_that_leaves_while_its_prompt_is_charged_gets_it_back(num_answers: int) -> None:
    store = StoreThatHesitates(num_answers)
    quotas = SharedQuotas(GuardedStore(store))
    admission = asyncio.create_task(quotas.admit("a", RATE, 600))
    await store.is_asked.wait()
    admission.cancel()
    with pytest.raises(asyncio.CancelledError):
        await admission
    store.may_answer.set()
    await quotas.close()
    assert await store.take_tokens("a", RATE.burst_tokens, RATE.tokens_per_s, RATE.burst_tokens) == 0, "a full bucket"


class StoreThatHesitates(MemoryStore):
    """Takes so many operations' tokens at once, and those of the next when it may."""

    def __init__(self, num_answers: int) -> None:
        super().__init__()
        self._num_left = num_answers
        self.is_asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def take_tokens(
        self, bucket: str, amount: float, rate_per_s: float, burst: float, force: bool = False
    ) -> float:
        wait_s = await super().take_tokens(bucket, amount, rate_per_s, burst, force)
        self._num_left -= 1
        if self._num_left < 0:
            self.is_asked.set()
            await self.may_answer.wait()
        return wait_s


async def test_tokens_are_counted_over_coordinators_and_given_back(store: DepartingStore) -> None:
    one, two = SharedQuotas(guarded(store)), SharedQuotas(guarded(store))
    await one.admit("a", SLOW_RATE, 60)
    await two.admit("a", SLOW_RATE, 40)
    for quotas in (one, two):
        with pytest.raises(Overloaded) as caught:
            await quotas.admit("a", SLOW_RATE, 1)
        assert caught.value.reason == "QUOTA_EXCEEDED"
        assert caught.value.retry_after_s == pytest.approx(1000, abs=1)
    two.charge("a", SLOW_RATE, -40)
    await two.close()
    await one.admit("a", SLOW_RATE, 39)
    await one.admit("b", SLOW_RATE, 100)


async def test_what_is_used_up_to_the_end_is_counted_for_all_tenants(store: DepartingStore) -> None:
    quotas = SharedQuotas(guarded(store))
    quotas.start()
    for tenant in ("a", "b", "c"):
        quotas.charge(tenant, SLOW_RATE, 100)
    store.answers.clear()

    async def is_asked() -> bool:
        return store.num_asked == 1

    await eventually(is_asked, "the store is told of the first")
    closing = asyncio.create_task(quotas.close())

    async def is_asked_again() -> bool:
        return store.num_asked == 2

    await eventually(is_asked_again, "the task has ended, and the rest is told")
    store.answers.set()
    await closing
    # What was under way may or may not have taken effect.
    empty = [tenant for tenant in ("a", "b", "c") if await store.take_tokens(tenant, 1, 0.001, 100.0) > 0]
    assert len(empty) == 2


async def test_while_the_store_is_away_each_counts_for_itself_and_that_is_forgotten_when_it_is_back(
    store: DepartingStore, shared: GuardedStore
) -> None:
    quotas = SharedQuotas(shared)
    await quotas.admit("a", SLOW_RATE, 60)
    store.is_away = True
    await quotas.admit("a", SLOW_RATE, 30)
    quotas.charge("a", SLOW_RATE, 20)
    with pytest.raises(Overloaded):
        await quotas.admit("a", SLOW_RATE, 1)
    store.is_away = False

    async def is_back() -> bool:
        with contextlib.suppress(StoreUnavailable):
            await shared.ping()
        return shared.is_up

    await eventually(is_back, "the store is back")
    await quotas.admit("a", SLOW_RATE, 40)
    with pytest.raises(Overloaded):
        await quotas.admit("a", SLOW_RATE, 1)


async def test_what_of_one_tenant_cannot_be_counted_does_not_keep_the_others_from_it(store: DepartingStore) -> None:
    quotas = SharedQuotas(guarded(store))
    quotas.start()
    quotas.charge("b", SLOW_RATE, 100)
    quotas.charge("a", QuotaRate(tokens_per_s=float("inf"), burst_tokens=100.0), 100)

    async def is_counted() -> bool:
        return await store.take_tokens("b", 1, 0.001, 100.0) > 0

    await eventually(is_counted, "the tokens of b are counted")
    await quotas.close()
