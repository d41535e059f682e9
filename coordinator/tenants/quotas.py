"""Limits of one tenant: concurrent requests, and tokens per second.

Counts and buckets belong to this process. `shared_quotas.py` and the journal have those shared by all coordinators.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from specdec.wire.errors import Overloaded, RequestExists

CONCURRENCY_RETRY_S = 1.0
"""Seconds before a refused client's retry: the end of the tenant's requests is unknown, and a retry is cheap."""
_BURST_S = 10.0
"""Seconds of its rate that an idle tenant saves up, unless its burst is set."""
_LEAST_SWEEP_BUCKETS = 1024
"""Buckets below which full ones are not removed: they take some hundred KiB."""
_MOST_BUCKETS = 65_536
"""Buckets kept, the emptiest first, when twice as many have debts."""


@dataclass(frozen=True, slots=True)
class QuotaRate:
    """A token bucket's refill and size, in tokens per second and tokens."""

    tokens_per_s: float
    burst_tokens: float

    @classmethod
    def of(cls, tokens_per_s: float | None, burst_tokens: float | None) -> QuotaRate | None:
        """The rate of two settings; None without a rate. Default burst: ten seconds of the rate."""
        if tokens_per_s is None:
            return None
        return cls(tokens_per_s, max(1.0, tokens_per_s * _BURST_S) if burst_tokens is None else burst_tokens)


@dataclass(frozen=True, slots=True)
class Allowance:
    """Limits of a caller; None: only the limits of the model and the deployment."""

    max_prompt_tokens: int | None = None
    max_tokens: int | None = None
    max_concurrent_requests: int | None = None
    quota: QuotaRate | None = None
    weight: float = 1.0
    """The tenant's share when tenants compete for places, relative to others' weights."""


@dataclass(slots=True)
class _Bucket:
    level: float
    at_s: float
    rate: QuotaRate

    def refill(self, rate: QuotaRate, now_s: float) -> None:
        self.level = min(rate.burst_tokens, self.level + (now_s - self.at_s) * rate.tokens_per_s)
        self.at_s, self.rate = now_s, rate

    @property
    def fullness(self) -> float:
        """Fraction of the burst that is left; below 0 in debt."""
        return self.level / self.rate.burst_tokens


class Quotas(Protocol):
    """Token buckets of tenants."""

    async def admit(self, tenant: str, rate: QuotaRate, num_tokens: int) -> None:
        """Take a prompt's tokens if the level is positive, into debt if need be. Raises Overloaded."""

    def charge(self, tenant: str, rate: QuotaRate, num_tokens: int) -> None:
        """Take tokens, into debt if need be; a negative number gives tokens back. Never waits."""


class TokenQuotas:
    """A token bucket per tenant, in memory. Full buckets are removed, as new ones are full."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}
        self._sweep_at = _LEAST_SWEEP_BUCKETS

    async def admit(self, tenant: str, rate: QuotaRate, num_tokens: int) -> None:
        """Take a prompt's tokens if the level is positive, into debt if need be.

        Raises:
            Overloaded: the level is not positive (QUOTA_EXCEEDED). A retry after its delay succeeds, unless running
                requests use more tokens meanwhile.
        """
        bucket = self._refilled(tenant, rate)
        if bucket.level <= 0:
            raise quota_exceeded(rate, (1 - bucket.level) / rate.tokens_per_s)
        bucket.level -= num_tokens

    def charge(self, tenant: str, rate: QuotaRate, num_tokens: int) -> None:
        """Take tokens, into debt if need be; a negative number gives tokens back."""
        bucket = self._refilled(tenant, rate)
        bucket.level = min(rate.burst_tokens, bucket.level - num_tokens)

    def _refilled(self, tenant: str, rate: QuotaRate) -> _Bucket:
        now_s = self._clock()
        bucket = self._buckets.get(tenant)
        if bucket is None:
            self._sweep(now_s)
            bucket = self._buckets[tenant] = _Bucket(rate.burst_tokens, now_s, rate)
        bucket.refill(rate, now_s)
        return bucket

    def _sweep(self, now_s: float) -> None:
        # Without API keys clients name their tenants, so their number is unbounded.
        if len(self._buckets) < self._sweep_at:
            return
        for bucket in self._buckets.values():
            bucket.refill(bucket.rate, now_s)
        self._buckets = {t: b for t, b in self._buckets.items() if b.level < b.rate.burst_tokens}
        if len(self._buckets) > _MOST_BUCKETS:
            kept = heapq.nsmallest(_MOST_BUCKETS, self._buckets.items(), key=lambda entry: entry[1].fullness)
            self._buckets = dict(kept)
        self._sweep_at = max(_LEAST_SWEEP_BUCKETS, 2 * len(self._buckets))


def quota_exceeded(rate: QuotaRate, wait_s: float) -> Overloaded:
    """The refusal of a request whose tenant has no token left, and will have one in `wait_s` seconds."""
    return Overloaded(
        f"the tenant's quota of {rate.tokens_per_s:g} tokens per second is used up",
        # RetryInfo has whole milliseconds: rounded up, so that no retry is too early.
        retry_after_s=math.ceil(wait_s * 1000) / 1000,
        reason="QUOTA_EXCEEDED",
    )


@dataclass(slots=True, eq=False)
class TenantLease:
    """One request's share of its tenant's allowance, while it waits and runs."""

    tenant: str
    rate: QuotaRate | None
    _quotas: Quotas = field(repr=False)
    _on_refused: Callable[[str], None] = field(repr=False)
    num_prompt_tokens: int = 0
    _has_begun: bool = False

    async def take_prompt(self, num_tokens: int) -> None:
        """Take the prompt's tokens from the tenant's quota.

        Raises:
            Overloaded: QUOTA_EXCEEDED; nothing is charged.
        """
        if self.rate is not None:
            try:
                await self._quotas.admit(self.tenant, self.rate, num_tokens)
            except Overloaded:
                self._on_refused("quota")
                raise
            self.num_prompt_tokens = num_tokens

    def begin(self) -> None:
        """The request was admitted and computes: the prompt's tokens are spent."""
        self._has_begun = True

    def charge(self, num_tokens: int) -> None:
        """Charge streamed output tokens."""
        if self.rate is not None:
            self._quotas.charge(self.tenant, self.rate, num_tokens)

    def close(self) -> None:
        """Give back the prompt's tokens of a request that never began."""
        if self.rate is not None and not self._has_begun:
            self._quotas.charge(self.tenant, self.rate, -self.num_prompt_tokens)


class TenantLimits:
    """Concurrency limits and token quotas of all tenants."""

    def __init__(self, quotas: Quotas, on_refused: Callable[[str], None] = lambda cause: None) -> None:
        """`on_refused` is called with `concurrency` or `quota` for each refused request."""
        self._quotas = quotas
        self._on_refused = on_refused
        self._running: dict[str, dict[str, int]] = {}
        """Number of streams of each request, by tenant and request id."""

    @contextmanager
    def lease(
        self, tenant: str, request_id: str, allowance: Allowance, *, is_resume: bool = False
    ) -> Iterator[TenantLease]:
        """Hold one of the tenant's places for concurrent requests. A resume shares the place of the running request.

        Raises:
            RequestExists: a request with this id is running, and this is no resume.
            Overloaded: the tenant has no place left (TOO_MANY_REQUESTS_OF_TENANT).
        """
        running = self._running.setdefault(tenant, {})
        most = allowance.max_concurrent_requests
        if most is not None and len(running) >= most and request_id not in running:
            raise self.refusal(len(running), most)
        if request_id in running and not is_resume:
            raise RequestExists(f"a request with request_id {request_id!r} is running")
        running[request_id] = running.get(request_id, 0) + 1
        lease = TenantLease(tenant, allowance.quota, self._quotas, self._on_refused)
        try:
            yield lease
        finally:
            lease.close()
            running[request_id] -= 1
            if not running[request_id]:
                del running[request_id]
            if not running and self._running.get(tenant) is running:
                del self._running[tenant]

    def refusal(self, num_running: int, most: int | None) -> Overloaded:
        """Count and return the refusal of a request above its tenant's concurrency limit."""
        self._on_refused("concurrency")
        return Overloaded(
            f"{num_running} requests of the tenant run or wait; its max_concurrent_requests is {most}",
            retry_after_s=CONCURRENCY_RETRY_S,
            reason="TOO_MANY_REQUESTS_OF_TENANT",
        )
