"""The last known content of the shared registry."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import structlog

from specdec.store.announcer import AnnouncedState
from specdec.store.interface import ReplicaRecord, Store, StoreUnavailable
from specdec.wire.discovery import ReplicaAddress
from specdec.wire.settings import check_address

_log = structlog.get_logger(__name__)
_WHOLE_S = 60.0
"""Seconds after which the registry is read though its version is known, for the loads, and for replicas of releases
that set no version."""
_DIALLED = frozenset({AnnouncedState.READY, AnnouncedState.DRAINING})


class RegistryView:
    """The registry's records at the last answer: a store that is down removes no replica.

    They are read again when the registry's version changes, and once a minute.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._version = ""
        self._read_s = -math.inf
        self._records: Sequence[ReplicaRecord] = ()
        self._dialled: set[tuple[str, str]] = set()

    async def refresh(self) -> None:
        """Read what has changed; without an answer the records stay."""
        is_due = self._clock() - self._read_s >= _WHOLE_S or any(
            r.state == AnnouncedState.LOADING for r in self._records
        )
        try:
            version, records = await self._store.registered("" if is_due else self._version)
        except StoreUnavailable:
            return
        if records is None:
            return
        self._version, self._read_s = version, self._clock()
        self._records = [record for record in records if _has_address(record)]
        self._dialled = {(r.role, r.address) for r in self._records if self._is_dialled(r)}

    def records(self, role: str) -> list[ReplicaRecord]:
        """The records of a role's processes."""
        return [record for record in self._records if record.role == role]

    def coordinators(self) -> list[str]:
        """Addresses of the coordinators that do not drain."""
        return [each.address for each in self.records("coordinator") if each.state != AnnouncedState.DRAINING]

    def endpoints(self, role: str) -> list[ReplicaAddress]:
        """Addresses of a role's usable replicas.

        A replica that loads for the first time is left out: it may take long, and would count as down. One that loads
        again stays: it has been restarted, and sessions may wait for it.
        """
        return [
            ReplicaAddress(record.address, is_registered=True)
            for record in self.records(role)
            if (role, record.address) in self._dialled
        ]

    def _is_dialled(self, record: ReplicaRecord) -> bool:
        return record.state in _DIALLED or (record.role, record.address) in self._dialled


def _has_address(record: ReplicaRecord) -> bool:
    """Whether the address is valid: a bad record must not disturb the others."""
    try:
        check_address(record.address)
    except ValueError:
        _log.warning("registration_ignored", role=record.role, address=record.address)
        return False
    return True
