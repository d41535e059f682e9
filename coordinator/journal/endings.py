"""The ends of requests on their way to the store."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine

from specdec.store.guarded import GuardedStore
from specdec.store.interface import Lease, RequestKey, StoreUnavailable

_MAX_UNHEARD = 1024
"""Of those that do not fit, the leases run out."""


class Endings:
    """Tells the store which requests have ended, whoever is cancelled meanwhile. Use it from one event loop."""

    def __init__(self, store: GuardedStore, keep_s: float, on_unheard: Callable[[], None]) -> None:
        """`keep_s` is how long records are kept; `on_unheard` is called when `tell_again` has something to do."""
        self._store = store
        self._keep_s = keep_s
        self._on_unheard = on_unheard
        self._running: dict[asyncio.Task[None], RequestKey] = {}
        self._unheard: deque[Lease] = deque(maxlen=_MAX_UNHEARD)
        """Ends that the store did not hear of."""

    def start(self, key: RequestKey, ending: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run what ends a request, as a task of its own."""
        task = asyncio.create_task(ending, name="journal-end")
        self._running[task] = key
        task.add_done_callback(self._running.pop)
        return task

    async def wait(self, tenant: str) -> None:
        """Return when those of a tenant that are under way now have ended."""
        if running := [task for task, key in self._running.items() if key.tenant == tenant]:
            await asyncio.wait(running)

    async def close(self) -> None:
        """Return when none is under way."""
        while self._running:
            await asyncio.wait(list(self._running))

    async def tell(self, lease: Lease) -> None:
        """Tell the store that a request has ended; if it does not hear, `tell_again` does so later."""
        try:
            await self._tell(lease)
        except StoreUnavailable:
            self._unheard.append(lease)
            self._on_unheard()

    async def tell_again(self) -> None:
        """Tell the store what it did not hear. Raises StoreUnavailable."""
        for _ in range(len(self._unheard)):
            lease = self._unheard.popleft()
            try:
                await self._tell(lease)
            except StoreUnavailable:
                self._unheard.append(lease)  # it may be this record that cannot be read: the others come first now
                raise

    async def _tell(self, lease: Lease) -> None:
        await self._store.end(lease.key, lease.owner_id, lease.generation, self._keep_s)
