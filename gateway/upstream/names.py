"""Watch coordinators' DNS names, to find new addresses before an old one fails."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

import structlog

DNS_PREFIX = "dns:///"
INTERVAL_S = 5.0
_log = structlog.get_logger(__name__)


class NameWatch:
    """Resolves names at intervals: gRPC itself does so only when a connection breaks."""

    def __init__(self, addresses: Sequence[str], on_changed: Callable[[str], Awaitable[None]]) -> None:
        """Resolve nothing yet.

        Args:
            addresses: those of the form dns:///name:port are watched.
            on_changed: called with an address when its name resolves to other addresses than before.
        """
        self._known: dict[str, frozenset[str]] = {}
        self._failing: set[str] = set()
        """Names that stood for nothing at the last look."""
        self._names = [address for address in addresses if address.startswith(DNS_PREFIX)]
        self._on_changed = on_changed

    def num_behind(self, address: str) -> int:
        """Addresses that a name stands for; 1 for an address."""
        return len(self._known.get(address, (address,)))

    async def run(self) -> None:
        """Watch until cancelled; returns at once without names."""
        while self._names:
            for address in self._names:
                await self.look(address)
            await asyncio.sleep(INTERVAL_S)

    async def look(self, address: str) -> None:
        """Resolve one name; a failure counts as no change."""
        name, _, port = address.removeprefix(DNS_PREFIX).rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            if address not in self._failing:  # Once: the name of a model that is scaled to zero fails for hours.
                _log.warning("lookup_failed", name=name, error=str(error))
            self._failing.add(address)
            # Its first address is a change: gRPC itself looks again after up to two minutes.
            self._known.setdefault(address, frozenset())
            return
        addresses = frozenset(str(where[0]) for *_, where in found)
        before = self._known.get(address, addresses)
        self._known[address] = addresses
        self._failing.discard(address)
        if addresses != before:
            _log.info("coordinators_changed", name=name, num_addresses=len(addresses))
            await self._on_changed(address)
