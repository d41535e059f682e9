"""The store that coordinators share, a round trip away: it may be silent, lose its data, or answer nobody in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from specdec.store.interface import StoreUnavailable
from specdec.store.memory import MemoryStore
from tests.protocol.simulation.virtual_loop import Process, VirtualLoop, current_process

_ROUND_TRIP_S = 0.001
_TIMEOUT_S = 0.25
_OPERATIONS = (
    "announce", "withdraw", "replicas", "registered", "add_prefixes", "prefix_holders", "begin", "append", "renew",
    "end", "abort", "load", "take_tokens", "ping",
)  # fmt: skip


class SharedStore:
    """The server. Data are those of the product's store in memory, which tests hold to be equal to the one in Redis."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.is_silent = False
        """It does nothing and answers nobody."""
        self.is_deaf = False
        """It does what it is asked, and its answers get lost."""
        self.unreached: set[str] = set()
        """Names of processes that do not reach it."""
        self.on_change: Callable[[], None] = lambda: None
        self.lose_data()

    def lose_data(self) -> None:
        """It was restarted without persistence, or a replica without the latest writes took its place."""
        self.memory = MemoryStore(clock=self.loop.time)


class StoreClient:
    """One coordinator's connection to it: a `specdec.store.interface.Store`."""

    tls_files = None

    def __init__(self, server: SharedStore) -> None:
        process = current_process()
        assert process is not None
        self._server = server
        self._process: Process = process
        for name in _OPERATIONS:
            setattr(self, name, self._operation(name))

    async def close(self) -> None:
        """There is nothing to close."""

    def _operation(self, name: str) -> Callable[..., Any]:
        async def run(*args: Any) -> Any:
            server = self._server
            await asyncio.sleep(_ROUND_TRIP_S / 2)
            if not self._process.is_alive or server.is_silent or self._process.name in server.unreached:
                await asyncio.sleep(_TIMEOUT_S)
                raise StoreUnavailable(f"{name}: no answer in time")
            result = await getattr(server.memory, name)(*args)
            server.on_change()
            if server.is_deaf:
                await asyncio.sleep(_TIMEOUT_S)
                raise StoreUnavailable(f"{name}: no answer in time")
            await asyncio.sleep(_ROUND_TRIP_S / 2)
            return result

        return run
