"""The memory of compiled constraints: those that are cached, and those that sessions keep when the cache has dropped
them. A constraint's automaton, which all of its sessions share, grows while it is used."""

from __future__ import annotations

import threading
import weakref

_LEAST_BYTES = 128 * 1024
"""Bytes charged for a constraint, at least."""
_MOST_GROWN_BYTES = 24 * 2**20
"""Bytes by which an automaton grows, at most, for the number of its states is limited; growth is known by samples."""


class Holding:
    """The bytes of one constraint."""

    def __init__(self, tenant: bytes) -> None:
        self.tenant = tenant
        self.num_bytes = 0
        self.grown_bytes = 0
        """Of these, those by which it has grown."""


class HeldConstraints:
    """Bytes of the constraints that exist, by the tenant that had each compiled. Any thread may call all methods.

    A tenant has a quarter of the whole, and all that have more than one have half: the rest is for tenants' only
    constraints, for whoever names new tenants has no more. A single constraint may have any size.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.RLock()  # a constraint may be collected in any thread, also in one that holds it
        self._num_bytes: dict[bytes, int] = {}

    def refusal(self, tenant: bytes, num_bytes: int) -> str:
        """Why a constraint of this size must not be kept; empty: it may."""
        return self._refusal(Holding(tenant), max(num_bytes, _LEAST_BYTES))

    def hold(self, owner: object, tenant: bytes, num_bytes: int) -> Holding:
        """Count a constraint until `owner` is gone."""
        holding = Holding(tenant)
        self._add(holding, max(num_bytes, _LEAST_BYTES))
        weakref.finalize(owner, self._drop, holding)
        return holding

    def grow(self, holding: Holding, num_bytes: int) -> str:
        """Count the growth of a constraint in use. Returns why it must not be used on; empty: it may."""
        num_bytes = min(num_bytes, _MOST_GROWN_BYTES - holding.grown_bytes)
        holding.grown_bytes += num_bytes
        self._add(holding, num_bytes)
        return self._refusal(holding, 0)

    def _refusal(self, holding: Holding, more_bytes: int) -> str:
        most = self._most_bytes
        with self._lock:
            own, all_bytes = self._num_bytes.get(holding.tenant, 0), sum(self._num_bytes.values())
        limits = [("all", all_bytes, most // 2), ("the tenant's", own, most // 4)]
        if own == holding.num_bytes:  # it has no other
            limits = [("all", all_bytes, most)] if all_bytes > own else []
        for whose, held, limit in limits:
            if held + more_bytes > limit:
                return (
                    f"{held >> 10} KiB of {whose} constraints are in use, the limit is {limit >> 10} KiB: use fewer "
                    "different ones at once, or retry later"
                )
        return ""

    def _add(self, holding: Holding, num_bytes: int) -> None:
        with self._lock:
            holding.num_bytes += num_bytes
            self._num_bytes[holding.tenant] = self._num_bytes.get(holding.tenant, 0) + num_bytes

    def _drop(self, holding: Holding) -> None:
        with self._lock:
            left = self._num_bytes[holding.tenant] - holding.num_bytes
            if left:
                self._num_bytes[holding.tenant] = left
            else:
                del self._num_bytes[holding.tenant]
