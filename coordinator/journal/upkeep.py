"""Keep the store up to date with the running requests: tokens, leases, and requests that join late."""

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
"""Tokens written in one round trip: a busy Redis takes some tens of milliseconds, and operations have a time limit."""
_BATCH_WRITES = 512
"""Writes in one round trip: each is a script call in Redis."""
_BATCH_LEASES = 512
"""Leases renewed in one round trip."""
_RENEWALS_PER_LEASE = 3
"""Renewals in a lease's time: two may fail before it expires."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class JournalSettings:
    """Times, in seconds."""

    lease_s: float = 10.0
    """Lease of a request: its time-out if its coordinator stops renewing."""
    keep_s: float = 300.0
    """Time an ended request's record is kept, as its client may have missed the end."""
    interval_s: float = 0.05
    """Time between two writes; unwritten tokens are lost with the process."""
    retry_s: float = 0.1
    """Time between two tries while the store is away; a try is cheap, see GuardedStore."""


class Upkeep:
    """Two tasks: one writes what the store lacks, one renews leases. No stream waits for them."""

    def __init__(
        self,
        store: GuardedStore,
        settings: JournalSettings,
        *,
        on_unjournalled: Callable[[int], object],
        on_taken_over: Callable[[Request], None],
        on_aborted: Callable[[Request], None],
    ) -> None:
        """Start no task yet; the callbacks are `Journal`'s."""
        self.entries: dict[str, JournalEntry] = {}
        """Running requests, by uid, in the order in which they began."""
        self._store = store
        self._settings = settings
        self._on_unjournalled = on_unjournalled
        self._on_taken_over = on_taken_over
        self._on_aborted = on_aborted
        self._behind: dict[JournalEntry, None] = {}
        """Entries in the store that may have unwritten tokens."""
        self._wake = asyncio.Event()
        self.endings = Endings(store, settings.keep_s, self._wake.set)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_unjournalled(self) -> int:
        """Running requests that are not in the store."""
        return sum(entry.generation is None for entry in self.entries.values())

    def start(self) -> None:
        """Start to write tokens and renew leases."""
        self._tasks = [
            asyncio.create_task(self._write_forever(), name="journal-write"),
            asyncio.create_task(self._renew_forever(), name="journal-renew"),
        ]

    async def close(self) -> None:
        """Stop both tasks."""
        await end_tasks(self._tasks)

    def add(self, entry: JournalEntry) -> None:
        """Keep a running request up to date, and let it join if it is not in the store."""
        self.entries[entry.request.uid] = entry
        if entry.generation is None:
            self._wake.set()
        self._count()

    def remove(self, entry: JournalEntry) -> None:
        """Forget an ended request."""
        del self.entries[entry.request.uid]
        entry.is_closed = True
        self._behind.pop(entry, None)
        self._count()

    def has_more(self, entry: JournalEntry) -> None:
        """The entry has unwritten tokens."""
        if entry.generation is not None:  # otherwise all are written once it joins
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
            except Exception:  # later writes may succeed
                _log.exception("journal_failed")
                pause_s = self._settings.retry_s
            await asyncio.sleep(pause_s)

    async def _write(self) -> None:
        """Write one batch, after letting requests join."""
        now_s = time.monotonic()
        for entry in list(self.entries.values()):
            if not entry.is_closed and entry.generation is None and entry.may_join(now_s):
                await self._join(entry)
        batch: list[tuple[JournalEntry, JournalWrite]] = []
        num_left = BATCH_TOKENS
        for entry in list(self._behind):
            if not entry.is_behind:  # `append` was called with no tokens
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
        await self.endings.tell_again()  # last: one that fails must not delay tokens

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
        """The store refuses our writes of the request; `_join` finds out why."""
        entry.generation = None
        self._behind.pop(entry, None)
        self._wake.set()
        self._count()

    async def _join(self, entry: JournalEntry) -> None:
        """Put a running request into the store, unless another owner took it over, or it was aborted."""
        key = entry.request.key
        # A resume may take over only when it begins: a later holder may be a later resume.
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
            # An older record is back: a store that failed over, or was restored, lost ours.
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
        """Another owner began while the store was away, or its lease survived it. Both continue, with equal tokens.

        A resumed request tries again, for the holder may be its former owner, whose lease expires.
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
            except Exception:  # leases must not expire for it
                _log.exception("renewal_failed")
            await asyncio.sleep(self._settings.lease_s / _RENEWALS_PER_LEASE)

    async def _renew(self) -> None:
        held = [(entry, lease) for entry in self.entries.values() if (lease := entry.lease) is not None]
        if not held:
            await self._store.ping()  # an idle coordinator must also notice that the store is away or back
            return
        for start in range(0, len(held), _BATCH_LEASES):
            batch = held[start : start + _BATCH_LEASES]
            owned = await self._store.renew([lease for _, lease in batch])
            for (entry, lease), is_owned in zip(batch, owned, strict=True):
                if not is_owned and not entry.is_closed and entry.generation == lease.generation:
                    self._lost(entry)

    def _count(self) -> None:
        self._on_unjournalled(self.num_unjournalled)
