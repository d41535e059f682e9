"""Entries on their way to a replica."""

from __future__ import annotations

import asyncio
from typing import Generic

from specdec.coordinator.links.wire import EntryT
from specdec.wire.message_sizes import MAX_STREAM_FRAME_BYTES, cut, frame_bytes, most_entry_bytes

_MAX_QUEUED_ENTRIES = 16_384
"""Some turns' worth for thousands of sessions: a replica that reads never lets as many gather."""
_MAX_QUEUED_BYTES = 256 * 2**20
"""Thousands of openings with all their tokens, as after a break; more is memory for nobody."""


class EntryTooLarge(Exception):
    """No frame that the replica takes holds an entry."""

    def __init__(self, num_bytes: int, most_bytes: int) -> None:
        super().__init__(f"an entry of {num_bytes} bytes is more than the {most_bytes} that the replica takes")


class Outbox(Generic[EntryT]):
    """A queue with one reader. What is queued within one turn of the event loop is taken at once, for one frame."""

    def __init__(self) -> None:
        self.has_ended = False
        self._frame_bytes = MAX_STREAM_FRAME_BYTES
        self._most_entry_bytes = _MAX_QUEUED_BYTES
        self._entries: list[tuple[EntryT, int]] = []
        """With their sizes in bytes."""
        self._num_bytes = 0
        self._wake: asyncio.Future[None] | None = None

    def limit(self, message_bytes: int) -> None:
        """No frame may be larger than this from now on."""
        self._frame_bytes = frame_bytes(message_bytes)
        self._most_entry_bytes = most_entry_bytes(message_bytes)

    def put(self, entry: EntryT) -> bool:
        """Queue an entry; False when so much is queued that the reader must be stuck. Raises EntryTooLarge."""
        size = entry.ByteSize()
        if size > self._most_entry_bytes:
            raise EntryTooLarge(size, self._most_entry_bytes)
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
        first = next(cut((size for _, size in self._entries), self._frame_bytes), slice(0, 0))
        taken, self._entries = self._entries[first], self._entries[first.stop :]
        self._num_bytes -= sum(size for _, size in taken)
        return [entry for entry, _ in taken]

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
