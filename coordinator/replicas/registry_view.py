"""What the shared registry said when it was last asked."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from specdec.coordinator.replicas.discovery import Endpoint
from specdec.store.announcer import AnnouncedState
from specdec.store.interface import ReplicaRecord, Store, StoreUnavailable
from specdec.wire.settings import check_address

_log = structlog.get_logger(__name__)
_DIALLED = frozenset({AnnouncedState.READY, AnnouncedState.DRAINING})


class RegistryView:
    """The registry's records as of the last answer: a store that is down takes no replica away."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._records: Sequence[ReplicaRecord] = ()
        self._dialled: set[tuple[str, str]] = set()

    async def refresh(self) -> None:
        """Ask again; without an answer everything stays as it was."""
        try:
            self._records = [record for record in await self._store.replicas() if _has_address(record)]
        except StoreUnavailable:
            return
        self._dialled = {(r.role, r.address) for r in self._records if self._is_dialled(r)}

    def records(self, role: str) -> list[ReplicaRecord]:
        """The processes of a role, by address."""
        return [record for record in self._records if record.role == role]

    def endpoints(self, role: str) -> list[Endpoint]:
        """Where to find the replicas of a role that can be used.

        One that loads is left out: it may take long, and is no replica that is down. One that loads *again* stays: it
        has just been restarted, and sessions may wait for it.
        """
        return [
            Endpoint(record.address, is_registered=True)
            for record in self.records(role)
            if (role, record.address) in self._dialled
        ]

    def _is_dialled(self, record: ReplicaRecord) -> bool:
        return record.state in _DIALLED or (record.role, record.address) in self._dialled


def _has_address(record: ReplicaRecord) -> bool:
    """Whether it can be called at all: what another version, or a mistake, wrote must not disturb the others."""
    try:
        check_address(record.address)
    except ValueError:
        _log.warning("registration_ignored", role=record.role, address=record.address)
        return False
    return True
