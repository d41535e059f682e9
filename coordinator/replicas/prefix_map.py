"""The prefix map that coordinators share through the store: which replica caches which prefix."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import structlog

from specdec.store.interface import Store, StoreError, StoreUnavailable

_FLUSH_S = 0.1
"""Seconds between two writes: common prefixes are written once; a conversation's next turn comes later."""
_MAX_QUEUED = 16_384
"""Blocks queued, at most: what gathers while the store is away is of little use later."""
_MAX_BATCH = 256
"""Blocks per write: each is a command, and the store serves nobody else meanwhile."""
_DEPTH_BITS = 4
"""Leading bits of a depth that count: up to depth 16 every block is shared, up to 32 every second, and so on."""
_log = structlog.get_logger(__name__)


class SharedPrefixes:
    """Reads the prefix map of all coordinators, and adds to it in the background.

    A block's digest covers all tokens before it, so the deepest known one gives the length of a prefix. Only blocks at
    certain depths are shared, equal for all prompts: a prompt of 100,000 tokens costs 76 keys instead of 3125, and a
    prefix's length is known to an eighth.

    Holders are named by instance, not address: a restarted replica has an empty cache, and coordinators may reach one
    replica under different addresses.
    """

    def __init__(self, store: Store, ttl_s: float) -> None:
        """`ttl_s`: seconds that the store keeps an added block."""
        self._store = store
        self._ttl_s = ttl_s
        self._queued: dict[tuple[str, bytes], None] = {}
        self._has_queued = asyncio.Event()

    async def lengths(self, digests: Sequence[bytes]) -> dict[str, int]:
        """Blocks that each holder caches of a prompt's chain of digests.

        Cost: one round trip. Empty while the store is down.
        """
        depths = list(_shared_depths(len(digests)))
        try:
            holders = await self._store.prefix_holders([digests[depth - 1] for depth in depths])
        except StoreUnavailable:
            return {}
        return {holder: depth for depth, names in zip(depths, holders, strict=True) for holder in names}

    def add(self, holder: str, digests: Sequence[bytes]) -> None:
        """Share that a holder caches a chain of blocks; dropped if too much is queued."""
        for depth in _shared_depths(len(digests)):
            if len(self._queued) >= _MAX_QUEUED:
                return
            self._queued[holder, digests[depth - 1]] = None
        if self._queued:
            self._has_queued.set()

    async def run(self) -> None:
        """Write queued blocks, in batches, until cancelled."""
        while True:
            await self._has_queued.wait()
            await asyncio.sleep(_FLUSH_S)
            await self.flush()

    async def flush(self) -> None:
        """Write queued blocks; they are dropped while the store is down."""
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
