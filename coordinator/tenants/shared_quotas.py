"""Token buckets that all coordinators share, in Redis."""

from __future__ import annotations

import asyncio

import structlog

from specdec.coordinator.tasks import end_tasks
from specdec.coordinator.tenants.quotas import QuotaRate, TokenQuotas, quota_exceeded
from specdec.store.guarded import GuardedStore
from specdec.store.interface import StoreError, StoreUnavailable

_INTERVAL_S = 0.05
"""How much later the others know what was used; each tenant that uses tokens costs one operation of the store."""
_log = structlog.get_logger(__name__)


class SharedQuotas:
    """Quotas over all coordinators of a Redis; while it is away, over this one.

    What is used is counted here too, so that a tenant does not find a full bucket when Redis goes away. What is used
    while it is away is not made up for afterwards: the shared buckets fill meanwhile, as if nothing had been used.
    """

    def __init__(self, store: GuardedStore) -> None:
        self._store = store
        self._local = TokenQuotas()
        self._used: dict[str, tuple[QuotaRate, int]] = {}
        self._has_used = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._asking: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begin to tell the store what is used."""
        self._tasks = [asyncio.create_task(self._run(), name="shared-quotas")]

    async def close(self) -> None:
        """Stop, after the store was told the last."""
        await end_tasks(self._tasks)
        if self._asking:
            await asyncio.wait(self._asking)
        await self._tell()

    async def admit(self, tenant: str, rate: QuotaRate, num_tokens: int) -> None:
        """Take a prompt's tokens if there is one at least, even more than are there. Cost: two round trips.

        Whoever cancels this has taken nothing in the end.

        Raises:
            Overloaded: the bucket is empty (QUOTA_EXCEEDED).
        """
        # Not cancelled under way: nobody would know what the store has taken by then.
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
        # Each tenant once: one that uses tokens all the while must not keep the others waiting. And one by one: what is
        # not told when this is cancelled, `close` tells.
        for tenant in list(self._used):
            rate, num_tokens = self._used.pop(tenant)
            await self._take(tenant, rate, num_tokens)

    async def _take(self, tenant: str, rate: QuotaRate, num_tokens: int) -> None:
        # Not tried again when it fails: it may have taken effect.
        if num_tokens and self._store.is_up:
            try:
                await self._store.take_tokens(tenant, num_tokens, rate.tokens_per_s, rate.burst_tokens, force=True)
            except StoreUnavailable:
                pass
            except StoreError as error:  # of this tenant's rate; the others' tokens are still to be told
                _log.error("quota_not_counted", tenant=tenant, reason=str(error))
