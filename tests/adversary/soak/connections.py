"""Connections of tenants' clients, which are given up while streams still run over them, and closed when none does."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

from specdec.client import Client, ClientSettings

Name = tuple[str, str]
"""A client, which has links of its own, and the API key that it uses."""


class Connections:
    """At most one current connection per name."""

    def __init__(self, address_for: Callable[[str], str]) -> None:
        self._address_for = address_for
        self._current: dict[Name, Client] = {}
        self._uses: Counter[Client] = Counter()
        self.num_opened = 0

    @asynccontextmanager
    async def use(self, name: Name) -> AsyncIterator[Client]:
        """The current connection, opened where there is none; it stays open for as long as this is entered."""
        client = self._current.get(name)
        if client is None:
            at, key = name
            client = self._current[name] = Client(self._address_for(at), ClientSettings(api_key=key))
            self.num_opened += 1
        self._uses[client] += 1
        try:
            yield client
        finally:
            self._uses[client] -= 1
            if self._current.get(name) is not client:
                await self._close_unused(client)

    async def give_up(self, name: Name) -> None:
        """Whoever uses this name next gets a new connection."""
        client = self._current.pop(name, None)
        if client is not None:
            await self._close_unused(client)

    async def give_up_all_but(self, keys: Collection[str]) -> None:
        """Give up those of other API keys."""
        for name in [name for name in self._current if name[1] not in keys]:
            await self.give_up(name)

    async def close(self) -> None:
        """Close all, used ones too."""
        for client in {*self._current.values(), *self._uses}:
            await client.close()

    async def _close_unused(self, client: Client) -> None:
        if not self._uses[client]:
            del self._uses[client]
            await client.close()
