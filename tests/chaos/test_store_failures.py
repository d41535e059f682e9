"""A real Redis that dies, hangs, fills up or refuses: the guarded store says so, in time, and heals by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from specdec.commands.up.cluster import free_port
from specdec.store.guarded import GuardedStore
from specdec.store.interface import (
    Appended,
    JournalWrite,
    Lease,
    NewRequest,
    ReplicaRecord,
    RequestKey,
    Store,
    StoreUnavailable,
)
from specdec.store.keys import StoreKeys
from specdec.store.redis_store import MAX_CONCURRENT_OPERATIONS
from specdec.store.urls import RedisOptions, connect
from specdec.v1.common_pb2 import GetReplicaInfoResponse
from specdec.wire.backoff import Backoff
from tests.support.servers.redis_server import RedisServer, redis_cluster
from tests.support.services.faults import eventually

_Result = TypeVar("_Result")
KEY = RequestKey("tenant", "request")
LONG_S = 600.0
QUICK = Backoff(first_s=0.05, longest_s=0.2)
# What a busy machine may add to a timeout.
SLACK_S = 5.0
REQUEST = NewRequest("owner", 1, b"params", 1, LONG_S, take_over=True)
WRITE = JournalWrite(KEY, "owner", 1, 0, 0, [1, 2], [1, 1])

OPERATIONS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "announce": lambda store: store.announce(
        ReplicaRecord("target", "a:1", "i", "ready", GetReplicaInfoResponse()), LONG_S
    ),
    "withdraw": lambda store: store.withdraw("target", "a:1"),
    "replicas": lambda store: store.replicas(),
    "add_prefixes": lambda store: store.add_prefixes("a:1", [b"x", b"y"], LONG_S),
    "prefix_holders": lambda store: store.prefix_holders([b"x", b"y"]),
    "begin": lambda store: store.begin(KEY, REQUEST),
    "append": lambda store: store.append([WRITE]),
    "renew": lambda store: store.renew([Lease(KEY, "owner", 1)]),
    "end": lambda store: store.end(KEY, "owner", 1, 0),
    "load": lambda store: store.load(KEY),
    "take_tokens": lambda store: store.take_tokens("tenant", 1, 1, 10),
    "ping": lambda store: store.ping(),
}
READS = ("replicas", "prefix_holders", "load", "ping")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as running:
        yield running


@asynccontextmanager
async def connected(url: str, timeout_s: float = 20.0) -> AsyncIterator[Store]:
    store = connect(url, RedisOptions(timeout_s=timeout_s))
    yield store
    started_s = time.monotonic()
    await store.close()
    assert time.monotonic() - started_s < timeout_s + SLACK_S


async def until_up(guarded: GuardedStore) -> None:
    async def is_up() -> bool:
        try:
            await guarded.ping()
        except StoreUnavailable:
            return False
        return guarded.is_up

    await eventually(is_up, "the store heals")


async def in_time(operation: Callable[[], Awaitable[_Result]]) -> _Result:
    """What Redis answers, in whichever attempt it does in time."""
    answers: list[_Result] = []

    async def is_in_time() -> bool:
        with suppress(StoreUnavailable):
            answers.append(await operation())
        return bool(answers)

    await eventually(is_in_time, "Redis answers in time")
    return answers[0]


async def outcomes(store: Store) -> dict[str, bool]:
    """Whether each operation was answered. Any error but StoreUnavailable is the test's failure."""
    answered = {}
    for name, operation in OPERATIONS.items():
        try:
            await operation(store)
            answered[name] = True
        except StoreUnavailable:
            answered[name] = False
    return answered


async def test_a_store_whose_redis_is_not_there_is_unavailable_for_everything() -> None:
    async with connected(f"redis://127.0.0.1:{free_port()}") as store:
        assert not any((await outcomes(store)).values())


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel"])
async def test_a_redis_that_hangs_costs_no_more_than_the_timeout(server: RedisServer, scheme: str) -> None:
    url = server.url.replace("redis:", f"{scheme}:") + ("/main" if scheme == "redis+sentinel" else "")
    timeout_s = 0.05
    server.pause()
    async with connected(url, timeout_s) as store:
        for operation in OPERATIONS.values():
            started_s = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await operation(store)
            assert time.monotonic() - started_s < timeout_s + SLACK_S


async def test_an_answer_that_came_too_late_is_not_taken_for_the_next_ones(server: RedisServer) -> None:
    async with connected(server.url) as patient:
        begun = await patient.begin(KEY, REQUEST)
    async with connected(server.url, 0.5) as store:
        await in_time(store.ping)
        server.pause()
        late = [store.take_tokens(f"tenant {number}", 1, 1, 10) for number in range(2 * MAX_CONCURRENT_OPERATIONS)]
        assert all(isinstance(one, StoreUnavailable) for one in await asyncio.gather(*late, return_exceptions=True))
        server.resume()

        record = await in_time(lambda: store.load(KEY))
        assert record is not None
        assert record.generation == begun.generation
        assert await in_time(store.replicas) == []


async def test_a_call_that_was_cancelled_leaves_nothing_for_the_next_one(server: RedisServer) -> None:
    # Python 3.11 may lose a cancellation in wait_for(), so that the call ends with its timeout.
    async with connected(server.url, 1.0) as store:
        await in_time(store.ping)
        server.pause()
        call = asyncio.create_task(store.take_tokens("tenant", 1, 1, 10))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        server.resume()
        assert await in_time(store.replicas) == []


async def test_a_restart_of_redis_degrades_cheaply_and_heals(server: RedisServer) -> None:
    changes: list[bool] = []
    reached: list[str] = []
    guarded = GuardedStore(
        connect(server.url, RedisOptions(timeout_s=20)),
        observe=lambda operation, seconds, ok: reached.append(operation),
        on_change=changes.append,
        backoff=Backoff(first_s=30, longest_s=30),
    )
    begun = await guarded.begin(KEY, REQUEST)
    server.stop()
    for _ in range(100):
        with pytest.raises(StoreUnavailable):
            await guarded.append([WRITE])
    assert reached == ["begin", "append"], "while it is down, Redis is left alone"
    assert changes == [False]
    await guarded.close()

    healing = GuardedStore(connect(server.url, RedisOptions(timeout_s=20)), on_change=changes.append, backoff=QUICK)
    with pytest.raises(StoreUnavailable):
        await healing.ping()
    server.start()
    await until_up(healing)
    assert changes == [False, False, True]
    # Empty: the owner learns that its request is not known, and begins it again with a higher generation.
    lost = JournalWrite(KEY, "owner", begun.generation, 0, 0, [1], [1])
    assert await healing.append([lost]) == [Appended.NOT_OWNER]
    assert (await healing.begin(KEY, REQUEST)).generation > begun.generation
    assert all((await outcomes(healing)).values())
    await healing.close()


async def test_a_redis_that_reads_and_does_not_write_is_two_lines_in_ten_seconds_and_told_when_it_stays_down(
    server: RedisServer,
) -> None:
    now_s = 100.0
    guarded = GuardedStore(connect(server.url, RedisOptions(timeout_s=20)), clock=lambda: now_s)
    with server.client() as client, capture_logs() as lines:
        begun = await guarded.begin(KEY, REQUEST)
        client.execute_command("REPLICAOF", "127.0.0.1", free_port())
        write = JournalWrite(KEY, "owner", begun.generation, 0, 0, [1, 2], [1, 1])
        for _ in range(59):
            now_s += 0.5
            with pytest.raises(StoreUnavailable):
                await guarded.append([write])
            assert not guarded.is_up
            now_s += 0.5
            await guarded.ping()
        assert [line["event"] for line in lines] == ["store_down", "store_up"] * 6
        assert "read only replica" in lines[0]["error"]
        with pytest.raises(StoreUnavailable):
            await guarded.append([write])
        for _ in range(2):
            now_s += 10
            with pytest.raises(StoreUnavailable):
                await guarded.append([write])
        assert [line["event"] for line in lines[12:]] == ["store_down"], "it stays down, and that is told"
    await guarded.close()


async def test_a_connection_that_redis_closed_is_replaced_unseen(server: RedisServer) -> None:
    async with connected(server.url) as store:
        assert all((await outcomes(store)).values())
        with server.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)
        assert all((await outcomes(store)).values())


async def test_a_replica_is_read_from_and_not_written_to(server: RedisServer) -> None:
    async with connected(server.url) as store:
        await store.begin(KEY, REQUEST)
        with server.client() as client:
            # It follows a master that is not there, as a former master that was demoted may.
            client.execute_command("REPLICAOF", "127.0.0.1", free_port())
        answered = await outcomes(store)
        assert {name for name in OPERATIONS if not answered[name]} >= {
            "announce",
            "begin",
            "take_tokens",
            "add_prefixes",
        }
        assert all(answered[name] for name in READS)
        with server.client() as client:
            client.execute_command("REPLICAOF", "NO", "ONE")
        assert all((await outcomes(store)).values())


async def test_a_redis_without_memory_takes_no_writes_until_it_has_some(server: RedisServer) -> None:
    async with connected(server.url) as store:
        begun = await store.begin(KEY, REQUEST)
        write = JournalWrite(KEY, "owner", begun.generation, 0, 0, [1, 2], [1, 1])
        await store.append([write])
        with server.client() as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 1)
            answered = await outcomes(store)
            assert not any(answered[name] for name in ("announce", "add_prefixes", "begin", "take_tokens"))
            assert all(answered[name] for name in READS)
            with pytest.raises(StoreUnavailable, match="OutOfMemory"):
                await store.append([write])
            # Nothing was half done, and what frees memory goes through.
            assert [key for key in client.scan_iter() if client.pttl(key) == -1] == []
            assert await store.end(KEY, "owner", begun.generation, 0)
            assert list(client.scan_iter()) == []
            client.config_set("maxmemory", 0)
        assert all((await outcomes(store)).values())


@pytest.mark.parametrize("wrong", ["string", "list"])
async def test_foreign_values_under_our_keys_are_unavailable_not_a_crash(server: RedisServer, wrong: str) -> None:
    keys = StoreKeys()
    names = [*keys.replicas(), *keys.prefix_holders(b"x"), *keys.request(KEY), *keys.quota("tenant")]
    with server.client() as client:
        for name in names:
            if wrong == "string":
                client.set(name, "foreign", ex=600)
            else:
                client.rpush(name, "foreign")
    async with connected(server.url) as store:
        answered = await outcomes(store)
        assert {name for name, is_answered in answered.items() if is_answered} == {"ping"}
        with server.client() as client:
            client.flushall()
        assert all((await outcomes(store)).values())


async def test_a_foreign_record_in_the_journal_and_a_foreign_name_in_the_prefix_map_are_no_crash(
    server: RedisServer,
) -> None:
    head, _ = StoreKeys().request(KEY)
    [holders] = StoreKeys().prefix_holders(b"x")
    async with connected(server.url) as store:
        with server.client() as client:
            client.hset(head, mapping={"owner": b"\xff", "generation": "one", "num_choices": 1})
            client.zadd(holders, {b"\xff": time.time() * 2000})
        with pytest.raises(StoreUnavailable):
            await store.load(KEY)
        assert len((await store.prefix_holders([b"x"]))[0]) == 1


async def test_a_foreign_record_in_the_registry_is_left_out(server: RedisServer) -> None:
    async with connected(server.url) as store:
        await OPERATIONS["announce"](store)
        expiries, records = StoreKeys().replicas()
        with server.client() as client:
            for number, record in enumerate([b"\xff", b"[]", b'{"role": 1}', b'{"info": "?"}']):
                client.zadd(expiries, {f"m{number}": time.time() * 2000})
                client.hset(records, f"m{number}", record)
        assert [one.address for one in await store.replicas()] == ["a:1"]


async def test_a_flood_of_calls_uses_a_bounded_number_of_connections(server: RedisServer) -> None:
    async with connected(server.url) as store:
        calls = [store.take_tokens(f"tenant {number}", 1, 1, 10) for number in range(500)]
        assert await asyncio.gather(*calls) == [0.0] * 500
        with server.client() as client:
            assert len(client.client_list(_type="normal")) <= MAX_CONCURRENT_OPERATIONS + 1


async def test_a_master_of_a_cluster_that_hangs_is_given_up_when_its_replica_takes_over(tmp_path: Path) -> None:
    digests = [bytes([number]) for number in range(64)]
    with redis_cluster(tmp_path) as cluster:
        guarded = GuardedStore(connect(cluster.url, RedisOptions(timeout_s=1)), backoff=QUICK)
        await until_up(guarded)
        async with connected(cluster.url) as patient:
            await patient.add_prefixes("a:1", digests, LONG_S)
        with cluster.masters[0].client() as client:
            assert client.wait(1, 20_000) == 1
        cluster.masters[0].pause()
        with pytest.raises(StoreUnavailable):
            await guarded.prefix_holders(digests)
        cluster.promote_replica()

        async def has_healed() -> bool:
            try:
                return await guarded.prefix_holders(digests) == [frozenset({"a:1"})] * len(digests)
            except StoreUnavailable:
                return False

        await eventually(has_healed, "the replica is asked")
        await guarded.close()


class SlowRelay:
    """Passes a Redis' answers on after a while."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        for source, sink, is_answer in ((reader, up_writer, False), (up_reader, writer, True)):
            task = asyncio.create_task(self._relay(source, sink, is_answer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _relay(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_answer: bool) -> None:
        while data := await source.read(65536):
            if is_answer:
                await asyncio.sleep(self.delay_s)
            sink.write(data)
        sink.close()


async def test_more_operations_at_once_than_redis_answers_in_the_time_of_one_do_not_make_it_down(
    server: RedisServer,
) -> None:
    relay = SlowRelay(server.port)
    listener = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
    url = f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    guarded = GuardedStore(connect(url, RedisOptions(timeout_s=8.0)))
    await asyncio.gather(*(guarded.renew([Lease(KEY, "owner", 1)]) for _ in range(MAX_CONCURRENT_OPERATIONS)))
    relay.delay_s = 5.0
    await asyncio.gather(*(guarded.renew([Lease(KEY, "owner", 1)]) for _ in range(2 * MAX_CONCURRENT_OPERATIONS)))
    assert guarded.is_up
    relay.delay_s = 0.0
    await guarded.close()
    listener.close()


async def test_operations_that_wait_for_a_redis_that_hangs_do_not_try_one_after_the_other(server: RedisServer) -> None:
    async with connected(server.url, timeout_s=2.0) as store:
        await store.ping()
        server.pause()
        started_s = time.monotonic()
        waiting = [store.ping() for _ in range(30 * MAX_CONCURRENT_OPERATIONS)]
        failures = await asyncio.gather(*waiting, return_exceptions=True)
        took_s = time.monotonic() - started_s
        server.resume()
    assert all(isinstance(failure, StoreUnavailable) for failure in failures)
    assert took_s < 30 * 2.0 / 2
