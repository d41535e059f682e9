"""A real Redis that is killed, emptied, frozen, and brought back with the data of some seconds ago."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from tests.support.servers.redis_server import RedisServer

DUMP = "dump.rdb"
OLD_DUMP = "old.rdb"


class FaultyRedis:
    """What can be done to the Redis of a fleet. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._server = RedisServer(folder)

    def __enter__(self) -> FaultyRedis:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    async def kill_for(self, seconds: float) -> None:
        """Kill it and start it again, empty."""
        await asyncio.to_thread(self._server.stop)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._start, None)

    async def empty(self) -> None:
        """Delete all keys."""
        with self._server.client() as client:
            await asyncio.to_thread(client.flushall)

    async def freeze_for(self, seconds: float) -> None:
        """Stop it in its tracks for a while, connections and all."""
        self._server.pause()
        try:
            await asyncio.sleep(seconds)
        finally:
            self._server.resume()

    async def remember(self) -> None:
        """Save its state, for `restore`."""
        with self._server.client() as client:
            await asyncio.to_thread(client.save)
        shutil.copy(self._folder / DUMP, self._folder / OLD_DUMP)

    async def restore(self) -> None:
        """Kill it and start it again at once with the state that was remembered."""
        await asyncio.to_thread(self._server.stop)
        await asyncio.to_thread(self._start, self._folder / OLD_DUMP)

    def num_keys(self) -> int:
        """Keys that are there now."""
        with self._server.client() as client:
            return int(client.dbsize())

    @property
    def pid(self) -> int:
        """Its process."""
        with self._server.client() as client:
            return int(client.info("server")["process_id"])

    def _start(self, dump: Path | None) -> None:
        (self._folder / DUMP).unlink(missing_ok=True)
        if dump is not None:
            shutil.copy(dump, self._folder / DUMP)
        self._server.start()
