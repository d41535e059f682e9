"""A process's registration, renewed while the process lives."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from enum import StrEnum

import structlog

from specdec.store.interface import ReplicaRecord, Store, StoreError, StoreUnavailable
from specdec.v1.common_pb2 import GetReplicaInfoResponse

_RENEWALS_PER_TTL = 3
_MOST_RETRY_S = 1.0
_log = structlog.get_logger("specdec.store")


class AnnouncedState(StrEnum):
    """State of a process in the registry."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class Announcer:
    """Keeps one process in the registry from `start` to `stop`.

    The registration is renewed three times per TTL, and at once when the state changes. While the store is down the
    renewal is retried about once a second; no method raises or waits for it.
    """

    def __init__(
        self,
        store: Store,
        ttl_s: float,
        role: str,
        instance_id: str,
        describe: Callable[[], GetReplicaInfoResponse],
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """Announce nothing yet.

        Args:
            store: the registry; its owner closes it after `stop`.
            ttl_s: seconds that a registration lasts without renewal.
            role: target, draft or coordinator.
            instance_id: id of the process.
            describe: returns the replica's info with the latest load; called at every renewal.
            on_failure: called at every failed renewal. Must not raise.
        """
        self._store = store
        self._ttl_s = ttl_s
        self._role = role
        self._instance_id = instance_id
        self._describe = describe
        self._on_failure = on_failure
        self.address = ""
        """host:port at which others reach the process; empty before `start`."""
        self._state = AnnouncedState.LOADING
        self._changed = asyncio.Event()
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self, address: str) -> None:
        """Announce as loading at host:port, from now until `stop`."""
        self.address = address
        self._task = asyncio.create_task(self._run(), name="announcer")

    def set_instance(self, instance_id: str) -> None:
        """Announce another instance id from the next renewal on."""
        self._instance_id = instance_id

    def set_state(self, state: AnnouncedState) -> None:
        """Announce another state, at once."""
        self._state = state
        self._changed.set()

    async def stop(self) -> None:
        """Withdraw the registration; while the store is down it expires by itself. Does nothing before `start`."""
        if self._task is None:
            return
        # Not cancelled: a renewal under way must not arrive after the withdrawal. The store bounds its time.
        self._is_stopping = True
        self._changed.set()
        await self._task
        with contextlib.suppress(StoreError):
            await self._store.withdraw(self._role, self.address)

    async def _run(self) -> None:
        while not self._is_stopping:
            self._changed.clear()
            interval_s = self._ttl_s / _RENEWALS_PER_TTL
            if not await self._announce():
                interval_s = min(interval_s, _MOST_RETRY_S)
            # Random, so that a fleet that was started together does not renew together.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), interval_s * random.uniform(0.8, 1.0))

    async def _announce(self) -> bool:
        record = ReplicaRecord(self._role, self.address, self._instance_id, str(self._state), self._describe())
        try:
            await self._store.announce(record, self._ttl_s)
        except StoreError as error:
            self._on_failure()
            if not isinstance(error, StoreUnavailable):  # the guarded store logs that one
                _log.error("announcement_refused", address=self.address, reason=str(error))
            return False
        return True
