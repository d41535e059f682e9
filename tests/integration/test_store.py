"""The store's contract, held by all that can be behind it: memory, a single Redis, a cluster of three masters."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator

import pytest

from specdec.store.interface import (
    Appended,
    JournalWrite,
    Lease,
    LimitExceeded,
    NewRequest,
    ReplicaRecord,
    RequestHeld,
    RequestKey,
    Store,
    StoreLimits,
    TooManyConcurrent,
)
from specdec.store.memory import MemoryStore
from specdec.store.urls import RedisOptions, connect
from specdec.v1.common_pb2 import GetReplicaInfoResponse, LoadReport
from tests.support.servers.redis_server import RedisCluster, RedisServer, redis_cluster
from tests.support.services.faults import eventually

pytestmark = pytest.mark.smoke
KEY = RequestKey("ten{ant}:a", "request/1")
LIMITS = StoreLimits(max_replicas=3, max_holders=2, max_digests=64, max_tokens=100, max_choices=4, max_params_bytes=64)
# Longer than any test takes.
LONG_S = 600.0


def request(owner: str = "a", **changes: object) -> NewRequest:
    fields = {"seed": 2**64 - 1, "params": b"\0params", "num_choices": 2, "lease_s": LONG_S, **changes}
    return NewRequest(owner_id=owner, **fields)  # type: ignore[arg-type]


def write(generation: int, start: int, *tokens: int, owner: str = "a", choice: int = 0) -> JournalWrite:
    return JournalWrite(KEY, owner, generation, choice, start, tokens, [2] * len(tokens))


def replica(address: str, state: str = "ready") -> ReplicaRecord:
    return ReplicaRecord("target", address, "i1", state, GetReplicaInfoResponse(version="1.2"))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture(params=["memory", "redis", "cluster"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """An empty store. When the test ends, everything in it must expire and bear the prefix."""
    if request.param == "memory":
        yield MemoryStore(LIMITS)
        return
    place: RedisServer | RedisCluster
    if request.param == "redis":
        place = request.getfixturevalue("single")
        servers = [place]
    else:
        place = request.getfixturevalue("cluster")
        servers = place.masters
    for server in servers:
        with server.client() as client:
            client.flushall()
    made = connect(place.url, RedisOptions(timeout_s=20), LIMITS)
    yield made
    for server in servers:
        with server.client() as client:
            keys = list(client.scan_iter())
            assert [key for key in keys if client.pttl(key) == -1] == [], "every key expires"
            assert all(key.startswith(b"specdec:v1:") for key in keys)
    await made.close()


async def test_replicas_are_listed_until_withdrawn_or_expired(store: Store) -> None:
    await store.announce(replica("b:1"), LONG_S)
    await store.announce(replica("a:1"), LONG_S)
    await store.announce(replica("a:1", "draining"), LONG_S)
    assert await store.replicas() == [replica("a:1", "draining"), replica("b:1")]
    await store.withdraw("target", "b:1")
    await store.announce(replica("a:1"), 0.05)

    async def is_empty() -> bool:
        return await store.replicas() == []

    await eventually(is_empty, "the last replica expires")


async def test_the_registry_is_returned_again_when_more_than_loads_has_changed(store: Store) -> None:
    loaded = dataclasses.replace(
        replica("a:1"), info=GetReplicaInfoResponse(version="1.2", load=LoadReport(num_running=7))
    )

    async def changed(known: str) -> tuple[str, bool]:
        version, records = await store.registered(known)
        assert records is None or records == await store.replicas()
        return version, records is not None

    first, _ = await changed("")
    await store.announce(replica("a:1"), LONG_S)
    second, is_changed = await changed(first)
    assert is_changed
    await store.announce(loaded, LONG_S)
    assert await changed(second) == (second, False)
    await store.announce(replica("a:1", "draining"), LONG_S)
    third, is_changed = await changed(second)
    assert is_changed
    await store.withdraw("target", "a:1")
    fourth, is_changed = await changed(third)
    assert is_changed
    await store.announce(replica("b:1"), 0.05)

    async def is_back() -> bool:
        return (await changed(fourth))[1] and await store.replicas() == []

    await eventually(is_back, "one that came and expired is a change")
    last, _ = await changed("")
    await store.announce(replica("a:1", "draining"), LONG_S)
    assert (await changed(third))[1] and (await changed(last))[1], "it was away"


async def test_a_full_registry_forgets_who_would_expire_first(store: Store) -> None:
    for number, address in enumerate(["a:1", "b:1", "c:1", "d:1"]):
        await store.announce(replica(address), LONG_S - number)
    assert [one.address for one in await store.replicas()] == ["a:1", "b:1", "c:1"]


async def test_holders_of_a_prefix_are_bounded_and_expire(store: Store) -> None:
    for number, name in enumerate("xyz"):
        await store.add_prefixes(name, [b"d1"], LONG_S + number)
    await store.add_prefixes("x", [b"d2"], 0.05)
    assert await store.prefix_holders([b"d1", b"none"]) == [frozenset("yz"), frozenset()]

    async def is_forgotten() -> bool:
        return await store.prefix_holders([b"d2"]) == [frozenset()]

    await eventually(is_forgotten, "the holder expires")


async def test_each_holder_of_a_prefix_expires_by_itself(store: Store) -> None:
    await store.add_prefixes("lasting", [b"d"], LONG_S)
    await store.add_prefixes("brief", [b"d"], 0.05)

    async def is_alone() -> bool:
        return await store.prefix_holders([b"d"]) == [frozenset({"lasting"})]

    await eventually(is_alone, "one holder expires and the other does not")


async def test_prefixes_anywhere_in_a_cluster_are_answered_in_the_order_asked(store: Store) -> None:
    digests = [bytes([number]) * 8 for number in range(64)]
    await store.add_prefixes("even", digests[::2], LONG_S)
    await store.add_prefixes("odd", digests[1::2], LONG_S)
    assert await store.prefix_holders(digests) == [frozenset({"even"}), frozenset({"odd"})] * 32
    assert await store.prefix_holders([]) == []


async def test_a_request_is_journalled_and_read_back(store: Store) -> None:
    assert await store.load(KEY) is None
    begun = await store.begin(KEY, request())
    assert begun.record is None
    generation = begun.generation
    assert await store.append([write(generation, 0, 1, 2**32 - 1), write(generation, 0, 7, choice=1)]) == [1, 1]
    assert await store.append([write(generation, 0, 1, 2**32 - 1), write(generation, 2, 3)]) == [1, 1]
    assert await store.append([write(generation, 9, 1)]) == [Appended.GAP]
    assert await store.append([write(generation, 3)]) == [Appended.STORED]
    record = await store.load(KEY)
    assert record is not None
    assert (record.seed, record.params, record.generation) == (2**64 - 1, b"\0params", generation)
    assert (record.owner_id, record.is_ended) == ("a", False)
    assert record.token_ids == ((1, 2**32 - 1, 3), (7,))
    assert record.origins == ((2, 2, 2), (2,))


async def test_writes_of_one_batch_do_not_depend_on_each_other(store: Store) -> None:
    keys = [RequestKey(f"tenant {number}", "r") for number in range(64)]
    begun = [await store.begin(key, request()) for key in keys]
    writes = [
        JournalWrite(key, "a", one.generation + number % 2, 0, 0, [number], [1])
        for number, (key, one) in enumerate(zip(keys, begun, strict=True))
    ]
    assert await store.append(writes) == [Appended.STORED, Appended.NOT_OWNER] * 32
    records = [await store.load(key) for key in keys]
    assert [record and record.token_ids[0] for record in records] == [(n,) if n % 2 == 0 else () for n in range(64)]
    assert await store.append([]) == []


async def test_an_owner_that_was_replaced_can_write_nothing(store: Store) -> None:
    first = await store.begin(KEY, request())
    await store.append([write(first.generation, 0, 5)])
    with pytest.raises(RequestHeld) as held:
        await store.begin(KEY, request("b"))
    assert held.value.owner_id == "a"
    second = await store.begin(KEY, request("b", take_over=True))
    assert second.generation > first.generation
    assert second.record is not None
    assert second.record.token_ids == ((5,), ())
    assert await store.append([write(first.generation, 1, 6)]) == [Appended.NOT_OWNER]
    assert await store.renew([Lease(KEY, "a", first.generation), Lease(KEY, "b", second.generation)]) == [False, True]
    assert not await store.end(KEY, "a", first.generation, 60)
    assert await store.end(KEY, "b", second.generation, 60)
    ended = await store.begin(KEY, request("c"))
    assert ended.record is not None
    assert ended.record.is_ended
    assert await store.append([write(second.generation, 1, 6, owner="b")]) == [Appended.NOT_OWNER]


async def test_an_aborted_request_takes_no_writes_until_it_is_begun_again(store: Store) -> None:
    assert not await store.abort(KEY)
    first = await store.begin(KEY, request())
    await store.append([write(first.generation, 0, 5)])
    assert await store.abort(KEY)
    assert await store.abort(KEY)
    assert await store.append([write(first.generation, 1, 6)]) == [Appended.NOT_OWNER]
    assert await store.renew([Lease(KEY, "a", first.generation)]) == [False]
    record = await store.load(KEY)
    assert record is not None
    assert (record.is_aborted, record.is_ended, record.owner_id, record.token_ids[0]) == (True, False, "a", (5,))
    with pytest.raises(RequestHeld):
        await store.begin(KEY, request("b"))
    again = await store.begin(KEY, request())
    assert await store.append([write(again.generation, 1, 6)]) == [Appended.STORED]
    assert await store.abort(KEY)
    assert await store.end(KEY, "a", again.generation, LONG_S)
    assert not await store.abort(KEY)


async def test_a_request_whose_lease_ran_out_cannot_be_aborted(store: Store) -> None:
    await store.begin(KEY, request(lease_s=0.05))

    async def is_refused() -> bool:
        return not await store.abort(KEY)

    await eventually(is_refused, "the lease runs out")


async def test_a_lease_that_ran_out_can_be_had_by_another(store: Store) -> None:
    first = await store.begin(KEY, request(lease_s=0.05))
    await store.append([write(first.generation, 0, 1, 2)])

    async def is_had() -> bool:
        try:
            begun = await store.begin(KEY, request("b"))
        except RequestHeld:
            return False
        assert begun.record is not None
        assert begun.record.token_ids == ((1, 2), ())
        assert await store.end(KEY, "b", begun.generation, 0)
        return True

    await eventually(is_had, "the lease runs out")
    assert await store.load(KEY) is None


async def test_a_request_that_ended_is_kept_as_long_as_asked(store: Store) -> None:
    begun = await store.begin(KEY, request())
    assert await store.end(KEY, "a", begun.generation, 0.05)

    async def is_forgotten() -> bool:
        return await store.load(KEY) is None

    await eventually(is_forgotten, "the ended request expires")
    again = await store.begin(KEY, request("b"))
    assert again.record is None
    assert again.generation > begun.generation


async def test_of_owners_that_race_exactly_one_wins(store: Store) -> None:
    results = await asyncio.gather(*(store.begin(KEY, request(f"o{i}")) for i in range(20)), return_exceptions=True)
    assert sum(isinstance(result, RequestHeld) for result in results) == 19


async def test_a_tenant_has_no_more_live_requests_than_allowed(store: Store) -> None:
    keys = [RequestKey("t", f"r{i}") for i in range(10)]
    results = await asyncio.gather(
        *(store.begin(key, request(max_concurrent=3)) for key in keys), return_exceptions=True
    )
    assert sum(isinstance(result, TooManyConcurrent) for result in results) == 7
    won = [(key, result) for key, result in zip(keys, results, strict=True) if not isinstance(result, BaseException)]
    await store.begin(won[0][0], request(max_concurrent=3))
    assert await store.end(won[1][0], "a", won[1][1].generation, LONG_S)
    await store.begin(RequestKey("t", "more"), request(max_concurrent=3))


async def test_a_bucket_grants_its_burst_and_then_asks_to_wait(store: Store) -> None:
    assert await store.take_tokens("t", 10, 0.01, 10) == 0
    assert await store.take_tokens("t", 1, 0.01, 10) == pytest.approx(100, abs=10)
    assert await store.take_tokens("t", 5, 0.01, 10, force=True) == 0
    assert await store.take_tokens("t", 1, 0.01, 10) == pytest.approx(600, abs=10)
    assert await store.take_tokens("other", 50, 1, 10) == 0


async def test_a_bucket_refills_at_its_rate(store: Store) -> None:
    # It would be forgotten, and so be full again, in 101 s.
    assert await store.take_tokens("t", 1000, 10, 1000) == 0
    assert await store.take_tokens("t", 1, 10, 1000) == pytest.approx(0.1, abs=0.1)

    async def has_a_token() -> bool:
        return await store.take_tokens("t", 1, 10, 1000) == 0

    await eventually(has_a_token, "the bucket has a token")
    assert await store.take_tokens("t", 1000, 10, 1000) > 50


async def test_what_is_out_of_bounds_is_refused_and_named(store: Store) -> None:
    begun = await store.begin(KEY, request())
    for named, call in {
        "role": store.announce(ReplicaRecord("", "a:1", "i", "ready", GetReplicaInfoResponse()), 1),
        "address": store.announce(replica("a\0:1"), 1),
        "ttl_s": store.announce(replica("a:1"), 0),
        "replica": store.add_prefixes("\ud800", [b"d"], 1),
        "digests": store.prefix_holders([b"d"] * 65),
        "digest": store.add_prefixes("x", [b""], 1),
        "owner_id": store.begin(KEY, request("")),
        "lease_s": store.begin(KEY, request(lease_s=float("inf"))),
        "seed": store.begin(KEY, request(seed=2**64)),
        "num_choices": store.begin(KEY, request(num_choices=5)),
        "params": store.begin(KEY, request(params=b"x" * 65)),
        "choice": store.append([write(begun.generation, 0, 1, choice=4)]),
        "start": store.append([write(begun.generation, -1, 1)]),
        "tokens": store.append([write(begun.generation, 100, 1)]),
        "token id": store.append([write(begun.generation, 0, 2**32)]),
        "keep_s": store.end(KEY, "a", begun.generation, -1),
        "amount": store.take_tokens("t", float("inf"), 1, 1),
        "rate_per_s": store.take_tokens("t", 1, float("nan"), 1),
        "burst": store.take_tokens("t", 1, 1, 0),
    }.items():
        with pytest.raises(LimitExceeded, match=named):
            await call
    assert await store.append([write(begun.generation, 0, 1)]) == [Appended.STORED]
