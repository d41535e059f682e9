"""Streamed tokens, kept in the shared store so that another coordinator can resume their requests.

Streams never wait for it: `append` notes that a request has new tokens, and one task (`upkeep.py`) writes those of all
requests, in one round trip every few milliseconds. While the store is away no token is lost, for the sessions hold
them; when it is back, the rest is written, or all tokens if the store lost its data.

    in the store    begun here; the lease is renewed until the request ends
    not there       the store failed (the request continues, and joins when it can), or lost its data
    taken over      the store names another owner: the stream ends
    aborted         another coordinator was asked to end it; the next write reports it, and the stream ends without
                    an error

Without Redis the store is in the process, and works alike.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from specdec.coordinator.journal.entry import JournalEntry
from specdec.coordinator.journal.upkeep import BATCH_TOKENS, JournalSettings, Upkeep
from specdec.coordinator.sessions.session import Request, Session
from specdec.store.guarded import GuardedStore
from specdec.store.interface import (
    Appended,
    BegunRequest,
    JournalRecord,
    Lease,
    LimitExceeded,
    NewRequest,
    RequestKey,
    StoreError,
    StoreUnavailable,
)


class Journal:
    """The journal of the requests of one coordinator. Use it from one event loop."""

    def __init__(
        self,
        store: GuardedStore,
        owner_id: str,
        settings: JournalSettings,
        *,
        on_unjournalled: Callable[[int], object],
        on_taken_over: Callable[[Request], None],
        on_aborted: Callable[[Request], None],
    ) -> None:
        """Start no task yet.

        Args:
            store: holds the journal.
            owner_id: this coordinator's name.
            settings: times and sizes.
            on_unjournalled: called with the number of running requests that are not in the store, when it may change.
            on_taken_over: called when another owner holds a request that runs here.
            on_aborted: called when another coordinator was asked to abort a request that runs here.
        """
        self._store = store
        self._owner_id = owner_id
        self._lease_s = settings.lease_s
        self._upkeep = Upkeep(
            store,
            settings,
            on_unjournalled=on_unjournalled,
            on_taken_over=on_taken_over,
            on_aborted=on_aborted,
        )
        self._endings = self._upkeep.endings
        self._beginning: dict[RequestKey, asyncio.Task[BegunRequest]] = {}

    @property
    def num_unjournalled(self) -> int:
        """Running requests that are not in the store."""
        return self._upkeep.num_unjournalled

    def start(self) -> None:
        """Start to write tokens and renew leases."""
        self._upkeep.start()

    async def close(self) -> None:
        """Stop, after the store was told of running endings."""
        await self._endings.close()
        await self._upkeep.close()

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
        """Claim a request for this coordinator, before it has output; a record under its id is replaced.

        While the store is away the request is admitted, and joins the journal later. Cost: one round trip.

        Raises:
            RequestHeld: the request runs at another coordinator, and `take_over` is not set.
            TooManyConcurrent: the tenant runs `max_concurrent` other requests, at all coordinators together.
        """
        owner_id = f"{self._owner_id}/{request.uid}"
        new = NewRequest(owner_id, seed, params, num_choices, self._lease_s, take_over=take_over, restart=True)
        entry = JournalEntry(request, new)
        if self._store.is_up:
            with contextlib.suppress(StoreUnavailable):
                await self._endings.wait(request.key.tenant)
                try:
                    begun = await self._begin(request.key, replace(new, max_concurrent=max_concurrent))
                    entry.held(begun.generation)
                except LimitExceeded as error:
                    entry.give_up(str(error))
        self._upkeep.add(entry)

    def append(self, session: Session, origins: Sequence[int]) -> None:
        """The session has new output tokens, one for each origin. Never waits."""
        entry = self._upkeep.entries.get(session.request.uid)
        if entry is not None:
            entry.origins[session.choice].extend(origins)
            self._upkeep.has_more(entry)

    async def end(self, request: Request) -> None:
        """End a request. Returns when its id and its place are free again, or the store fails.

        If the caller is cancelled, the store is told nevertheless.
        """
        entry = self._upkeep.entries.get(request.uid)
        if entry is None:
            return
        self._upkeep.remove(entry)
        if entry.was_held:
            await asyncio.shield(self._endings.start(request.key, self._end(entry)))

    async def abort(self, key: RequestKey) -> bool:
        """Ask the coordinator that runs a request to end it; False: none runs it, or the store fails.

        That coordinator learns of it when it next writes tokens or renews its lease.
        """
        await self._endings.wait(key.tenant)
        try:
            return await self._store.abort(key)
        except StoreUnavailable:
            return False

    async def load(self, key: RequestKey) -> JournalRecord | None:
        """The record of a request, from here or the store; None if there is none or the store fails."""
        for entry in reversed(self._upkeep.entries.values()):  # of two with one id, the newer has more tokens
            if entry.request.key == key:
                return entry.record()
        await self._endings.wait(key.tenant)
        try:
            return await self._store.load(key)
        except StoreUnavailable:
            return None

    async def _begin(self, key: RequestKey, new: NewRequest) -> BegunRequest:
        """Begin a request in the store; if the caller is cancelled meanwhile, end it as soon as it has begun."""
        asked = asyncio.create_task(self._begin_in_turn(self._beginning.get(key), key, new), name="journal-begin")
        self._beginning[key] = asked
        asked.add_done_callback(lambda task: self._begun(key, task))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            self._endings.start(key, self._end_unwanted(key, new.owner_id, asked))
            raise

    async def _begin_in_turn(
        self, former: asyncio.Task[BegunRequest] | None, key: RequestKey, new: NewRequest
    ) -> BegunRequest:
        # On two connections the calls could overtake each other, and the ended stream would win.
        if former is not None:
            await asyncio.wait([former])
        return await self._store.begin(key, new)

    def _begun(self, key: RequestKey, task: asyncio.Task[BegunRequest]) -> None:
        if self._beginning.get(key) is task:
            del self._beginning[key]

    async def _end_unwanted(self, key: RequestKey, owner_id: str, asked: asyncio.Task[BegunRequest]) -> None:
        try:
            begun = await asked
        except StoreError:
            return
        await self._endings.tell(Lease(key, owner_id, begun.generation))

    async def _end(self, entry: JournalEntry) -> None:
        with contextlib.suppress(StoreUnavailable):
            while writes := list(entry.writes(BATCH_TOKENS)):
                results = await self._store.append(writes)
                if not all(result is Appended.STORED for result in results):
                    break  # another owner has it, or the store lacks earlier tokens: a resume computes them
                for write in writes:
                    entry.num_stored[write.choice] = write.start + len(write.token_ids)
        if entry.last_lease is not None:
            await self._endings.tell(entry.last_lease)
