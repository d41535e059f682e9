"""A store in memory that can go away, and keeps what it has meanwhile."""

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
    """Keeps what it has while it is away."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = False
        self.answers = asyncio.Event()
        """Whether those who take tokens get an answer."""
        self.answers.set()
        self.num_asked = 0
        """For tokens."""
        self.batches: list[int] = []
        """Tokens of each append."""
        self.num_leases: list[int] = []
        """Of each renewal."""
        self.may_begin: dict[str, asyncio.Event] = {}
        """By owner: begins when this is set."""
        self.begun: list[str] = []
        """Owners, in the order in which the store heard of them."""

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
        """What is in the store; calling it brings that back."""
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
