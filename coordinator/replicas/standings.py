"""Standings of a role's replicas: those that fail too often get no sessions for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import structlog

from specdec.coordinator.links.link_events import LinkState
from specdec.coordinator.links.replica_link import ReplicaLink
from specdec.coordinator.replicas.outliers import EjectionSettings, OutlierDetector, Standing

_STATES = {
    Standing.TRUSTED: LinkState.READY,
    Standing.EJECTED: LinkState.EJECTED,
    Standing.PROBATION: LinkState.PROBATION,
}
_log = structlog.get_logger(__name__)


class Standings:
    """Ejects the links of failing replicas, and puts them on probation afterwards."""

    def __init__(self, role: str, settings: EjectionSettings, links: Callable[[], Sequence[ReplicaLink]]) -> None:
        """`links` returns the role's known links."""
        self._role = role
        self._detector = OutlierDetector(settings)
        self._links = links

    def failed(self, address: str, *, is_proven: bool = False) -> bool:
        """A replica failed; returns whether it is ejected. The last usable replica never is.

        `is_proven`: this failure alone ejects it.
        """
        num_others = sum(other.address != address and other.is_ready for other in self._links())
        if not self._detector.failed(address, num_others, is_proven=is_proven):
            return False
        own = [link for link in self._links() if link.address == address]
        remaining_s = self._detector.remaining_s(address)
        _log.warning("replica_ejected", role=self._role, address=address, ejection_s=remaining_s)
        for link in own:
            link.set_standing(LinkState.EJECTED)
            asyncio.get_running_loop().call_later(remaining_s, self._update, link)
        return True

    def succeeded(self, link: ReplicaLink) -> None:
        """A replica succeeded."""
        if self._detector.succeeded(link.address):
            self._update(link)

    def forget(self, address: str) -> None:
        """A replica was removed."""
        self._detector.forget(address)

    def _update(self, link: ReplicaLink) -> None:
        if link not in self._links():  # removed since the timer was set
            return
        standing = self._detector.standing(link.address)
        link.set_standing(_STATES[standing])
        if standing is Standing.EJECTED:  # ejected again meanwhile, or the timer fired early
            asyncio.get_running_loop().call_later(self._detector.remaining_s(link.address), self._update, link)
