"""Redis may evict any key, so each key may be missing while those that belong to it are there; and what is large."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from specdec.store.interface import Appended, JournalWrite, Lease, NewRequest, ReplicaRecord, RequestKey, Store
from specdec.store.keys import StoreKeys
from specdec.store.urls import RedisOptions, connect
from specdec.v1.common_pb2 import GetReplicaInfoResponse
from tests.support.servers.redis_server import RedisServer

KEY = RequestKey("tenant", "request")
HEAD, LIVE = StoreKeys().request(KEY)
EXPIRIES, RECORDS = StoreKeys().replicas()
LONG_S = 600.0


def request(**changes: object) -> NewRequest:
    fields = {"owner_id": "a", "seed": 7, "params": b"p", "num_choices": 2, "lease_s": LONG_S, **changes}
    return NewRequest(**fields)  # type: ignore[arg-type]


def write(generation: int, start: int, tokens: list[int], choice: int = 0) -> JournalWrite:
    return JournalWrite(KEY, "a", generation, choice, start, tokens, [1] * len(tokens))


def replica(address: str) -> ReplicaRecord:
    return ReplicaRecord("target", address, "i", "ready", GetReplicaInfoResponse())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    """Meddles. When the test ends, every key must have an expiry."""
    with server.client() as plain:
        plain.flushall()
        yield plain
        assert [key for key in plain.scan_iter() if plain.pttl(key) == -1] == []


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[Store]:
    made = connect(server.url, RedisOptions(timeout_s=20))
    yield made
    await made.close()


async def test_a_choice_whose_tokens_were_evicted_asks_for_them_from_the_first(
    store: Store, client: redis.Redis
) -> None:
    begun = await store.begin(KEY, request())
    await store.append([write(begun.generation, 0, [1, 2]), write(begun.generation, 0, [3], choice=1)])
    client.delete(f"{HEAD}:tokens:0")
    record = await store.load(KEY)
    assert record is not None
    assert record.token_ids == ((), (3,))
    assert await store.append([write(begun.generation, 2, [4])]) == [Appended.GAP]
    assert await store.append([write(begun.generation, 0, [1, 2, 4])]) == [Appended.STORED]
    record = await store.load(KEY)
    assert record is not None
    assert record.token_ids == ((1, 2, 4), (3,))


async def test_a_request_whose_head_was_evicted_is_nobodys_and_starts_anew(store: Store, client: redis.Redis) -> None:
    begun = await store.begin(KEY, request())
    await store.append([write(begun.generation, 0, [1, 2])])
    client.delete(HEAD)
    assert await store.load(KEY) is None
    assert await store.append([write(begun.generation, 2, [3])]) == [Appended.NOT_OWNER]
    assert await store.renew([Lease(KEY, "a", begun.generation)]) == [False]
    assert not await store.end(KEY, "a", begun.generation, LONG_S)
    again = await store.begin(KEY, request())
    assert again.record is None
    assert again.generation > begun.generation
    record = await store.load(KEY)
    assert record is not None
    assert record.token_ids == ((), ())


async def test_a_tenant_whose_count_was_evicted_is_counted_again_by_the_next_writes(
    store: Store, client: redis.Redis
) -> None:
    begun = await store.begin(KEY, request(max_concurrent=1))
    client.delete(LIVE)
    await store.append([write(begun.generation, 0, [1])])
    assert client.zcard(LIVE) == 1


async def test_a_registry_that_lost_half_of_itself_is_whole_after_the_next_announcements(
    store: Store, client: redis.Redis
) -> None:
    for lost in (EXPIRIES, RECORDS):
        await store.announce(replica("a:1"), LONG_S)
        await store.announce(replica("gone:1"), LONG_S)
        client.delete(lost)
        assert await store.replicas() == []
        await store.announce(replica("a:1"), LONG_S)
        assert await store.replicas() == [replica("a:1")]
        # Records of which nobody knows when they expire do not pile up.
        assert client.hlen(RECORDS) == 1


async def test_all_keys_of_a_request_live_as_long_as_its_lease_and_the_time_to_keep_it(
    store: Store, client: redis.Redis
) -> None:
    begun = await store.begin(KEY, request())
    await store.append([write(begun.generation, 0, [1]), write(begun.generation, 0, [1], choice=1)])
    needed_ms = (LONG_S + 600) * 1000
    keys = [HEAD, f"{HEAD}:tokens:0", f"{HEAD}:tokens:1"]
    for key in keys:
        client.pexpire(key, 1_000_000)
    # One choice is done, the other one goes on: all of them must be there for whoever takes over.
    await store.append([write(begun.generation, 1, [2])])
    assert all(needed_ms - 30_000 < client.pttl(key) <= needed_ms * 1.1 for key in keys)
    assert client.pttl(LIVE) > LONG_S * 1000 - 30_000


async def test_a_choice_may_have_a_million_tokens(store: Store) -> None:
    begun = await store.begin(KEY, request())
    most = 1 << 20
    assert await store.append([write(begun.generation, 0, list(range(most - 1)))]) == [Appended.STORED]
    assert await store.append([write(begun.generation, most - 1, [2**32 - 1])]) == [Appended.STORED]
    record = await store.load(KEY)
    assert record is not None
    assert record.token_ids[0] == (*range(most - 1), 2**32 - 1)
