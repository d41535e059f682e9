"""Entries on their way to a replica."""

from __future__ import annotations

import asyncio
from typing import Generic

from coordinator.links.wire import EntryT

_MAX_FRAME_BYTES = 4 * 2**20
"""A quarter of what replicas receive by default: what is urgent waits behind one frame of openings at most."""
_MAX_QUEUED_ENTRIES = 16_384
"""Some turns' worth for thousands of sessions: a replica that reads never lets as many gather."""
_MAX_QUEUED_BYTES = 256 * 2**20
"""Thousands of openings with all their tokens, as after a break; more is memory for nobody."""


class Outbox(Generic[EntryT]):
    """A queue with one reader. What is queued within one turn of the event loop is taken at once, for one frame."""

    def __init__(self) -> None:
        self.has_ended = False
        self._entries: list[tuple[EntryT, int]] = []
        """With their sizes in bytes."""
        self._num_bytes = 0
        self._wake: asyncio.Future[None] | None = None

    def put(self, entry: EntryT) -> bool:
        """Queue an entry; False when so much is queued that the reader must be stuck."""
        size = entry.ByteSize()
        self._entries.append((entry, size))
        self._num_bytes += size
        self._wake_reader()
        return len(self._entries) <= _MAX_QUEUED_ENTRIES and self._num_bytes <= _MAX_QUEUED_BYTES

    def clear(self) -> None:
        """Forget what is queued."""
        self._entries.clear()
        self._num_bytes = 0

    def end(self) -> None:
        """Nothing comes after what is queued."""
        self.has_ended = True
        self._wake_reader()

    async def take(self) -> list[EntryT]:
        """Wait for entries; return those of the next frame, which is bounded unless one entry alone is larger.

        Returns none at the end.
        """
        while not self._entries and not self.has_ended:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        num, size = 0, 0
        for _, entry_bytes in self._entries:
            if num > 0 and size + entry_bytes > _MAX_FRAME_BYTES:
                break
            num, size = num + 1, size + entry_bytes
        taken, self._entries = self._entries[:num], self._entries[num:]
        self._num_bytes -= size
        return [entry for entry, _ in taken]

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
