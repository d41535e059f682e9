"""A real Redis that is killed, emptied, frozen, filled, set back in data or clock; alone, or with a sentinel."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import ExitStack
from pathlib import Path

from tests.support.servers.jumping_clock import JumpingClock
from tests.support.servers.redis_server import RedisServer, SentinelSetup, redis_sentinel

DUMP = "dump.rdb"
OLD_DUMP = "old.rdb"
_DOWN_AFTER_MS = 2000
"""Silence of a primary after which its replica is promoted."""


class FaultyRedis:
    """What can be done to the Redis of a fleet. Use as a context manager."""

    def __init__(self, folder: Path, *, has_sentinel: bool = False, has_clock: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._clock = JumpingClock(folder) if has_clock else None
        environment = self._clock.environment if self._clock is not None else None
        self._single = RedisServer(folder, environment=environment)
        self._has_sentinel = has_sentinel
        self._setup: SentinelSetup | None = None
        self._stack = ExitStack()

    def __enter__(self) -> FaultyRedis:
        if self._has_sentinel:
            self._setup = self._stack.enter_context(redis_sentinel(self._folder, down_after_ms=_DOWN_AFTER_MS))
        else:
            self._stack.enter_context(self._single)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def port(self) -> int:
        """Where it, or its sentinel, listens."""
        return self._single.port if self._setup is None else self._setup.sentinel.port

    def url_at(self, port: int) -> str:
        """The setting of a service that reaches it, or its sentinel, at another port."""
        url = self._single.url if self._setup is None else self._setup.url
        return url.replace(f":{self.port}", f":{port}")

    async def kill_for(self, seconds: float) -> None:
        """Kill it and start it again, empty; where there is a sentinel, as a replica of the promoted one."""
        server = self._server
        await asyncio.to_thread(server.stop)
        await asyncio.sleep(seconds)
        (self._folder / DUMP).unlink(missing_ok=True)
        await asyncio.to_thread(server.start)

    async def empty(self) -> None:
        """Delete all keys."""
        with self._server.client() as client:
            await asyncio.to_thread(client.flushall)

    async def freeze_for(self, seconds: float) -> None:
        """Stop it in its tracks for a while, connections and all."""
        server = self._server
        server.pause()
        try:
            await asyncio.sleep(seconds)
        finally:
            server.resume()

    async def full_for(self, seconds: float) -> None:
        """Let it refuse what needs memory for a while."""
        with self._server.client() as client:
            client.config_set("maxmemory", 1)
            try:
                await asyncio.sleep(seconds)
            finally:
                client.config_set("maxmemory", 0)

    async def set_clock_for(self, offset_s: float, seconds: float) -> None:
        """Let its wall clock jump, and jump back after a while."""
        assert self._clock is not None
        self._clock.jump_to(offset_s)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._clock.jump_to(0.0)

    async def remember(self) -> None:
        """Save its state, for `restore`."""
        with self._single.client() as client:
            await asyncio.to_thread(client.save)
        shutil.copy(self._folder / DUMP, self._folder / OLD_DUMP)

    async def restore(self) -> None:
        """Kill it and start it again at once with the state that was remembered."""
        await asyncio.to_thread(self._single.stop)
        shutil.copy(self._folder / OLD_DUMP, self._folder / DUMP)
        await asyncio.to_thread(self._single.start)

    def num_keys(self) -> int:
        """Keys that are there now."""
        with self._server.client() as client:
            return int(client.dbsize())

    @property
    def pid(self) -> int:
        """Its process."""
        with self._server.client() as client:
            return int(client.info("server")["process_id"])

    @property
    def _server(self) -> RedisServer:
        return self._single if self._setup is None else self._setup.master()
