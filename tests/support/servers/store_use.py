"""Uses a store as the services do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from specdec.store.interface import Appended, JournalWrite, NewRequest, RequestKey, Store, StoreUnavailable
from specdec.store.urls import RedisOptions, connect
from tests.support.services.faults import eventually

PATIENT = RedisOptions(timeout_s=20)
LONG_S = 600.0
"""Seconds beyond any test's end."""
_KEY = RequestKey("tenant", "request")


@asynccontextmanager
async def connected(url: str, options: RedisOptions = PATIENT) -> AsyncIterator[Store]:
    """A store for the URL, without a request so far; closed at the end."""
    store = connect(url, options)
    yield store
    await store.close()


async def use(store: Store) -> None:
    """Use every kind of operation, and check its result."""
    begun = await store.begin(_KEY, NewRequest("owner", 1, b"params", 1, LONG_S, take_over=True, max_concurrent=9))
    write = JournalWrite(_KEY, "owner", begun.generation, 0, 0, [1, 2], [1, 1])
    assert await store.append([write]) == [Appended.STORED]
    record = await store.load(_KEY)
    assert record is not None
    assert record.token_ids == ((1, 2),)
    await store.add_prefixes("a:1", [b"digest"], LONG_S)
    assert await store.prefix_holders([b"digest"]) == [frozenset({"a:1"})]
    assert await store.replicas() == []
    assert await store.take_tokens("tenant", 1, 1, 10) == 0
    assert await store.end(_KEY, "owner", begun.generation, 0)
    await store.ping()


async def until_up(store: Store) -> None:
    """Wait until Redis answers."""

    async def is_up() -> bool:
        try:
            await store.ping()
        except StoreUnavailable:
            return False
        return True

    await eventually(is_up, "Redis answers")
