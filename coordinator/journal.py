"""What was streamed of each request, kept in the shared store so that another coordinator can take it up.

Streams never wait for it: `append` notes that there is something to write, and one task writes what all requests have,
in one round trip every few milliseconds. While the store is away nothing is lost, for the tokens are those of the
sessions; when it is back, the rest is written from where it stood, or all of it if the store has forgotten.

    in the store    begun here; the lease is renewed until the request ends
    not there       the store failed (the request runs on, and joins when it can), or lost its data
    taken over      the store says that another owner has it: the stream ends
    aborted         another coordinator was asked to end it; learnt like a take-over, and the stream ends in order

Without Redis the store is in the process, and all of this is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from coordinator.journal_endings import Endings
from coordinator.journal_entry import JournalEntry
from coordinator.tasks import end_tasks
from specdec.store.errors import LimitExceeded, RequestHeld, StoreError, StoreUnavailable
from specdec.store.guarded import GuardedStore
from specdec.store.interface import Appended, Begun, JournalRecord, JournalWrite, Lease, NewRequest, RequestKey

if TYPE_CHECKING:
    from coordinator.sessions import Request, Session

_RENEWALS_PER_LEASE = 3
_BATCH_TOKENS = 16384
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


class Journal:
    """The journal of the requests of one coordinator. Use it from one event loop."""

    def __init__(
        self,
        store: GuardedStore,
        owner_id: str,
        settings: JournalSettings | None = None,
        on_unjournalled: Callable[[int], object] = lambda num: None,
    ) -> None:
        """`on_unjournalled` is told how many running requests are not in the store, when that may have changed."""
        self._store = store
        self._owner_id = owner_id
        self._settings = settings or JournalSettings()
        self._on_unjournalled = on_unjournalled
        self._entries: dict[str, JournalEntry] = {}
        self._behind: dict[JournalEntry, None] = {}
        self._wake = asyncio.Event()
        self._endings = Endings(store, self._settings.keep_s, self._wake.set)
        self._tasks: list[asyncio.Task[None]] = []
        self.on_taken_over: Callable[[Request], None] = lambda request: None
        """Called when another owner has the request; set by the Generator."""
        self.on_aborted: Callable[[Request], None] = lambda request: None
        """Called when the request was aborted at another coordinator; set by the Generator."""

    @property
    def num_unjournalled(self) -> int:
        """Running requests that are not in the store."""
        return sum(entry.generation is None for entry in self._entries.values())

    def start(self) -> None:
        """Begin to write and to renew."""
        self._tasks = [
            asyncio.create_task(self._write_forever(), name="journal-write"),
            asyncio.create_task(self._renew_forever(), name="journal-renew"),
        ]

    async def close(self) -> None:
        """Stop, after what ends now has been told to the store."""
        await self._endings.close()
        await end_tasks(self._tasks)

    async def begin(
        self,
        request: Request,
        *,
        seed: int,
        params: bytes,
        num_choices: int,
        max_concurrent: int | None = None,
        take_over: bool = False,
    ) -> None:
        """Make a request this coordinator's, before it has output; what was journalled under its id is replaced.

        While the store is away the request is let through, and joins the journal later. Cost: one round trip.

        Raises:
            RequestHeld: it is running at another coordinator, and `take_over` is not set.
            TooManyConcurrent: the tenant has `max_concurrent` other requests, at all coordinators.
        """
        owner_id = f"{self._owner_id}/{request.uid}"
        lease_s = self._settings.lease_s
        new = NewRequest(owner_id, seed, params, num_choices, lease_s, take_over=take_over, restart=True)
        entry = JournalEntry(request, new)
        if self._store.is_up:
            with contextlib.suppress(StoreUnavailable):
                await self._endings.wait(request.key.tenant)
                try:
                    begun = await self._begin(request.key, replace(new, max_concurrent=max_concurrent))
                    entry.held(begun.generation)
                except LimitExceeded as error:
                    self._give_up(entry, str(error))
        self._entries[request.uid] = entry
        if entry.generation is None:
            self._wake.set()
        self._count()

    def append(self, session: Session, origins: Sequence[int]) -> None:
        """The session has this many more output tokens, with these origins. Never waits."""
        entry = self._entries.get(session.request.uid)
        if entry is not None:
            entry.origins[session.choice].extend(origins)
            self._behind[entry] = None
            self._wake.set()

    async def end(self, request: Request) -> None:
        """Nothing more comes of a request. Returns when its id and its place are free again, or the store fails.

        If the caller is cancelled, the store is told nevertheless.
        """
        entry = self._entries.pop(request.uid, None)
        if entry is None:
            return
        entry.is_closed = True
        self._behind.pop(entry, None)
        self._count()
        if entry.was_held:
            await asyncio.shield(self._endings.start(request.key, self._end(entry)))

    async def abort(self, key: RequestKey) -> bool:
        """Ask the coordinator that runs a request to end it; False: none does, or the store fails.

        It learns of it when it next writes tokens or renews its lease.
        """
        await self._endings.wait(key.tenant)
        try:
            return await self._store.abort(key)
        except StoreUnavailable:
            return False

    async def load(self, key: RequestKey) -> JournalRecord | None:
        """What is known of a request, here or in the store; None too when the store fails."""
        for entry in reversed(self._entries.values()):  # of one taken over here, the newest has most
            if entry.request.key == key:
                return entry.record()
        await self._endings.wait(key.tenant)
        try:
            return await self._store.load(key)
        except StoreUnavailable:
            return None

    async def _begin(self, key: RequestKey, new: NewRequest) -> Begun:
        """Begin a request in the store; if the caller is cancelled meanwhile, it is ended as soon as it is there."""
        asked = asyncio.create_task(self._store.begin(key, new), name="journal-begin")
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            self._endings.start(key, self._end_unwanted(key, new.owner_id, asked))
            raise

    async def _end_unwanted(self, key: RequestKey, owner_id: str, asked: asyncio.Task[Begun]) -> None:
        try:
            begun = await asked
        except StoreError:
            return
        await self._endings.tell(Lease(key, owner_id, begun.generation))

    async def _end(self, entry: JournalEntry) -> None:
        with contextlib.suppress(StoreUnavailable):
            while writes := list(entry.writes(_BATCH_TOKENS)):
                results = await self._store.append(writes)
                if not all(result is Appended.STORED for result in results):
                    break  # another has it, or tokens before these are gone: whoever resumes computes them
                for write in writes:
                    entry.num_stored[write.choice] = write.start + len(write.token_ids)
        if entry.last_lease is not None:
            await self._endings.tell(entry.last_lease)

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
        await self._endings.tell_again()
        for entry in [entry for entry in self._entries.values() if entry.generation is None and entry.can_join]:
            await self._join(entry)
        batch: list[tuple[JournalEntry, JournalWrite]] = []
        num_left = _BATCH_TOKENS
        for entry in self._behind:
            for write in entry.writes(num_left):
                batch.append((entry, write))
                num_left -= len(write.token_ids)
        if not batch:
            return
        results = await self._store.append([write for _, write in batch])
        for (entry, write), result in zip(batch, results, strict=True):
            self._written(entry, write, result)

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
        else:
            self._wake.set()

    def _lost(self, entry: JournalEntry) -> None:
        """The store takes no more of the request from us; why, `_join` finds out."""
        entry.generation = None
        self._wake.set()
        self._count()

    async def _join(self, entry: JournalEntry) -> None:
        """Put a running request into the store, unless another owner took it over, or it was aborted."""
        key, new = entry.request.key, entry.new
        if entry.was_held and (record := await self._store.load(key)) is not None:
            is_ours = record.owner_id == new.owner_id
            if not is_ours or record.is_aborted:
                entry.can_join = False
                event = "request_aborted" if is_ours else "request_taken_over"
                _log.info(event, request_id=key.request_id, owner_id=record.owner_id)
                if not entry.is_closed:
                    (self.on_aborted if is_ours else self.on_taken_over)(entry.request)
                return
        try:
            begun = await self._store.begin(key, new)
        except RequestHeld as error:
            # Begun elsewhere while the store was away. Both go on: their tokens are equal, each has its client.
            self._give_up(entry, str(error))
            return
        except LimitExceeded as error:
            self._give_up(entry, str(error))
            return
        entry.held(begun.generation)
        if entry.is_closed:
            await self._endings.tell(Lease(key, new.owner_id, begun.generation))
            return
        self._behind[entry] = None
        self._count()

    def _give_up(self, entry: JournalEntry, cause: str) -> None:
        entry.can_join = False
        _log.warning("request_not_journalled", request_id=entry.request.key.request_id, cause=cause)

    async def _renew_forever(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):
                await self._renew()
            await asyncio.sleep(self._settings.lease_s / _RENEWALS_PER_LEASE)

    async def _renew(self) -> None:
        held = [(entry, lease) for entry in self._entries.values() if (lease := entry.lease) is not None]
        if not held:
            await self._store.ping()  # so that an idle coordinator learns too that the store is away or back
            return
        owned = await self._store.renew([lease for _, lease in held])
        for (entry, lease), is_owned in zip(held, owned, strict=True):
            if not is_owned and not entry.is_closed and entry.generation == lease.generation:
                self._lost(entry)

    def _count(self) -> None:
        self._on_unjournalled(self.num_unjournalled)
