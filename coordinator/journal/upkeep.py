"""Keeping the store up to date with the requests that run: their tokens, their leases, and who has joined."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from specdec.coordinator.journal.endings import Endings
from specdec.coordinator.journal.entry import JournalEntry
from specdec.coordinator.sessions.session import Request
from specdec.coordinator.tasks import end_tasks
from specdec.store.guarded import GuardedStore
from specdec.store.interface import Appended, JournalWrite, Lease, LimitExceeded, RequestHeld, StoreUnavailable

BATCH_TOKENS = 16384
"""In one round trip; so many take a busy Redis some tens of milliseconds, and an operation has a time limit."""
_BATCH_WRITES = 512
"""Likewise: each write is a script of its own there."""
_BATCH_LEASES = 512
"""Likewise."""
_RENEWALS_PER_LEASE = 3
"""Two may fail before a lease runs out."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class JournalSettings:
    """Times, in seconds."""

    lease_s: float = 10.0
    """For how long a request stays its coordinator's when that is not heard of."""
    keep_s: float = 300.0
    """How long the record of an ended request is kept, as its client may have missed the end."""
    interval_s: float = 0.05
    """Between two writes; what the store then lacks is lost with the process."""
    retry_s: float = 0.1
    """Between two tries while the store is away; it costs next to nothing, see GuardedStore."""


class Upkeep:
    """Two tasks: one writes what the store lacks, one renews leases. Whatever they find out, no stream waits for it."""

    def __init__(
        self,
        store: GuardedStore,
        settings: JournalSettings,
        *,
        on_unjournalled: Callable[[int], object],
        on_taken_over: Callable[[Request], None],
        on_aborted: Callable[[Request], None],
    ) -> None:
        """`on_unjournalled` is told how many running requests are not in the store, the others which one it is."""
        self.entries: dict[str, JournalEntry] = {}
        """Running requests, by uid, in the order in which they began."""
        self._store = store
        self._settings = settings
        self._on_unjournalled = on_unjournalled
        self._on_taken_over = on_taken_over
        self._on_aborted = on_aborted
        self._behind: dict[JournalEntry, None] = {}
        """Those in the store that may have more to write."""
        self._wake = asyncio.Event()
        self.endings = Endings(store, settings.keep_s, self._wake.set)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_unjournalled(self) -> int:
        """Running requests that are not in the store."""
        return sum(entry.generation is None for entry in self.entries.values())

    def start(self) -> None:
        """Begin to write and to renew."""
        self._tasks = [
            asyncio.create_task(self._write_forever(), name="journal-write"),
            asyncio.create_task(self._renew_forever(), name="journal-renew"),
        ]

    async def close(self) -> None:
        """Stop."""
        await end_tasks(self._tasks)

    def add(self, entry: JournalEntry) -> None:
        """A request runs, whether it is in the store or not."""
        self.entries[entry.request.uid] = entry
        if entry.generation is None:
            self._wake.set()
        self._count()

    def remove(self, entry: JournalEntry) -> None:
        """A request runs no more."""
        del self.entries[entry.request.uid]
        entry.is_closed = True
        self._behind.pop(entry, None)
        self._count()

    def has_more(self, entry: JournalEntry) -> None:
        """There are more tokens to write."""
        if entry.generation is not None:  # else all are written once it joins
            self._behind[entry] = None
            self._wake.set()

    async def _write_forever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            pause_s = self._settings.interval_s
            try:
                await self._write()
            except StoreUnavailable:
                pause_s = self._settings.retry_s
                self._wake.set()
            except Exception:  # whatever it is, later writes may go well
                _log.exception("journal_failed")
                pause_s = self._settings.retry_s
            await asyncio.sleep(pause_s)

    async def _write(self) -> None:
        """Bring the store up to date, as far as one batch goes."""
        now_s = time.monotonic()
        for entry in list(self.entries.values()):
            if not entry.is_closed and entry.generation is None and entry.may_join(now_s):
                await self._join(entry)
        batch: list[tuple[JournalEntry, JournalWrite]] = []
        num_left = BATCH_TOKENS
        for entry in list(self._behind):
            if not entry.is_behind:  # told of nothing
                del self._behind[entry]
            for write in entry.writes(num_left):
                batch.append((entry, write))
                num_left -= len(write.token_ids)
            if num_left == 0 or len(batch) >= _BATCH_WRITES:
                break
        if batch:
            results = await self._store.append([write for _, write in batch])
            for (entry, write), result in zip(batch, results, strict=True):
                self._written(entry, write, result)
        if self._behind:  # not all of it fitted
            self._wake.set()
        await self.endings.tell_again()  # last: one that cannot be told must not keep the others' tokens

    def _written(self, entry: JournalEntry, write: JournalWrite, result: Appended) -> None:
        if entry.is_closed or entry.generation != write.generation:
            return
        match result:
            case Appended.STORED:
                entry.num_stored[write.choice] = write.start + len(write.token_ids)
            case Appended.GAP:
                entry.num_stored[write.choice] = 0
            case Appended.NOT_OWNER:
                self._lost(entry)
        if not entry.is_behind:
            self._behind.pop(entry, None)

    def _lost(self, entry: JournalEntry) -> None:
        """The store takes no more of the request from us; why, `_join` finds out."""
        entry.generation = None
        self._behind.pop(entry, None)
        self._wake.set()
        self._count()

    async def _join(self, entry: JournalEntry) -> None:
        """Put a running request into the store, unless another owner took it over, or it was aborted."""
        key = entry.request.key
        # A resume may take over when it begins; later the one who holds the request may be a later resume.
        new = replace(entry.new, take_over=False)
        if (lease := entry.last_lease) is not None and (record := await self._store.load(key)) is not None:
            is_ours = record.owner_id == new.owner_id
            if record.is_aborted if is_ours else record.generation >= lease.generation:
                entry.joins_at_s = None
                event = "request_aborted" if is_ours else "request_taken_over"
                _log.info(event, request_id=key.request_id, owner_id=record.owner_id)
                if not entry.is_closed:
                    (self._on_aborted if is_ours else self._on_taken_over)(entry.request)
                return
            # What an earlier owner had is back: a store that failed over, or was restored, has forgotten ours.
            new = replace(new, take_over=True)
        if entry.is_closed:
            return
        try:
            begun = await self._store.begin(key, new)
        except RequestHeld as error:
            self._held_elsewhere(entry, error)
            return
        except LimitExceeded as error:
            entry.give_up(str(error))
            return
        entry.held(begun.generation)
        if entry.is_closed:
            await self.endings.tell(Lease(key, new.owner_id, begun.generation))
            return
        self._behind[entry] = None
        self._count()

    def _held_elsewhere(self, entry: JournalEntry, error: RequestHeld) -> None:
        """Another has the request, and began while the store was away, or died with it. Both go on, with equal tokens.

        One that was resumed tries again, for the other may be its former owner, whose lease runs out.
        """
        if entry.new.take_over:
            entry.joins_at_s = time.monotonic() + self._settings.lease_s
            asyncio.get_running_loop().call_later(self._settings.lease_s, self._wake.set)
        else:
            entry.give_up(str(error))

    async def _renew_forever(self) -> None:
        while True:
            try:
                await self._renew()
            except StoreUnavailable:
                pass
            except Exception:  # whatever it is, leases must not run out for it
                _log.exception("renewal_failed")
            await asyncio.sleep(self._settings.lease_s / _RENEWALS_PER_LEASE)

    async def _renew(self) -> None:
        held = [(entry, lease) for entry in self.entries.values() if (lease := entry.lease) is not None]
        if not held:
            await self._store.ping()  # so that an idle coordinator learns too that the store is away or back
            return
        for start in range(0, len(held), _BATCH_LEASES):
            batch = held[start : start + _BATCH_LEASES]
            owned = await self._store.renew([lease for _, lease in batch])
            for (entry, lease), is_owned in zip(batch, owned, strict=True):
                if not is_owned and not entry.is_closed and entry.generation == lease.generation:
                    self._lost(entry)

    def _count(self) -> None:
        self._on_unjournalled(self.num_unjournalled)
