"""Where the replicas are: addresses as configured, and those behind DNS names, looked up again and again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

_DNS_PREFIX = "dns:///"
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one replica listens.

    Attributes:
        address: host:port.
        server_name: the name that its certificate must have; None: the host.
    """

    address: str
    server_name: str | None = None


class Discovery:
    """Turns entries into endpoints. An entry is host:port, or dns:///name:port, which stands for all its addresses.

    A name that cannot be looked up keeps the addresses it had: a name server that fails takes no replica away.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = entries
        self._found: dict[str, list[Endpoint]] = {
            entry: [] if entry.startswith(_DNS_PREFIX) else [Endpoint(entry)] for entry in entries
        }

    @property
    def is_static(self) -> bool:
        """Whether looking again can find nothing new."""
        return not any(entry.startswith(_DNS_PREFIX) for entry in self._entries)

    @property
    def endpoints(self) -> list[Endpoint]:
        """What was found last, each address once, in the order of the entries."""
        by_address: dict[str, Endpoint] = {}
        for entry in self._entries:
            for endpoint in self._found[entry]:
                by_address.setdefault(endpoint.address, endpoint)
        return list(by_address.values())

    async def refresh(self) -> list[Endpoint]:
        """Look up all names; returns all endpoints."""
        for entry in self._entries:
            if entry.startswith(_DNS_PREFIX):
                await self._look_up(entry)
        return self.endpoints

    async def run(self, interval_s: float, on_found: Callable[[list[Endpoint]], None]) -> None:
        """Report the endpoints now, and for as long as any is behind a name every `interval_s`, until cancelled."""
        on_found(self.endpoints if self.is_static else await self.refresh())
        while not self.is_static:
            await asyncio.sleep(interval_s)
            on_found(await self.refresh())

    async def _look_up(self, entry: str) -> None:
        name, _, port = entry.removeprefix(_DNS_PREFIX).rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        except OSError as error:
            _log.warning("lookup_failed", name=name, error=str(error))
            return
        addresses = sorted({_join(str(where[0]), int(where[1])) for *_, where in found})
        self._found[entry] = [Endpoint(address, name) for address in addresses]


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
