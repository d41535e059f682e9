"""Token buckets that all coordinators share, in Redis."""

from __future__ import annotations

import asyncio

import structlog

from specdec.coordinator.tasks import end_tasks
from specdec.coordinator.tenants.quotas import QuotaRate, TokenQuotas, quota_exceeded
from specdec.store.guarded import GuardedStore
from specdec.store.interface import StoreError, StoreUnavailable

_INTERVAL_S = 0.05
"""Seconds between reports of used tokens; a report is one store operation per active tenant."""
_log = structlog.get_logger(__name__)


class SharedQuotas:
    """Quotas over all coordinators of one Redis; over this coordinator alone while Redis is away.

    Used tokens are counted here too, so that a tenant does not find a full bucket when Redis goes away. Tokens used
    while it is away are not reported afterwards: the shared buckets fill meanwhile.
    """

    def __init__(self, store: GuardedStore) -> None:
        self._store = store
        self._local = TokenQuotas()
        self._used: dict[str, tuple[QuotaRate, int]] = {}
        self._has_used = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._asking: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start to report used tokens."""
        self._tasks = [asyncio.create_task(self._run(), name="shared-quotas")]

    async def close(self) -> None:
        """Stop, after a last report."""
        await end_tasks(self._tasks)
        if self._asking:
            await asyncio.wait(self._asking)
        await self._tell()

    async def admit(self, tenant: str, rate: QuotaRate, num_tokens: int) -> None:
        """Take a prompt's tokens if the bucket has one at least, into debt if need be. Cost: two round trips.

        If the caller is cancelled, the tokens are given back.

        Raises:
            Overloaded: the bucket is empty (QUOTA_EXCEEDED).
        """
        # Shielded: after a cancellation under way nobody would know whether the store took the tokens.
        asked = asyncio.create_task(self._admit(tenant, rate, num_tokens), name="quota")
        self._asking.add(asked)
        asked.add_done_callback(self._asking.discard)
        try:
            await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(lambda task: self._give_back(task, tenant, rate, num_tokens))
            raise

    async def _admit(self, tenant: str, rate: QuotaRate, num_tokens: int) -> None:
        if not self._store.is_up:
            await self._local.admit(tenant, rate, num_tokens)
            return
        try:
            wait_s = await self._store.take_tokens(tenant, 1, rate.tokens_per_s, rate.burst_tokens)
        except StoreUnavailable:
            await self._local.admit(tenant, rate, num_tokens)
            return
        if wait_s > 0:
            raise quota_exceeded(rate, wait_s)
        self._local.charge(tenant, rate, num_tokens)
        await self._take(tenant, rate, num_tokens - 1)

    def charge(self, tenant: str, rate: QuotaRate, num_tokens: int) -> None:
        """Take tokens, into debt if need be; a negative number gives tokens back. Never waits."""
        self._local.charge(tenant, rate, num_tokens)
        _, used = self._used.get(tenant, (rate, 0))
        self._used[tenant] = (rate, used + num_tokens)
        self._has_used.set()

    def _give_back(self, asked: asyncio.Task[None], tenant: str, rate: QuotaRate, num_tokens: int) -> None:
        if not asked.cancelled() and asked.exception() is None:
            self.charge(tenant, rate, -num_tokens)

    async def _run(self) -> None:
        while True:
            await self._has_used.wait()
            await asyncio.sleep(_INTERVAL_S)
            await self._tell()

    async def _tell(self) -> None:
        self._has_used.clear()
        # Each tenant once: one that uses tokens all the while must not delay the others. One by one: `close` reports
        # the rest when this is cancelled.
        for tenant in list(self._used):
            rate, num_tokens = self._used.pop(tenant)
            await self._take(tenant, rate, num_tokens)

    async def _take(self, tenant: str, rate: QuotaRate, num_tokens: int) -> None:
        # No retry: a failed call may have taken effect.
        if num_tokens and self._store.is_up:
            try:
                await self._store.take_tokens(tenant, num_tokens, rate.tokens_per_s, rate.burst_tokens, force=True)
            except StoreUnavailable:
                pass
            except StoreError as error:  # a fault of this tenant's rate; the others are still to be reported
                _log.error("quota_not_counted", tenant=tenant, reason=str(error))
