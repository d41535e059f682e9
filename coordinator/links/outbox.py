"""Entries on their way to a replica."""

from __future__ import annotations

import asyncio
from typing import Any

_MAX_FRAME_BYTES = 4 * 2**20
_MAX_QUEUED_ENTRIES = 16_384


class Outbox:
    """A queue with one reader. What is queued within one turn of the event loop is taken at once, for one frame."""

    def __init__(self) -> None:
        self._entries: list[Any] = []
        self._wake: asyncio.Future[None] | None = None

    def put(self, entry: Any) -> bool:
        """Queue an entry; False when so many are queued that the reader must be stuck."""
        self._entries.append(entry)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
        return len(self._entries) <= _MAX_QUEUED_ENTRIES

    def clear(self) -> None:
        """Forget what is queued."""
        self._entries.clear()

    async def take(self) -> list[Any]:
        """Wait for entries; return those of the next frame, which is bounded unless one entry alone is larger."""
        while not self._entries:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        entries, self._entries = self._entries, []
        if len(entries) == 1:
            return entries
        size = 0
        for index, entry in enumerate(entries):
            size += entry.ByteSize()
            if size > _MAX_FRAME_BYTES and index > 0:
                self._entries = entries[index:]
                return entries[:index]
        return entries
