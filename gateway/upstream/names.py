"""Coordinators that are behind a name: those that come later are found, and not only when another one goes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

import structlog

DNS_PREFIX = "dns:///"
INTERVAL_S = 5.0
_log = structlog.get_logger(__name__)


class NameWatch:
    """Looks names up again and again: gRPC itself looks only when a connection breaks."""

    def __init__(self, addresses: Sequence[str], on_changed: Callable[[str], Awaitable[None]]) -> None:
        """Look nothing up yet.

        Args:
            addresses: those that are dns:///name:port are watched.
            on_changed: called with one of them when its name stands for other addresses than before.
        """
        self._known: dict[str, frozenset[str]] = {}
        self._names = [address for address in addresses if address.startswith(DNS_PREFIX)]
        self._on_changed = on_changed

    async def run(self) -> None:
        """Watch until cancelled; returns at once when there is no name."""
        while self._names:
            for address in self._names:
                await self.look(address)
            await asyncio.sleep(INTERVAL_S)

    async def look(self, address: str) -> None:
        """Look one name up. One that cannot be looked up has not changed."""
        name, _, port = address.removeprefix(DNS_PREFIX).rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            _log.warning("lookup_failed", name=name, error=str(error))
            return
        addresses = frozenset(str(where[0]) for *_, where in found)
        before = self._known.get(address, addresses)
        self._known[address] = addresses
        if addresses != before:
            _log.info("coordinators_changed", name=name, num_addresses=len(addresses))
            await self._on_changed(address)
