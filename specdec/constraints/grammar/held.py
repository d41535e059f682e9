"""The memory of compiled constraints: those that are cached, and those that sessions keep when the cache has dropped
them."""

from __future__ import annotations

import threading
import weakref

_LEAST_BYTES = 128 * 1024
"""Bytes charged for a constraint, at least: its tables grow when they are used."""


class HeldConstraints:
    """Bytes of the constraints that exist, by the tenant that had each compiled. Any thread may call all methods.

    A tenant has half of the whole, and one constraint of any size.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.RLock()  # a constraint may be collected in any thread, also in one that holds it
        self._num_bytes: dict[bytes, int] = {}

    def refusal(self, tenant: bytes, num_bytes: int) -> str:
        """Why a constraint of this size must not be kept; empty: it may."""
        num_bytes = max(num_bytes, _LEAST_BYTES)
        with self._lock:
            own, all_bytes = self._num_bytes.get(tenant, 0), sum(self._num_bytes.values())
        for whose, held, most in (("the tenant's", own, self._most_bytes // 2), ("all", all_bytes, self._most_bytes)):
            if own and held + num_bytes > most:
                return (
                    f"{held >> 10} KiB of {whose} constraints are in use, the limit is {most >> 10} KiB: use fewer "
                    "different ones at once, or retry later"
                )
        return ""

    def hold(self, owner: object, tenant: bytes, num_bytes: int) -> None:
        """Count a constraint until `owner` is gone."""
        num_bytes = max(num_bytes, _LEAST_BYTES)
        with self._lock:
            self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + num_bytes
        weakref.finalize(owner, self._drop, tenant, num_bytes)

    def _drop(self, tenant: bytes, num_bytes: int) -> None:
        with self._lock:
            left = self._num_bytes[tenant] - num_bytes
            if left:
                self._num_bytes[tenant] = left
            else:
                del self._num_bytes[tenant]
