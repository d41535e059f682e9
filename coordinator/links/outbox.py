"""Entries on their way to a replica."""

from __future__ import annotations

import asyncio
from typing import Generic

from specdec.coordinator.links.wire import EntryT
from specdec.wire.message_sizes import MAX_STREAM_FRAME_BYTES, cut, frame_bytes, most_entry_bytes

_MAX_QUEUED_ENTRIES = 16_384
"""Entries in a queue above which its replica must be stuck: several turns of thousands of sessions."""
_MAX_QUEUED_BYTES = 256 * 2**20
"""Bytes in a queue, at most: thousands of openings with all their tokens, as after a break."""


class EntryTooLarge(Exception):
    """An entry exceeds the replica's message limit."""

    def __init__(self, num_bytes: int, most_bytes: int) -> None:
        super().__init__(f"an entry of {num_bytes} bytes exceeds the replica's limit of {most_bytes}")


class Outbox(Generic[EntryT]):
    """A queue with one reader, which takes the entries of one turn of the event loop together, for one frame."""

    def __init__(self) -> None:
        self.has_ended = False
        self._frame_bytes = MAX_STREAM_FRAME_BYTES
        self._most_entry_bytes = _MAX_QUEUED_BYTES
        self._entries: list[tuple[EntryT, int]] = []
        """Entries with their sizes in bytes."""
        self._num_bytes = 0
        self._wake: asyncio.Future[None] | None = None

    def limit(self, message_bytes: int) -> None:
        """Set the largest size of a frame, in bytes."""
        self._frame_bytes = frame_bytes(message_bytes)
        self._most_entry_bytes = most_entry_bytes(message_bytes)

    def put(self, entry: EntryT) -> bool:
        """Queue an entry; False if the queue is so long that the reader must be stuck. Raises EntryTooLarge."""
        size = entry.ByteSize()
        if size > self._most_entry_bytes:
            raise EntryTooLarge(size, self._most_entry_bytes)
        self._entries.append((entry, size))
        self._num_bytes += size
        self._wake_reader()
        return len(self._entries) <= _MAX_QUEUED_ENTRIES and self._num_bytes <= _MAX_QUEUED_BYTES

    def clear(self) -> None:
        """Drop all queued entries."""
        self._entries.clear()
        self._num_bytes = 0

    def end(self) -> None:
        """End the queue after its present entries."""
        self.has_ended = True
        self._wake_reader()

    async def take(self) -> list[EntryT]:
        """Wait for entries; return those of the next frame, which is bounded unless one entry alone is larger.

        Returns an empty list at the end.
        """
        while not self._entries and not self.has_ended:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        first = next(cut((size for _, size in self._entries), self._frame_bytes), slice(0, 0))
        taken, self._entries = self._entries[first], self._entries[first.stop :]
        self._num_bytes -= sum(size for _, size in taken)
        return [entry for entry, _ in taken]

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
