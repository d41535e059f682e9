"""Addresses of replicas: configured, resolved from DNS names, and from the shared registry."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from specdec.wire.settings import join_address

_DNS_PREFIX = "dns:///"
_SPREAD = (0.8, 1.0)
"""Random factors of an interval: a fleet that was started together must not look together."""
_LEAST_S = 1.0
"""Seconds between two looks at least, where one was asked for."""
_HELD_UP_S = 1.0
"""Seconds for which what others found waits for a refresher that hangs."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """The address of one replica."""

    address: str
    """host:port."""
    server_name: str | None = None
    """Name that its certificate must have; None: the host."""
    is_registered: bool = False
    """Found in the registry, and nowhere else."""


class Discovery:
    """Finds the replicas of one role. An entry is host:port, or dns:///name:port for all addresses of a name.

    If a look-up fails, the name keeps its former addresses: a broken name server removes no replica.
    """

    def __init__(
        self, entries: Sequence[str], registered: Callable[[], Sequence[ReplicaAddress]] | None = None
    ) -> None:
        """Find the replicas of `entries` and those that `registered` returns: the registry's last known ones."""
        self._entries = entries
        self._failing: set[str] = set()
        """Entries whose last look-up failed."""
        self._registered = registered or tuple
        self._found: dict[str, list[ReplicaAddress]] = {
            entry: [] if entry.startswith(_DNS_PREFIX) else [ReplicaAddress(entry)] for entry in entries
        }

    @property
    def has_names(self) -> bool:
        """Whether a new look-up can find other addresses."""
        return any(entry.startswith(_DNS_PREFIX) for entry in self._entries)

    @property
    def endpoints(self) -> list[ReplicaAddress]:
        """The last known endpoints, each address once: entries in their order, then those only registered."""
        by_address: dict[str, ReplicaAddress] = {}
        for endpoint in (*itertools.chain.from_iterable(self._found[e] for e in self._entries), *self._registered()):
            by_address.setdefault(endpoint.address, endpoint)
        return list(by_address.values())

    async def refresh(self) -> list[ReplicaAddress]:
        """Look up all names; returns all endpoints."""
        for entry in self._entries:
            if entry.startswith(_DNS_PREFIX):
                await self._look_up(entry)
        return self.endpoints

    async def _look_up(self, entry: str) -> None:
        name, _, port = entry.removeprefix(_DNS_PREFIX).rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the latter: no such name can exist
            if entry not in self._failing:  # Once: the name of a service that is scaled to zero fails for hours.
                _log.warning("lookup_failed", name=name, error=str(error))
            self._failing.add(entry)
            return
        self._failing.discard(entry)
        addresses = sorted({join_address(str(where[0]), int(where[1])) for *_, where in found})
        self._found[entry] = [ReplicaAddress(address, name) for address in addresses]


async def keep_finding(
    interval_s: float,
    refreshers: Sequence[Callable[[], Awaitable[object]]],
    on_found: Callable[[], None],
    wanted: asyncio.Event | None = None,
) -> None:
    """Call all `refreshers`, then `on_found`, now and about every `interval_s` until cancelled. Faults are logged.

    A refresher that hangs, as a name server may, holds up the others for a second, and is not called again meanwhile.
    `wanted`: set by who wants a look sooner.
    """
    looks: dict[int, asyncio.Task[None]] = {}
    try:
        while True:
            for number, refresh in enumerate(refreshers):
                if number not in looks or looks[number].done():
                    looks[number] = asyncio.create_task(_look(refresh))
            if looks:
                await asyncio.wait(looks.values(), timeout=_HELD_UP_S)
            try:
                on_found()
            except Exception as error:
                _log.error("discovery_fault", exc_info=error)
            pause_s = interval_s * random.uniform(*_SPREAD)
            if wanted is None:
                await asyncio.sleep(pause_s)
                continue
            await asyncio.sleep(min(_LEAST_S, pause_s))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wanted.wait(), pause_s)
            wanted.clear()
    finally:
        for look in looks.values():
            look.cancel()


async def _look(refresh: Callable[[], Awaitable[object]]) -> None:
    try:
        await refresh()
    except Exception as error:
        _log.error("discovery_fault", exc_info=error)
