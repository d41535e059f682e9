"""Several coordinators over one registry: each is attached to some replicas, each replica to some coordinators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from specdec.store.announcer import AnnouncedState, Announcer
from specdec.store.urls import RedisOptions, connect
from specdec.v1 import common_pb2 as pb
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.replica import ScriptedReplica
from tests.support.scripted.target import ScriptedTarget
from tests.support.servers.redis_server import RedisServer
from tests.support.services.coordinator_harness import (
    Harness,
    collect,
    expected_ids,
    finish,
    read_tokens,
    request,
    running,
)
from tests.support.services.faults import eventually

pytestmark = pytest.mark.integration

NUM_COORDINATORS, NUM_REPLICAS, SIZE = 4, 12, 9
EACH = NUM_COORDINATORS * SIZE // NUM_REPLICAS
"""Coordinators of a replica."""
TTL_S = 600.0


class Registry:
    """Replicas that announce themselves."""

    def __init__(self, url: str) -> None:
        self.store = connect(url, RedisOptions(timeout_s=20.0))
        self.announcers: dict[str, Announcer] = {}

    async def add(self, replica: ScriptedReplica, role: str) -> None:
        await replica.start()
        announcer = Announcer(self.store, TTL_S, role, replica.address, pb.GetReplicaInfoResponse)
        announcer.start(replica.address)
        announcer.set_state(AnnouncedState.READY)
        self.announcers[replica.address] = announcer

    async def remove(self, replica: ScriptedReplica) -> None:
        await self.announcers.pop(replica.address).stop()
        await replica.stop()

    async def close(self) -> None:
        for announcer in self.announcers.values():
            await announcer.stop()
        await self.store.close()


@asynccontextmanager
async def fleet(
    redis: RedisServer,
) -> AsyncIterator[tuple[Registry, list[ScriptedTarget], list[ScriptedDraft], list[Harness]]]:
    """Replicas, and coordinators that find them and each other in Redis."""
    targets = [ScriptedTarget() for _ in range(NUM_REPLICAS)]
    drafts = [ScriptedDraft() for _ in range(NUM_REPLICAS)]
    registry = Registry(redis.url)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(registry.close)
        for replica in (*targets, *drafts):
            await registry.add(replica, "target" if replica in targets else "draft")
            stack.push_async_callback(replica.stop)
        harnesses = []
        for number in range(NUM_COORDINATORS):
            settings: dict[str, Any] = {
                "targets": (),
                "drafts": (),
                "redis_url": redis.url,
                "redis_timeout_s": 20.0,
                "discovery_s": 0.1,
                "subset_size": SIZE,
                "owner_id": f"coordinator-{number}",
            }
            harness = await stack.enter_async_context(running([], [], **settings))
            announcer = harness.service.announcer
            assert announcer is not None
            announcer.start(harness.address)
            stack.push_async_callback(announcer.stop)
            harnesses.append(harness)
        yield registry, targets, drafts, harnesses


async def until(condition: Callable[[], bool], what: str) -> None:
    async def holds() -> bool:
        return condition()

    await eventually(holds, what)


def is_even(replicas: list[Any], least: int = EACH, most: int = EACH) -> bool:
    """Whether each replica has so many streams, of so many coordinators."""
    owners = [{stream.owner_id for stream in replica.streams} for replica in replicas]
    return all(least <= len(each) == len(r.streams) <= most for r, each in zip(replicas, owners, strict=True))


async def test_each_replica_is_used_by_equally_many_coordinators_and_all_give_the_same_tokens(
    redis_server: RedisServer,
) -> None:
    async with fleet(redis_server) as (registry, targets, drafts, harnesses):
        await until(lambda: is_even(targets) and is_even(drafts), f"each replica has {EACH} coordinators")
        for number, harness in enumerate(harnesses):
            links = harness.service.fleet.links
            assert len(links) == sum(
                stream.owner_id == f"coordinator-{number}"
                for replica in (*targets, *drafts)
                for stream in replica.streams
            )
            prompts = [[number + 3, seed + 4] for seed in range(8)]
            calls = [harness.stub.Generate(request(prompt)) for prompt in prompts]
            for prompt, call in zip(prompts, calls, strict=True):
                assert (await collect(call)).ids() == expected_ids(targets[0], 20, prompt)
        assert sum(len(target.opened) for target in targets) == NUM_COORDINATORS * 8

        for gone in (targets[0], drafts[0]):
            await registry.remove(gone)
        left = (targets[1:], drafts[1:])
        await until(lambda: all(is_even(each, EACH, EACH + 1) for each in left), "the others make up for a lost one")
        for harness in harnesses:
            assert (await collect(harness.stub.Generate(request()))).ids() == expected_ids(targets[0], 20)


async def test_a_stream_goes_on_at_a_target_that_its_coordinator_leaves(redis_server: RedisServer) -> None:
    async with fleet(redis_server) as (registry, targets, drafts, harnesses):
        await until(lambda: is_even(targets) and is_even(drafts), "attached")
        for target in targets:
            target.set_limit(5)
        calls = [
            harness.stub.Generate(request([n + 3, k + 4], max_tokens=30))
            for n, harness in enumerate(harnesses)
            for k in range(6)
        ]
        starts = [await read_tokens(call, 5) for call in calls]
        opened = {session_id for target in targets for session_id, _, _ in target.opened}
        more = [ScriptedTarget() for _ in range(NUM_REPLICAS)]
        for target in more:
            await registry.add(target, "target")
        await until(lambda: is_even(more, 2, 2), "the new targets are attached")

        def num_retired() -> int:
            return sum(link.is_retired and bool(link.sessions) for h in harnesses for link in h.service.fleet.targets)

        await until(lambda: num_retired() > 0, "links with sessions are to end")
        for target in targets:
            target.set_limit(None)
        for number, (call, start) in enumerate(zip(calls, starts, strict=True)):
            done = await finish(call, start)
            assert done.ids() == expected_ids(targets[0], 30, [number // 6 + 3, number % 6 + 4])
        assert {session_id for target in targets for session_id, _, _ in target.opened} == opened
        assert all(len(t.opened) == len({each for each, _, _ in t.opened}) for t in targets), "none moved"
        await until(lambda: is_even([*targets, *more], 2, 2), "their streams end after their sessions")
        for target in more:
            await target.stop()
