"""Two coordinators on one Redis, and its journal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from specdec.store.interface import JournalRecord, RequestKey
from specdec.store.urls import RedisOptions, connect
from tests.support.scripted.target import ScriptedTarget
from tests.support.servers.redis_server import RedisServer
from tests.support.services.coordinator_harness import Harness, running
from tests.support.services.faults import eventually

# Seconds beyond any test's end.
LONG_S = 600.0
# Renewed every second, so that a coordinator without writes notices changes of Redis and of its requests.
SHORT_LEASE_S = 3.0
PATIENT = RedisOptions(timeout_s=20.0)


@asynccontextmanager
async def coordinators(
    target: ScriptedTarget, redis_server: RedisServer, **changes: Any
) -> AsyncIterator[tuple[Harness, Harness]]:
    """Two coordinators on one target and one Redis."""
    settings = {"redis_url": redis_server.url, "redis_timeout_s": 20.0, "journal_lease_s": LONG_S, **changes}
    async with (
        running([target], owner_id="one", **settings) as one,
        running([target], owner_id="two", **settings) as two,
    ):
        yield one, two


async def journalled(redis_server: RedisServer, request_id: str) -> JournalRecord | None:
    """Redis's record of a request of the nameless tenant."""
    store = connect(redis_server.url, PATIENT)
    try:
        return await store.load(RequestKey("", request_id))
    finally:
        await store.close()


async def journal_has(redis_server: RedisServer, request_id: str, token_ids: list[int]) -> None:
    """Wait until a request's tokens in Redis are `token_ids`."""

    async def has() -> bool:
        record = await journalled(redis_server, request_id)
        return record is not None and list(record.token_ids[0]) == token_ids

    await eventually(has, f"{len(token_ids)} tokens are in the journal")


async def metric_is(harness: Harness, name: str, value: float) -> None:
    """Wait until a coordinator's metric has this value."""

    async def is_so() -> bool:
        return harness.metric(name) == value

    await eventually(is_so, f"{name} is {value:g}")
