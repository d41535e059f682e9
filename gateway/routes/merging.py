"""Merge several streams or calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def all_of(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all calls, in order. The first error is raised after all others are cancelled."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The items of all streams as they come; each stream is at most one item ahead of the reader.

    The first error ends it. The caller must close it, which closes all streams.
    """
    queue: asyncio.Queue[T | None] = asyncio.Queue(maxsize=1)

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        try:
            async for item in stream:
                await queue.put(item)
        finally:
            await stream.aclose()

    pumps = [asyncio.create_task(pump(stream)) for stream in streams]
    ended = asyncio.create_task(_put_last(pumps, queue))
    try:
        while (item := await queue.get()) is not None:
            yield item
        for one in pumps:
            if one.done() and not one.cancelled():
                one.result()
    finally:
        for task in (*pumps, ended):
            task.cancel()
        await asyncio.gather(*pumps, ended, return_exceptions=True)


async def _put_last(pumps: Sequence[asyncio.Task[None]], queue: asyncio.Queue[T | None]) -> None:
    """Put None once all streams have ended, or one has failed."""
    await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
    await queue.put(None)
