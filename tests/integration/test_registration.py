"""Replica processes and a real Redis: announced from start to stop, and undisturbed when Redis is not there."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator

import pytest

from specdec.store.interface import ReplicaRecord, Store, StoreUnavailable
from specdec.store.urls import RedisOptions, connect
from tests.support.servers.redis_server import RedisServer
from tests.support.services.echo_process import echo_process, ready_echo, verify_stream
from tests.support.services.faults import eventually, scrape

pytestmark = pytest.mark.integration


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[Store]:
    store = connect(redis_server.url, RedisOptions(timeout_s=20.0))
    yield store
    await store.close()


def flags(redis_server: RedisServer, *more: str) -> list[str]:
    """Registered for longer than any test takes, unless it says otherwise."""
    return ["--redis-url", redis_server.url, "--registry-ttl-s", "600", "--redis-timeout-s", "20", *more]


async def registered(store: Store) -> list[ReplicaRecord]:
    try:
        return await store.replicas()
    except StoreUnavailable:
        return []


async def until_states(store: Store, states: list[str]) -> None:
    async def is_so() -> bool:
        return [replica.state for replica in await registered(store)] == states

    await eventually(is_so, f"the registry has {states}")


async def test_a_replica_is_announced_with_the_port_it_got_and_what_it_serves(
    redis_server: RedisServer, store: Store
) -> None:
    async with ready_echo(*flags(redis_server, "--registry-ttl-s", "3")) as (process, channel):
        await until_states(store, ["ready"])
        [record] = await store.replicas()
        port = next(event["port"] for event in process.events if event["event"] == "listening")
        assert (record.role, record.address) == ("target", f"127.0.0.1:{port}")
        assert record.info.identity.name == "echo"
        assert record.instance_id
        stream = verify_stream(channel)
        await stream.write(b"load")
        assert await stream.read() == b"load"

        async def has_load() -> bool:
            return [r.info.load.num_running for r in await registered(store)] == [7]

        await eventually(has_load, "the latest load is announced")
        stream.cancel()


async def test_a_replica_that_loads_is_announced_as_loading(redis_server: RedisServer, store: Store) -> None:
    async with echo_process(*flags(redis_server, "--load", "hang")) as process:
        await until_states(store, ["loading"])
        process.terminate()
        assert await process.exit_code() == 0
    assert await store.replicas() == []


async def test_a_replica_that_drains_says_so_at_once_and_is_withdrawn_when_it_ends(
    redis_server: RedisServer, store: Store
) -> None:
    async with ready_echo(*flags(redis_server, "--no-drained-at-once")) as (process, channel):
        await until_states(store, ["ready"])
        stream = verify_stream(channel)
        await stream.write(b"hello")
        assert await stream.read() == b"hello"
        process.terminate()
        await until_states(store, ["draining"])
        await stream.write(b"drained")
        assert await process.exit_code() == 0
        assert await store.replicas() == []


async def test_the_registration_of_a_replica_that_was_killed_expires(redis_server: RedisServer, store: Store) -> None:
    short = flags(redis_server, "--registry-ttl-s", "1.5")
    async with ready_echo(*short) as (process, _), ready_echo(*flags(redis_server)) as (other, _):
        await until_states(store, ["ready", "ready"])
        os.kill(process.pid, signal.SIGKILL)
        await until_states(store, ["ready"])
        [record] = await store.replicas()
        port = next(event["port"] for event in other.events if event["event"] == "listening")
        assert record.address.endswith(f":{port}")


async def test_a_restarted_replica_has_another_instance(redis_server: RedisServer, store: Store) -> None:
    instances = set()
    for _ in range(2):
        async with ready_echo(*flags(redis_server)) as (process, _):
            await until_states(store, ["ready"])
            instances.update(record.instance_id for record in await store.replicas())
            process.terminate()
            assert await process.exit_code() == 0
    assert len(instances) == 2


async def test_without_redis_a_replica_starts_and_serves_and_registers_once_redis_is_there(
    redis_server: RedisServer, store: Store
) -> None:
    redis_server.stop()
    async with ready_echo(*flags(redis_server)) as (process, channel):
        metrics_port = next(event["metrics_port"] for event in process.events if event["event"] == "listening")
        stream = verify_stream(channel)
        await stream.write(b"hello")
        assert await stream.read() == b"hello"
        stream.cancel()

        async def is_counted() -> bool:
            samples = scrape(metrics_port)
            return samples["specdec_target_store_up"] == 0 and samples["specdec_target_announce_failures_total"] > 1

        await eventually(is_counted, "the metrics tell that Redis is down")
        redis_server.start()
        await until_states(store, ["ready"])

        async def is_up() -> bool:
            return scrape(metrics_port)["specdec_target_store_up"] == 1

        await eventually(is_up, "the metrics tell that Redis is up")
        process.terminate()
        assert await process.exit_code() == 0
        assert [event["event"] for event in process.events].count("store_down") == 1


async def test_a_replica_stops_though_redis_is_gone(redis_server: RedisServer, store: Store) -> None:
    async with ready_echo(*flags(redis_server)) as (process, _):
        await until_states(store, ["ready"])
        redis_server.stop()
        process.terminate()
        assert await process.exit_code() == 0
