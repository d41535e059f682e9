"""What the journal and the quotas ask of a store beside the contract of test_store.py, in memory and on Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from specdec.store.interface import (
    Appended,
    JournalWrite,
    LimitExceeded,
    NewRequest,
    RequestHeld,
    RequestKey,
    Store,
    StoreLimits,
)
from specdec.store.memory import MemoryStore
from specdec.store.urls import RedisOptions, connect
from tests.support.servers.redis_server import RedisServer

pytestmark = pytest.mark.integration

KEY = RequestKey("tenant", "request")


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    with RedisServer(tmp_path) as server:
        store = connect(server.url, RedisOptions(timeout_s=20.0))
        yield store
        await store.close()


def new_request(owner_id: str, **changes: object) -> NewRequest:
    fields = {"owner_id": owner_id, "seed": 1, "params": b"p", "num_choices": 2, "lease_s": 30.0, **changes}
    return NewRequest(**fields)  # type: ignore[arg-type]


def write(owner_id: str, generation: int, choice: int = 1) -> JournalWrite:
    return JournalWrite(KEY, owner_id, generation, choice, 0, [1, 2], [5, 5])


async def test_a_request_that_ended_begins_anew_when_its_owner_says_so(store: Store) -> None:
    first = await store.begin(KEY, new_request("one"))
    await store.append([write("one", first.generation)])
    await store.end(KEY, "one", first.generation, 60.0)
    assert (await store.begin(KEY, new_request("two"))).record is not None
    again = await store.begin(KEY, new_request("two", restart=True, seed=2, params=b"q", num_choices=1))
    assert again.record is None
    assert again.generation > first.generation
    record = await store.load(KEY)
    assert record is not None
    assert (record.owner_id, record.seed, record.params, record.is_ended) == ("two", 2, b"q", False)
    assert record.token_ids == ((),)
    results = await store.append(
        [write("one", first.generation), write("two", again.generation), write("two", again.generation, 0)]
    )
    assert results == [Appended.NOT_OWNER, Appended.NOT_OWNER, Appended.STORED]
    # The tokens of a choice that the request has no more do not come back with a third one.
    await store.end(KEY, "two", again.generation, 60.0)
    await store.begin(KEY, new_request("three", restart=True))
    record = await store.load(KEY)
    assert record is not None
    assert record.token_ids == ((), ())


async def test_beginning_anew_takes_nothing_from_an_owner_who_is_alive(store: Store) -> None:
    await store.begin(KEY, new_request("one"))
    with pytest.raises(RequestHeld):
        await store.begin(KEY, new_request("two", restart=True))
    taken = await store.begin(KEY, new_request("two", restart=True, take_over=True))
    assert await store.append([write("two", taken.generation)]) == [Appended.STORED]


async def test_tokens_are_given_back_up_to_the_burst(store: Store) -> None:
    assert await store.take_tokens("a", 80, 0.001, 100) == 0
    with pytest.raises(LimitExceeded):
        await store.take_tokens("a", -50, 0.001, 100)
    assert await store.take_tokens("a", -50, 0.001, 100, force=True) == 0
    assert await store.take_tokens("a", 70, 0.001, 100) == 0
    assert await store.take_tokens("a", -1000, 0.001, 100, force=True) == 0
    assert await store.take_tokens("a", 100, 0.001, 100) == 0
    assert await store.take_tokens("a", 1, 0.001, 100) == pytest.approx(1000, rel=0.01)


async def test_a_store_in_memory_forgets_the_oldest_of_too_many_ended_requests() -> None:
    store = MemoryStore(StoreLimits(max_ended=2))
    keys = [RequestKey("tenant", name) for name in "abcd"]
    for key in keys:
        begun = await store.begin(key, new_request("one"))
        await store.end(key, "one", begun.generation, 60.0)
        if key.request_id == "c":
            await store.begin(keys[1], new_request("one", restart=True))
    known = [key.request_id for key in keys if await store.load(key) is not None]
    assert known == ["b", "c", "d"]
