"""Coordinators that find their replicas in a real Redis, and tell each other what is cached where."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from specdec.client import Client, Completion
from specdec.commands.up.cluster import Cluster
from specdec.coordinator.replicas.router import block_digests
from specdec.store.announcer import AnnouncedState, Announcer
from specdec.store.guarded import GuardedStore
from specdec.store.interface import Store, StoreUnavailable
from specdec.store.urls import RedisOptions, connect
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.backoff import Backoff
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.model import identity
from tests.support.scripted.replica import ScriptedReplica
from tests.support.scripted.target import ScriptedTarget
from tests.support.servers.redis_server import RedisServer
from tests.support.services.clusters import start_cluster
from tests.support.services.coordinator_harness import Harness, collect, expected_ids, request, running
from tests.support.services.faults import Reading, another, eventually, sampled_request
from tests.support.services.model_pair import ModelPair

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

BLOCK_TOKENS = 32


@asynccontextmanager
async def store_at(server: RedisServer) -> AsyncIterator[Store]:
    """Tries again soon: a test waits for what is there once Redis is back."""
    options = RedisOptions(timeout_s=20.0)
    store = GuardedStore(connect(server.url, options), backoff=Backoff(first_s=0.05, longest_s=0.05))
    yield store
    await store.close()


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[Store]:
    async with store_at(redis_server) as store:
        yield store


def settings(redis_server: RedisServer, **more: Any) -> dict[str, Any]:
    """Settings of a coordinator that finds its replicas quickly."""
    fast = {"targets": (), "drafts": (), "discovery_s": 0.05, "redis_timeout_s": 20.0}
    return {"redis_url": redis_server.url, **fast, **more}


@asynccontextmanager
async def announced(
    store: Store, replica: ScriptedReplica, state: AnnouncedState = AnnouncedState.READY, ttl_s: float = 60.0
) -> AsyncIterator[Announcer]:
    """A scripted replica in the registry."""
    role = "target" if isinstance(replica, ScriptedTarget) else "draft"
    if replica.port == 0:
        await replica.start()
    info = pb.GetReplicaInfoResponse(identity=replica.identity)
    announcer = Announcer(store, ttl_s, role, replica.instance_id, lambda: info)
    announcer.set_state(state)
    announcer.start(replica.address)
    try:
        yield announcer
    finally:
        await announcer.stop()
        await replica.stop()


async def until_ready(harness: Harness, *replicas: ScriptedReplica) -> None:
    addresses = {replica.address for replica in replicas}

    async def is_so() -> bool:
        return {link.address for link in harness.service.fleet.links if link.is_ready} == addresses

    await eventually(is_so, f"{addresses} are ready")


async def test_a_coordinator_with_an_empty_registry_waits_for_a_target_and_uses_it_at_once(
    redis_server: RedisServer, store: Store
) -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    has_started = asyncio.Event()

    async def coordinate() -> None:
        async with running([], **settings(redis_server)) as harness:
            has_started.set()
            await until_ready(harness, target, draft)
            result = await collect(harness.stub.Generate(request()))
            assert result.ids() == expected_ids(target, 20)

    async def has_asked() -> bool:
        with redis_server.client() as client:
            return client.info("commandstats").get("cmdstat_zcount", {}).get("calls", 0) >= 3

    coordinating = asyncio.create_task(coordinate())
    await eventually(has_asked, "the coordinator has asked several times")
    assert not has_started.is_set()
    async with announced(store, target), announced(store, draft):
        await coordinating


async def test_registered_replicas_join_configured_ones_and_leave_when_they_are_gone(
    redis_server: RedisServer, store: Store
) -> None:
    configured, first, second = ScriptedTarget(), ScriptedTarget(), ScriptedTarget()
    await configured.start()
    async with running([configured], **settings(redis_server, targets=(configured.address,))) as harness:
        await until_ready(harness, configured)
        async with announced(store, first):
            await until_ready(harness, configured, first)
            async with announced(store, second):
                await until_ready(harness, configured, first, second)

            async def is_removed() -> bool:
                return all(link.address != second.address for link in harness.service.fleet.links)

            await eventually(is_removed, "the replica that left is forgotten")
        await until_ready(harness, configured)


async def test_a_replica_that_only_lost_its_registration_is_used_on(redis_server: RedisServer, store: Store) -> None:
    target = ScriptedTarget()
    target.limit = 10
    await target.start()
    async with announced(store, target) as announcer, running([], **settings(redis_server)) as harness:
        call = harness.stub.Generate(request(max_tokens=40))
        await target.until(lambda: target.num_output() == 10)
        await announcer.stop()  # as if its way to Redis were cut; nothing else happens to it
        num_refreshes = 0

        async def is_noticed() -> bool:
            nonlocal num_refreshes
            status = await harness.stub.GetStatus(api.GetStatusRequest())
            assert [(r.address, r.state) for r in status.replicas] == [(target.address, "ready")]
            num_refreshes += not harness.service.registry_view.endpoints("target")
            return num_refreshes > 5

        await eventually(is_noticed, "the coordinator has looked several times since")
        target.set_limit(None)
        assert (await collect(call)).ids() == expected_ids(target, 40)
        assert (await collect(harness.stub.Generate(request()))).ids() == expected_ids(target, 20)


async def test_a_registered_replica_that_does_not_fit_is_named_in_the_status(
    redis_server: RedisServer, store: Store
) -> None:
    target, loading = ScriptedTarget(), ScriptedTarget()
    other_model = ScriptedTarget(identity("other", weights_digest="w2"))
    other_tokenizer = ScriptedDraft(identity("draft", tokenizer_digest="t2"))
    async with (
        announced(store, target),
        running([], **settings(redis_server)) as harness,
        announced(store, other_model),
        announced(store, other_tokenizer),
        announced(store, loading, AnnouncedState.LOADING),
    ):
        wanted = {
            target.address: "ready",
            other_model.address: "incompatible",
            other_tokenizer.address: "incompatible",
            loading.address: "loading",
        }

        async def is_so() -> bool:
            status = await harness.stub.GetStatus(api.GetStatusRequest())
            return {replica.address: replica.state for replica in status.replicas} == wanted

        await eventually(is_so, "the status tells what fits")
        status = await harness.stub.GetStatus(api.GetStatusRequest())
        details = {replica.address: replica.detail for replica in status.replicas}
        assert "other" in details[other_model.address]
        assert "t2" in details[other_tokenizer.address]
        assert loading.streams == []


async def test_a_redis_that_is_down_when_a_coordinator_starts_is_used_once_it_is_there(
    redis_server: RedisServer, store: Store
) -> None:
    configured, registered = ScriptedTarget(), ScriptedTarget()
    await configured.start()
    redis_server.stop()
    async with running([configured], **settings(redis_server, targets=(configured.address,))) as harness:
        result = await collect(harness.stub.Generate(request()))
        assert result.ids() == expected_ids(configured, 20)
        redis_server.start()
        async with announced(store, registered):
            await until_ready(harness, configured, registered)


async def test_the_turns_of_a_conversation_meet_at_one_target_whichever_coordinator_they_go_through(
    redis_server: RedisServer, store: Store
) -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for number, target in enumerate(targets):
        target.instance_id = f"instance-{number}"
        await target.start()
    async with (
        announced(store, targets[0]),
        announced(store, targets[1]),
        running([], **settings(redis_server, owner_id="one")) as one,
        running([], **settings(redis_server, owner_id="two")) as two,
    ):
        for harness in (one, two):
            await until_ready(harness, *targets)
        for target in targets:
            target.limit = 10  # all first turns at once, so that both targets get some
        prompts = [[10 + (seed * 7 + i * 3) % 200 for i in range(3 * BLOCK_TOKENS)] for seed in range(6)]
        calls = [one.stub.Generate(request(prompt, max_tokens=2 * BLOCK_TOKENS)) for prompt in prompts]
        for target in targets:
            await target.until(lambda target=target: len(target.opened) == 3)  # type: ignore[misc]
        holders = {tuple(s.body.token_ids): target for target in targets for s in target.sessions.values()}
        for target in targets:
            target.set_limit(None)
        for prompt, call in zip(prompts, calls, strict=True):
            holder, first = holders[tuple(prompt)], await collect(call)
            await until_known(store, [*prompt, *first.ids()], {holder.instance_id})
            num_opened = len(holder.opened)
            await collect(two.stub.Generate(request([*prompt, *first.ids(), 9, 9], max_tokens=4)))
            assert len(holder.opened) == num_opened + 1


async def until_known(store: Store, token_ids: list[int], holders: set[str]) -> None:
    """Wait until others can know who caches the full blocks of these tokens (all are shared up to the 16th)."""
    digests = block_digests(token_ids, b"")

    async def is_so() -> bool:
        return all(holders & known for known in await store.prefix_holders(digests))

    await eventually(is_so, "other coordinators can know what is cached")


async def states(store: Store) -> dict[str, str]:
    """What the registry says, by address."""
    try:
        return {replica.address: replica.state for replica in await store.replicas()}
    except StoreUnavailable:
        return {}


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The Redis of `registered`."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module")
def registered(
    tiny_pair: ModelPair, shared_redis: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Processes that find each other in Redis: two targets, a draft, a coordinator."""
    # On a busy machine a look-up may take longer than one should wait for it in earnest.
    registry = {"registry_ttl_s": 2.0, "redis_timeout_s": 20.0}
    with start_cluster(
        tiny_pair,
        tmp_path_factory.mktemp("registered"),
        num_targets=2,
        redis_url=shared_redis.url,
        target_settings=registry,
        draft_settings=registry,
        coordinator_settings=registry,
    ) as cluster:
        yield cluster


async def test_the_second_turn_at_another_coordinator_finds_the_first_ones_tokens_cached(
    registered: Cluster, shared_redis: RedisServer, tmp_path: Path
) -> None:
    fast = {"redis-url": shared_redis.url, "redis-timeout-s": 20.0, "discovery-s": 0.2}
    with another("coordinator", tmp_path / "second", **fast) as second:
        async with (
            store_at(shared_redis) as store,
            Client(registered.address) as one,
            Client(second.address) as two,
        ):

            async def all_ready() -> bool:
                return [replica.state for replica in (await two.status()).replicas] == ["ready"] * 3

            await eventually(all_ready, "the second coordinator has found all replicas")
            instances = {record.instance_id for record in await store.replicas() if record.role == "target"}
            bodies = [sampled_request(seed, max_tokens=100) for seed in range(6)]
            # All first turns at once, so that both targets get some.
            firsts = await asyncio.gather(*(one.complete(first_body) for first_body in bodies))
            for seed, (first_body, first) in enumerate(zip(bodies, firsts, strict=True)):
                prompt = [*first_body.prompt_token_ids.token_ids, *first.choices[0].token_ids]
                await until_known(store, prompt, instances)
                turn = await two.complete(sampled_request(seed, [*prompt, 40, 41, 42], max_tokens=4))
                assert turn.require_finished().usage.cached_tokens > len(first_body.prompt_token_ids.token_ids)
            coordinators = {coordinator.address for coordinator in (await two.status()).coordinators}
            assert coordinators == {registered.address, second.address}


@pytest.mark.smoke
async def test_processes_find_each_other_in_redis_and_outlive_it(
    registered: Cluster, shared_redis: RedisServer
) -> None:
    """Runs last: one target is gone for good."""
    addresses = {service.spec.address for service in registered.services.values()}

    async with store_at(shared_redis) as store, Client(registered.address) as client:

        async def are_all_registered() -> bool:
            return await states(store) == dict.fromkeys(addresses, "ready")

        await eventually(are_all_registered, "all are registered")

        async def is_listed() -> bool:
            listed = (await client.status()).coordinators
            return [(c.address, c.state) for c in listed] == [(registered.address, "ready")]

        await eventually(is_listed, "the coordinator lists itself")
        undisturbed = await asyncio.gather(*(client.complete(sampled_request(seed)) for seed in range(6)))

        readings = [Reading(client, sampled_request(seed)) for seed in range(6)]
        await asyncio.gather(*(reading.until(10) for reading in readings))
        shared_redis.stop()
        without = await client.complete(sampled_request(0))
        shared_redis.start()  # empty
        disturbed = await asyncio.gather(*(reading.rest() for reading in readings))
        assert [c.identity for c in disturbed] == [c.identity for c in undisturbed]
        assert without.identity == undisturbed[0].identity
        await eventually(are_all_registered, "all have registered again")
        await replicas_come_and_go(registered, client, store, undisturbed[1])


async def replicas_come_and_go(cluster: Cluster, client: Client, store: Store, expected: Completion) -> None:
    """One target is killed, another one found, and drained."""
    killed = cluster.services["target-1"].spec.address
    cluster.kill("target-1")

    async def is_forgotten() -> bool:
        status = await client.status()
        return killed not in {replica.address for replica in status.replicas} | set(await states(store))

    await eventually(is_forgotten, "the target that was killed is forgotten")
    with ExitStack() as stack:
        target = cluster.services["target"].spec
        new_settings = dict(argument[2:].split("=", 1) for argument in target.arguments if "=" in argument)
        for name in ("host", "port"):
            del new_settings[name]
        log_dir = cluster.log_dir / "late"
        redis_url = target.environment["SPECDEC_TARGET_REDIS_URL"]
        late = stack.enter_context(another("target", log_dir, **new_settings, **{"redis-url": redis_url}))
        address = late.services["target"].spec.address

        async def is_used() -> bool:
            return any(r.address == address and r.state == "ready" for r in (await client.status()).replicas)

        await eventually(is_used, "the target that came later is used")
        [stays] = [r.address for r in (await client.status()).replicas if r.role == "target" and r.address != address]
        assert stays == target.address
        readings = [Reading(client, sampled_request(1)) for _ in range(4)]
        await asyncio.gather(*(reading.until(5) for reading in readings))
        late.services["target"].terminate()
        seen = set()

        async def is_gone() -> bool:
            seen.add((await states(store)).get(address))
            return None in seen

        rest = asyncio.gather(*(reading.rest() for reading in readings))
        await eventually(is_gone, "the target that drained is withdrawn")
        assert seen <= {"ready", "draining", None}
        assert [completion.identity for completion in await rest] == [expected.identity] * 4
