"""Token buckets and places of tenants, on a clock that the test turns."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from specdec.coordinator.tenants import quotas as quotas_module
from specdec.coordinator.tenants.quotas import Allowance, QuotaRate, TenantLimits, TokenQuotas
from specdec.wire.errors import Overloaded, RequestExists

RATE = QuotaRate(tokens_per_s=10.0, burst_tokens=100.0)


class Clock:
    """Stands still unless it is turned."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_bucket_starts_full_and_admits_into_debt() -> None:
    quotas = TokenQuotas(Clock())
    await quotas.admit("a", RATE, 99)
    await quotas.admit("a", RATE, 500)
    with pytest.raises(Overloaded) as caught:
        await quotas.admit("a", RATE, 1)
    assert caught.value.reason == "QUOTA_EXCEEDED"
    assert caught.value.retry_after_s == pytest.approx((499 + 1) / 10)


async def test_the_delay_told_is_enough_and_a_shorter_one_is_not() -> None:
    clock = Clock()
    quotas = TokenQuotas(clock)
    await quotas.admit("a", RATE, 100)
    quotas.charge("a", RATE, 7)
    with pytest.raises(Overloaded) as caught:
        await quotas.admit("a", RATE, 1)
    clock.now_s += caught.value.retry_after_s / 2
    with pytest.raises(Overloaded):
        await quotas.admit("a", RATE, 1)
    clock.now_s += caught.value.retry_after_s / 2
    await quotas.admit("a", RATE, 1)


async def test_a_bucket_never_holds_more_than_its_burst() -> None:
    clock = Clock()
    quotas = TokenQuotas(clock)
    await quotas.admit("a", RATE, 1)
    clock.now_s += 1e6
    quotas.charge("a", RATE, -50)
    await quotas.admit("a", RATE, 100)
    with pytest.raises(Overloaded):
        await quotas.admit("a", RATE, 1)


async def test_tenants_do_not_share_a_bucket() -> None:
    quotas = TokenQuotas(Clock())
    await quotas.admit("a", RATE, 1000)
    await quotas.admit("b", RATE, 1000)


async def test_a_smaller_burst_holds_at_once() -> None:
    quotas = TokenQuotas(Clock())
    await quotas.admit("a", RATE, 1)
    smaller = QuotaRate(10.0, 5.0)
    await quotas.admit("a", smaller, 5)
    with pytest.raises(Overloaded):
        await quotas.admit("a", smaller, 1)


async def test_made_up_tenants_do_not_fill_the_memory() -> None:
    clock = Clock()
    quotas = TokenQuotas(clock)
    await quotas.admit("in debt", RATE, 10**9)
    for number in range(10_000):
        await quotas.admit(f"tenant {number}", RATE, 1)
        clock.now_s += 1.0
    assert len(quotas._buckets) < 2000
    with pytest.raises(Overloaded):
        await quotas.admit("in debt", RATE, 1)


async def test_made_up_tenants_in_debt_do_not_fill_it_either_and_the_deepest_debts_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas_module, "_MOST_BUCKETS", 1000)
    quotas = TokenQuotas(Clock())
    await quotas.admit("deep in debt", RATE, 10**9)
    for number in range(5000):
        await quotas.admit(f"tenant {number}", RATE, 200 + number)
        assert len(quotas._buckets) <= 2000
    for tenant in ("deep in debt", "tenant 4999"):
        with pytest.raises(Overloaded):
            await quotas.admit(tenant, RATE, 1)


def test_a_rate_without_a_burst_saves_up_ten_seconds() -> None:
    assert QuotaRate.of(20.0, None) == QuotaRate(20.0, 200.0)
    assert QuotaRate.of(0.01, None) == QuotaRate(0.01, 1.0)
    assert QuotaRate.of(None, None) is None


async def test_a_tenant_has_as_many_places_as_it_may_use_at_once() -> None:
    refused: list[str] = []
    limits = TenantLimits(TokenQuotas(Clock()), refused.append)
    allowance = Allowance(max_concurrent_requests=2)
    with ExitStack() as stack:
        for request_id in ("1", "2"):
            stack.enter_context(limits.lease("a", request_id, allowance))
        with pytest.raises(Overloaded) as caught:
            stack.enter_context(limits.lease("a", "3", allowance))
        assert (caught.value.reason, refused) == ("TOO_MANY_REQUESTS_OF_TENANT", ["concurrency"])
        assert caught.value.retry_after_s > 0
        stack.enter_context(limits.lease("b", "1", allowance))
    with limits.lease("a", "3", allowance), limits.lease("a", "4", allowance):
        pass


async def test_a_request_that_takes_over_its_own_takes_its_place_too() -> None:
    limits = TenantLimits(TokenQuotas(Clock()))
    allowance = Allowance(max_concurrent_requests=1)
    with ExitStack() as second:
        with limits.lease("a", "same", allowance):
            second.enter_context(limits.lease("a", "same", allowance, is_resume=True))
        with pytest.raises(Overloaded):
            second.enter_context(limits.lease("a", "other", allowance))
    with limits.lease("a", "other", allowance):
        pass


async def test_requests_cannot_share_a_place_by_having_one_id() -> None:
    limits = TenantLimits(TokenQuotas(Clock()))
    allowance = Allowance(max_concurrent_requests=1)
    with limits.lease("a", "same", allowance):
        with pytest.raises(RequestExists), limits.lease("a", "same", allowance):
            pass
        with pytest.raises(Overloaded), limits.lease("a", "other", allowance):
            pass


async def test_a_request_that_never_began_gets_its_prompt_back() -> None:
    limits = TenantLimits(TokenQuotas(Clock()))
    allowance = Allowance(quota=RATE)
    for _ in range(3):
        with limits.lease("a", "1", allowance) as lease:
            await lease.take_prompt(100)  # refused by a full queue, for example
    with limits.lease("a", "1", allowance) as lease:
        await lease.take_prompt(60)
        lease.begin()
        lease.charge(40)
    with pytest.raises(Overloaded), limits.lease("a", "1", allowance) as lease:
        await lease.take_prompt(1)


async def test_a_refusal_by_quota_is_counted_and_holds_no_place() -> None:
    refused: list[str] = []
    limits = TenantLimits(TokenQuotas(Clock()), refused.append)
    allowance = Allowance(max_concurrent_requests=1, quota=RATE)
    with limits.lease("a", "1", allowance) as lease:
        await lease.take_prompt(100)
        lease.begin()
    with pytest.raises(Overloaded), limits.lease("a", "2", allowance) as lease:
        await lease.take_prompt(1)
    assert refused == ["quota"]
    with limits.lease("a", "3", Allowance(max_concurrent_requests=1)):
        pass
