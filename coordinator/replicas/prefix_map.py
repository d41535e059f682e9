"""What coordinators tell each other, through the store, about who caches which prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import structlog

from specdec.store.interface import Store, StoreError, StoreUnavailable

_FLUSH_S = 0.1
"""What many requests have in common is told once in so long; a conversation's next turn comes later."""
_MAX_QUEUED = 16_384
"""What gathers while the store does not answer is of little use later."""
_MAX_BATCH = 256
"""Each is a command of its own to the store, which serves nobody else while it runs them."""
_DEPTH_BITS = 4
"""Of a depth's bits as many count: to 16 each block is shared, to 32 every second one, to 64 every fourth, ..."""
_log = structlog.get_logger(__name__)


class SharedPrefixes:
    """Reads the prefix map of all coordinators, and adds to it in the background.

    A block's digest covers all tokens before it, so the deepest known one tells the length of a prefix. Only blocks at
    certain depths are shared, the same for all prompts: a prompt of 100,000 tokens costs 76 keys in place of 3125, and
    a prefix's length is known to an eighth.

    A holder is named by its instance, not its address: a replica that was restarted has an empty cache, whatever is
    remembered of its former self, and coordinators may reach one replica under different addresses.
    """

    def __init__(self, store: Store, ttl_s: float) -> None:
        """Use a store. What is added is remembered for `ttl_s` seconds."""
        self._store = store
        self._ttl_s = ttl_s
        self._queued: dict[tuple[str, bytes], None] = {}
        self._has_queued = asyncio.Event()

    async def lengths(self, digests: Sequence[bytes]) -> dict[str, int]:
        """Return how many blocks each holder is known to cache, of a prompt's chain of digests.

        One round trip. Nothing is known while the store is down.
        """
        depths = list(_shared_depths(len(digests)))
        try:
            holders = await self._store.prefix_holders([digests[depth - 1] for depth in depths])
        except StoreUnavailable:
            return {}
        return {holder: depth for depth, names in zip(depths, holders, strict=True) for holder in names}

    def add(self, holder: str, digests: Sequence[bytes]) -> None:
        """Tell the others that a holder caches a chain of blocks: soon, or not at all when too much is queued."""
        for depth in _shared_depths(len(digests)):
            if len(self._queued) >= _MAX_QUEUED:
                return
            self._queued[holder, digests[depth - 1]] = None
        if self._queued:
            self._has_queued.set()

    async def run(self) -> None:
        """Write what is queued, in batches, until cancelled."""
        while True:
            await self._has_queued.wait()
            await asyncio.sleep(_FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Write what is queued. It is dropped when the store is down: nothing depends on it."""
        queued, self._queued = self._queued, {}
        self._has_queued.clear()
        by_holder: dict[str, list[bytes]] = {}
        for holder, digest in queued:
            by_holder.setdefault(holder, []).append(digest)
        for holder, digests in by_holder.items():
            for start in range(0, len(digests), _MAX_BATCH):
                try:
                    await self._store.add_prefixes(holder, digests[start : start + _MAX_BATCH], self._ttl_s)
                except StoreUnavailable:
                    return
                except StoreError as error:
                    _log.error("prefixes_refused", holder=holder, reason=str(error))


def _shared_depths(num_blocks: int) -> Iterator[int]:
    """The depths, counted from 1, at which blocks are shared."""
    depth = 1
    while depth <= num_blocks:
        yield depth
        depth += 1 << max(0, depth.bit_length() - _DEPTH_BITS)
