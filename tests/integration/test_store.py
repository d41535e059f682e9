"""The shared store, in memory and on a real Redis: one contract, and what Redis adds to it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import SecretStr
from redis.asyncio import Redis

from specdec.cli.cluster import free_port
from specdec.store.errors import RequestHeld, StoreUnavailable, StoreUrlError, TooManyConcurrent
from specdec.store.guarded import BackOff, GuardedStore
from specdec.store.interface import Appended, JournalWrite, Lease, NewRequest, ReplicaRecord, RequestKey, Store
from specdec.store.memory import MemoryStore
from specdec.store.urls import RedisOptions, connect
from specdec.v1 import common_pb2 as pb
from tests.chaos.faults import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

KEY = RequestKey("tenant {a}", "request:1")
PASSWORD = "only for this test"


@contextmanager
def redis_server(folder: Path, port: int) -> Iterator[str]:
    """A Redis that keeps nothing on disk; yields its address."""
    binary = shutil.which("redis-server")
    assert binary is not None, "redis-server is missing: run `make servers`"
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([*command, "--requirepass", PASSWORD], stdout=subprocess.DEVNULL)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def connected(url: str) -> Store:
    return connect(url, RedisOptions(password=SecretStr(PASSWORD), timeout_s=1.0))


async def until_up(store: Store) -> None:
    async def is_up() -> bool:
        try:
            await store.ping()
        except StoreUnavailable:
            return False
        return True

    await eventually(is_up, "Redis answers")


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    with redis_server(tmp_path, free_port()) as url:
        store = connected(url)
        await until_up(store)
        yield store
        await store.close()


def new_request(owner: str = "one", *, lease_s: float = 30.0, **changes: object) -> NewRequest:
    fields = {"owner_id": owner, "seed": 2**64 - 1, "params": b"\x00p", "num_choices": 2, "lease_s": lease_s, **changes}
    return NewRequest(**fields)  # type: ignore[arg-type]


def write(generation: int, start: int, ids: list[int], owner: str = "one") -> JournalWrite:
    return JournalWrite(KEY, owner, generation, 1, start, ids, [5] * len(ids))


def replica(address: str, state: str = "ready") -> ReplicaRecord:
    info = pb.GetReplicaInfoResponse(identity=pb.ModelIdentity(name="m"), version="1")
    return ReplicaRecord("target", address, "instance", state, info)


async def test_replicas_are_known_until_they_stop_announcing_themselves(store: Store) -> None:
    await store.announce(replica("b:1"), 30.0)
    await store.announce(replica("a:1"), 30.0)
    await store.announce(replica("c:1"), 0.2)
    await store.announce(replica("a:1", "draining"), 30.0)

    async def is_gone() -> bool:
        return [r.address for r in await store.replicas()] == ["a:1", "b:1"]

    await eventually(is_gone, "the third expires")
    assert [r.state for r in await store.replicas()] == ["draining", "ready"]
    assert (await store.replicas())[0].info.identity.name == "m"
    await store.withdraw("target", "a:1")
    assert [r.address for r in await store.replicas()] == ["b:1"]


async def test_prefixes_have_holders_until_they_expire(store: Store) -> None:
    await store.add_prefixes("a:1", [b"x" * 16, b"y" * 16], 30.0)
    await store.add_prefixes("b:1", [b"y" * 16], 0.2)

    async def has_expired() -> bool:
        return await store.prefix_holders([b"y" * 16]) == [frozenset({"a:1"})]

    await eventually(has_expired, "the second holder expires")
    assert await store.prefix_holders([b"z" * 16, b"x" * 16]) == [frozenset(), frozenset({"a:1"})]


async def test_a_journalled_request_is_read_back_whole(store: Store) -> None:
    begun = await store.begin(KEY, new_request())
    assert begun.record is None
    ids = [0, 151_935, 7]
    results = await store.append([write(begun.generation, 0, ids[:2]), write(begun.generation, 1, ids[1:])])
    assert results == [Appended.STORED, Appended.STORED]
    record = await store.load(KEY)
    assert record is not None
    assert record.token_ids == ((), tuple(ids))
    assert record.origins == ((), (5, 5, 5))
    assert (record.owner_id, record.seed, record.params, record.is_ended) == ("one", 2**64 - 1, b"\x00p", False)
    assert await store.append([write(begun.generation, 9, [1])]) == [Appended.GAP]
    assert await store.end(KEY, "one", begun.generation, 30.0)
    ended = await store.load(KEY)
    assert ended is not None
    assert ended.is_ended
    assert ended.token_ids == record.token_ids


async def test_a_request_has_one_owner_and_the_former_one_learns_it(store: Store) -> None:
    outcomes = await asyncio.gather(
        *(store.begin(KEY, new_request(f"owner-{i}")) for i in range(8)), return_exceptions=True
    )
    winners = [i for i, outcome in enumerate(outcomes) if not isinstance(outcome, BaseException)]
    assert len(winners) == 1
    assert sum(isinstance(outcome, RequestHeld) for outcome in outcomes) == 7
    first = await store.load(KEY)
    assert first is not None
    taken = await store.begin(KEY, new_request("other", take_over=True))
    assert taken.generation > first.generation
    owner = f"owner-{winners[0]}"
    assert await store.append([write(first.generation, 0, [1], owner)]) == [Appended.NOT_OWNER]
    assert await store.renew([Lease(KEY, owner, first.generation), Lease(KEY, "other", taken.generation)]) == [
        False,
        True,
    ]
    assert not await store.end(KEY, owner, first.generation, 30.0)


async def test_a_lease_that_ran_out_frees_the_request(store: Store) -> None:
    begun = await store.begin(KEY, new_request(lease_s=0.2))
    await store.append([write(begun.generation, 0, [1, 2])])

    async def is_free() -> bool:
        try:
            again = await store.begin(KEY, new_request("two"))
        except RequestHeld:
            return False
        assert again.record is not None
        assert again.record.token_ids[1] == (1, 2)
        return True

    await eventually(is_free, "the lease runs out")


async def test_a_tenant_has_so_many_requests_at_once(store: Store) -> None:
    begun = await store.begin(KEY, new_request(max_concurrent=1))
    other = RequestKey(KEY.tenant, "request:2")
    with pytest.raises(TooManyConcurrent):
        await store.begin(other, new_request(max_concurrent=1))
    await store.begin(RequestKey("another tenant", "request:2"), new_request(max_concurrent=1))
    await store.end(KEY, "one", begun.generation, 0.0)
    await store.begin(other, new_request(max_concurrent=1))


async def test_a_bucket_refills_at_its_rate(store: Store) -> None:
    assert await store.take_tokens("t", 100.0, 1000.0, 100.0) == 0.0
    wait_s = await store.take_tokens("t", 100.0, 1000.0, 100.0)
    assert 0.0 < wait_s <= 0.1
    await store.take_tokens("t", 1000.0, 1000.0, 100.0, force=True)
    assert await store.take_tokens("t", 1.0, 1000.0, 100.0) > 0.1


async def test_everything_in_redis_expires_and_bears_the_prefix(tmp_path: Path) -> None:
    port = free_port()
    with redis_server(tmp_path, port) as url:
        store = connected(url)
        await until_up(store)
        await store.announce(replica("a:1"), 30.0)
        await store.add_prefixes("a:1", [b"x" * 16], 30.0)
        begun = await store.begin(KEY, new_request())
        await store.append([write(begun.generation, 0, [1])])
        await store.take_tokens("t", 1.0, 1.0, 10.0)
        client = Redis(port=port, password=PASSWORD)
        keys = [key async for key in client.scan_iter()]
        assert len(keys) >= 4
        assert all(key.startswith(b"specdec:v1:") for key in keys)
        assert [key for key in keys if await client.pttl(key) < 0] == []
        await client.aclose()
        await store.close()


async def test_a_guarded_store_gives_up_fast_and_heals_when_redis_is_back(tmp_path: Path) -> None:
    port = free_port()
    changes: list[bool] = []
    guarded = GuardedStore(
        connected(f"redis://127.0.0.1:{port}/0"),
        on_change=changes.append,
        back_off=BackOff(first_s=0.05, longest_s=0.2),
    )
    with redis_server(tmp_path, port):
        await until_up(guarded)
    with pytest.raises(StoreUnavailable):
        await guarded.ping()
    assert not guarded.is_up
    with redis_server(tmp_path, port):
        await until_up(guarded)
        assert guarded.is_up
    assert changes[-2:] == [False, True]
    await guarded.close()


@pytest.mark.parametrize("url", ["http://a:1", "redis://", "redis+sentinel://a:1", "redis://a:b"])
def test_a_wrong_url_is_named_without_its_password(url: str) -> None:
    with_password = url.replace("://", "://user:hunter2@") if "a:" in url else url
    with pytest.raises(StoreUrlError) as caught:
        connect(with_password)
    assert "redis_url" in str(caught.value)
    assert "hunter2" not in str(caught.value)
