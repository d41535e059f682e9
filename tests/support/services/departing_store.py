"""A store in memory that tests make unavailable, with its contents kept."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence

from specdec.store.guarded import GuardedStore
from specdec.store.interface import (
    Appended,
    BegunRequest,
    JournalWrite,
    Lease,
    NewRequest,
    RequestKey,
    StoreUnavailable,
)
from specdec.store.memory import MemoryStore
from specdec.wire.backoff import Backoff


class DepartingStore(MemoryStore):
    """Raises StoreUnavailable while `is_away`, and keeps its contents."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.answers = asyncio.Event()
        """Set while `take_tokens` returns; cleared, its callers wait."""
        self.answers.set()
        self.num_asked = 0
        """Calls of `take_tokens`."""
        self.batches: list[int] = []
        """Number of tokens of each append."""
        self.num_leases: list[int] = []
        """Number of leases of each renewal."""
        self.may_begin: dict[str, asyncio.Event] = {}
        """Event that an owner's `begin` waits for, by owner."""
        self.begun: list[str] = []
        """Owners, in the order of their `begin`."""

    async def begin(self, key: RequestKey, request: NewRequest) -> BegunRequest:
        self._check()
        if (may_begin := self.may_begin.get(request.owner_id)) is not None:
            await may_begin.wait()
        self.begun.append(request.owner_id)
        return await super().begin(key, request)

    async def append(self, writes: Sequence[JournalWrite]) -> list[Appended]:
        self._check()
        self.batches.append(sum(len(write.token_ids) for write in writes))
        return await super().append(writes)

    async def renew(self, leases: Sequence[Lease]) -> list[bool]:
        self._check()
        self.num_leases.append(len(leases))
        return await super().renew(leases)

    def snapshot(self) -> Callable[[], None]:
        """Copy the store's contents; returns a function that restores them."""
        kept = copy.deepcopy(self._state)

        def restore() -> None:
            self._state = kept

        return restore

    async def end(self, key: RequestKey, owner_id: str, generation: int, keep_s: float) -> bool:
        self._check()
        return await super().end(key, owner_id, generation, keep_s)

    async def take_tokens(
        self, bucket: str, amount: float, rate_per_s: float, burst: float, force: bool = False
    ) -> float:
        self._check()
        self.num_asked += 1
        await self.answers.wait()
        return await super().take_tokens(bucket, amount, rate_per_s, burst, force)

    async def ping(self) -> None:
        self._check()

    def _check(self) -> None:
        if self.is_away:
            raise StoreUnavailable("away")


def guarded(store: DepartingStore) -> GuardedStore:
    return GuardedStore(store, backoff=Backoff(first_s=0.001, longest_s=0.01))
