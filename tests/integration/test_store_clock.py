"""The wall clock of Redis jumps by an hour, both ways: leases, quotas, registrations and streams outlive it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdec.store.interface import (
    Appended,
    JournalWrite,
    Lease,
    NewRequest,
    ReplicaRecord,
    RequestHeld,
    RequestKey,
    Store,
    TooManyConcurrent,
)
from specdec.v1.common_pb2 import GetReplicaInfoResponse
from tests.support.scripted.target import ScriptedTarget
from tests.support.servers.jumping_clock import JumpingClock
from tests.support.servers.redis_server import RedisServer
from tests.support.servers.shared_redis import coordinators
from tests.support.servers.store_use import connected, use
from tests.support.services.coordinator_harness import collect, expected_ids, finish, read_tokens, request, resumed
from tests.support.services.faults import eventually

pytestmark = pytest.mark.integration
HOUR_S = 3600.0
SHORT_S = 0.5
LONG_S = 600.0
BOTH_WAYS = (HOUR_S, 0.0, -HOUR_S, 0.0)


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> JumpingClock:
    return JumpingClock(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="module")
def server(clock: JumpingClock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), environment=clock.environment) as server:
        yield server


@pytest.fixture(autouse=True)
def fresh(clock: JumpingClock, server: RedisServer) -> Iterator[None]:
    yield
    clock.jump_to(0.0)
    with server.client() as client:
        client.flushall()


def asked(owner: str, lease_s: float = SHORT_S) -> NewRequest:
    return NewRequest(owner, 1, b"params", 1, lease_s, max_concurrent=1)


async def begins(store: Store, name: str, owner: str) -> None:
    """Wait until a request of the only tenant may begin."""

    async def has_begun() -> bool:
        try:
            await store.begin(RequestKey("tenant", name), asked(owner))
        except (RequestHeld, TooManyConcurrent):
            return False
        return True

    await eventually(has_begun, f"{name} begins")


def test_the_clock_of_redis_jumps_and_is_the_only_one_that_does(clock: JumpingClock, server: RedisServer) -> None:
    with server.client() as client:
        now_s, up_s = client.time()[0], client.info("server")["uptime_in_seconds"]
        for offset_s in BOTH_WAYS:
            clock.jump_to(offset_s)
            assert abs(client.time()[0] - now_s - offset_s) < 60
            assert abs(client.info("server")["uptime_in_seconds"] - up_s) < HOUR_S + 60


async def test_a_quota_is_neither_refused_for_an_hour_nor_more_than_its_burst(
    clock: JumpingClock, server: RedisServer
) -> None:
    async with connected(server.url) as store:
        for offset_s in BOTH_WAYS:
            clock.jump_to(offset_s)
            taken = 0
            while (wait_s := await store.take_tokens("tenant", 1, 0.5, 10)) == 0:
                taken += 1
            assert taken <= 11
            assert wait_s <= 2.0


async def test_leases_of_the_lost_end_in_their_time_after_the_clock_was_set_back(
    clock: JumpingClock, server: RedisServer
) -> None:
    async with connected(server.url) as store:
        clock.jump_to(HOUR_S)
        await store.begin(RequestKey("tenant", "lost"), asked("a", lease_s=LONG_S))
        clock.jump_to(0.0)
        with pytest.raises(TooManyConcurrent):
            await store.begin(RequestKey("tenant", "new"), asked("b"))
        await begins(store, "new", "b")
        with pytest.raises(RequestHeld):
            await store.begin(RequestKey("tenant", "lost"), asked("b"))
        await begins(store, "lost", "b")


async def test_owners_keep_what_they_write_and_learn_what_is_lost(clock: JumpingClock, server: RedisServer) -> None:
    key = RequestKey("tenant", "request")
    async with connected(server.url) as store:
        begun = await store.begin(key, asked("a", LONG_S))
        num_written = 0
        for offset_s in (0.0, -HOUR_S, 0.0, HOUR_S, 0.0):
            clock.jump_to(offset_s)
            write = JournalWrite(key, "a", begun.generation, 0, num_written, [7], [1])
            [appended] = await store.append([write])
            if appended is Appended.STORED:
                num_written += 1
                assert await store.renew([Lease(key, "a", begun.generation)]) == [True]
            else:  # an hour later it has expired: written again, as after an emptied Redis
                assert offset_s == HOUR_S and await store.load(key) is None
                begun, num_written = await store.begin(key, asked("a", LONG_S)), 0
        record = await store.load(key)
        assert record is not None and record.token_ids == ((7,) * num_written,)
        await use(store)


async def test_who_announces_itself_again_is_registered(clock: JumpingClock, server: RedisServer) -> None:
    replica = ReplicaRecord("target", "a:1", "one", "ready", GetReplicaInfoResponse())
    async with connected(server.url) as store:
        for offset_s in BOTH_WAYS:
            clock.jump_to(offset_s)
            await store.announce(replica, 10.0)
            assert [one.address for one in await store.replicas()] == ["a:1"]
            await store.add_prefixes("a:1", [b"digest"], 10.0)
            assert await store.prefix_holders([b"digest"]) == [frozenset({"a:1"})]


async def test_streams_go_on_and_are_resumed_elsewhere_over_jumps_of_an_hour(
    clock: JumpingClock, server: RedisServer
) -> None:
    target = ScriptedTarget()
    target.limit = 10
    body = request(max_tokens=60, request_id="mine")
    async with coordinators(target, server, journal_lease_s=3.0) as (one, two):
        for index, offset_s in enumerate(BOTH_WAYS):
            clock.jump_to(offset_s)
            body.request_id = f"request {index}"
            target.set_limit(10)
            old = one.stub.Generate(body)
            first = await read_tokens(old, 10)
            clock.jump_to(-offset_s)
            rest = two.stub.Generate(resumed(first, body))
            target.set_limit(None)
            assert (await finish(rest, first)).ids() == expected_ids(target, 60)
            old.cancel()
            whole = await collect(two.stub.Generate(request(max_tokens=20)))
            assert whole.ids() == expected_ids(target, 20)
