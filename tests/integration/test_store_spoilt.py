"""What somebody else wrote into Redis, or broke there: read as far as it can be read, and nobody else's loss."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from specdec.store.interface import NewRequest, ReplicaRecord, RequestKey, Store, StoreUnavailable
from specdec.store.keys import StoreKeys
from specdec.store.urls import RedisOptions, connect
from specdec.v1.common_pb2 import GetReplicaInfoResponse
from tests.support.servers.redis_server import RedisServer

LONG_S = 600.0
KEY = RequestKey("tenant", "one")
GOOD = ReplicaRecord("target", "127.0.0.1:1", "i1", "ready", GetReplicaInfoResponse(version="1.2"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def meddler(server: RedisServer) -> Iterator[redis.Redis]:
    with server.client() as client:
        client.flushdb()
        yield client


@pytest.fixture
async def store(server: RedisServer, meddler: redis.Redis) -> AsyncIterator[Store]:
    store = connect(server.url, RedisOptions(timeout_s=20))
    yield store
    await store.close()


@pytest.mark.parametrize("level", ["-inf", "inf", "nan", "-1e308", "x", "", "9" * 400])
async def test_a_bucket_whose_level_is_none_is_taken_for_a_new_one(
    store: Store, meddler: redis.Redis, level: str
) -> None:
    (key,) = StoreKeys().quota("t")
    meddler.hset(key, mapping={"level": level, "at": "0"})
    assert await store.take_tokens("t", 10, 0.01, 10) == 0
    assert await store.take_tokens("t", 1, 0.01, 10) == pytest.approx(100, abs=10)


@pytest.mark.parametrize("at", ["-inf", "inf", "nan", "x", ""])
async def test_a_bucket_of_no_time_is_usable(store: Store, meddler: redis.Redis, at: str) -> None:
    (key,) = StoreKeys().quota("t")
    meddler.hset(key, mapping={"level": "10", "at": at})
    assert await store.take_tokens("t", 10, 0.01, 10) == 0
    assert await store.take_tokens("t", 1, 0.01, 10) == pytest.approx(100, abs=10)


@pytest.mark.parametrize(
    "record",
    [
        "[" * 100_000,
        '{"role":' * 100_000,
        json.dumps({"role": "target", "address": "\ud800:80", "instance_id": "i", "state": "ready", "info": ""}),
        json.dumps({"role": "target", "address": "a" * 600 + ":80", "instance_id": "i", "state": "ready", "info": ""}),
        json.dumps({"role": "target", "address": "a:80", "instance_id": "i", "state": "\x1b[2J", "info": ""}),
    ],
)
async def test_a_registration_that_cannot_be_shown_hides_no_other(
    store: Store, meddler: redis.Redis, record: str
) -> None:
    await store.announce(GOOD, LONG_S)
    expiries, records = StoreKeys().replicas()
    meddler.zadd(expiries, {"spoilt": 1e15})
    meddler.hset(records, "spoilt", record)
    assert await store.replicas() == [GOOD]


@pytest.mark.parametrize("num_choices", ["1000000000", "inf", "nan", "-1", "x"])
async def test_a_record_of_a_thousand_million_choices_holds_nobody_up(
    store: Store, meddler: redis.Redis, num_choices: str
) -> None:
    new = NewRequest("owner", 1, b"params", 1, LONG_S, take_over=True)
    await store.begin(KEY, new)
    meddler.hset(StoreKeys().request(KEY)[0], "num_choices", num_choices)
    began_s = time.monotonic()
    with pytest.raises(StoreUnavailable):
        await store.load(KEY)
    with pytest.raises(StoreUnavailable):
        await store.begin(KEY, new)
    assert time.monotonic() - began_s < 5.0  # a loop of so many would take minutes


@pytest.mark.parametrize("field", ["owner", "generation", "seed", "params", "num_choices", "ended"])
async def test_a_record_that_lacks_something_cannot_be_read_or_has_a_value_for_it(
    store: Store, meddler: redis.Redis, field: str
) -> None:
    await store.begin(KEY, NewRequest("owner", 1, b"params", 1, LONG_S, take_over=True))
    meddler.hdel(StoreKeys().request(KEY)[0], field)
    try:
        record = await store.load(KEY)
    except StoreUnavailable:
        return
    assert record is None or (record.params == b"params" and record.seed == 1 and not record.is_ended)
