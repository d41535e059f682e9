"""What two versions share in Redis: the registry, the prefix map, the journal, what tenants use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager

import pytest

from specdec.client import Client
from specdec.coordinator.intake.callers import TENANT_KEY
from specdec.coordinator.replicas.router import block_digests
from specdec.store.interface import RequestKey, Store
from specdec.store.urls import RedisOptions, connect
from specdec.v1 import common_pb2 as pb
from specdec.wire.errors import Cancelled, InvalidRequest, Overloaded, RequestExists
from tests.support.releases import Build
from tests.support.servers.redis_server import RedisServer
from tests.support.services.faults import (
    Reading,
    SmallBuffers,
    eventually,
    resumed,
    sampled_request,
)
from tests.support.services.mixed_fleet import MixedFleet

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

REPLICAS = ("target-last", "target-this", "draft-last", "draft-this")
MOST_REQUESTS = 3
BURST_TOKENS = 2500
NUM_TOKENS = 200
NUM_BEFORE = 60
HERE_THERE = pytest.mark.parametrize(("here", "there"), [("last", "this"), ("this", "last")])


@pytest.fixture(scope="module")
def fleet(mixed_fleet: MixedFleet, builds: Mapping[str, Build]) -> Iterator[MixedFleet]:
    """`mixed_fleet` with a coordinator of each version, which find all others in Redis."""
    names = [f"coordinator-{version}" for version in builds]
    limits = {
        "max_concurrent_requests_per_tenant": MOST_REQUESTS,
        "quota_tokens_per_s": 0.001,
        "quota_burst_tokens": BURST_TOKENS,
    }
    for name, build in zip(names, builds.values(), strict=True):
        mixed_fleet.add(name, build, **limits)
    asyncio.run(mixed_fleet.start(*names))
    for name in names:
        asyncio.run(mixed_fleet.until_ready(name, *REPLICAS))
    yield mixed_fleet
    for name in names:
        mixed_fleet.kill(name)


@pytest.fixture
async def store(upgrade_redis: RedisServer) -> AsyncIterator[Store]:
    """What this version reads of the Redis that all share."""
    store = connect(upgrade_redis.url, RedisOptions(timeout_s=20.0))
    yield store
    await store.close()


@asynccontextmanager
async def client_of(fleet: MixedFleet, version: str, tenant: str) -> AsyncIterator[Client]:
    """A tenant's client of one coordinator; its streams stand still while they are not read."""
    settings = SmallBuffers(metadata=((TENANT_KEY, tenant),))
    async with Client(fleet.address(f"coordinator-{version}"), settings) as client:
        yield client


async def journal_has(store: Store, key: RequestKey, num_tokens: int) -> None:
    async def has() -> bool:
        record = await store.load(key)
        return record is not None and len(record.token_ids[0]) >= num_tokens

    await eventually(has, f"{num_tokens} tokens of {key.request_id} are in the journal")


@pytest.mark.parametrize("version", ["last", "this"])
async def test_each_finds_all_replicas_and_coordinators_of_both_in_the_registry(
    version: str, fleet: MixedFleet
) -> None:
    wanted = {fleet.address(name) for name in ("coordinator-last", "coordinator-this")}

    async def sees_all() -> bool:
        return {c.address for c in (await client.status()).coordinators if c.state == "ready"} == wanted

    async with client_of(fleet, version, "registry") as client:
        await eventually(sees_all, f"coordinator-{version} sees both coordinators in the registry; {fleet}")
        status = await client.status()
    assert status.degraded == [], str(fleet)
    replicas = {replica.address: replica for replica in status.replicas}
    assert replicas.keys() == {fleet.address(name) for name in REPLICAS}, str(fleet)
    for name in REPLICAS:
        replica = replicas[fleet.address(name)]
        assert (replica.state, replica.detail) == ("ready", ""), f"{name} at coordinator-{version}; {fleet}"
        assert replica.identity.weights_digest
        assert replica.load.max_sessions > 0


@HERE_THERE
async def test_a_second_turn_goes_where_the_other_version_left_the_first_ones_tokens(
    here: str, there: str, fleet: MixedFleet, store: Store
) -> None:
    num_missed = 0
    async with client_of(fleet, here, f"turns {here}") as one, client_of(fleet, there, f"turns {here}") as two:
        for seed in range(6):
            first_body = sampled_request(1000 * (here == "last") + seed, max_tokens=40)
            first = await one.complete(first_body)
            prompt = [*first_body.prompt_token_ids.token_ids, *first.choices[0].token_ids]
            salt = f"turns {here}".encode()

            async def is_shared(prompt: list[int] = prompt, salt: bytes = salt) -> bool:
                return all(await store.prefix_holders(block_digests(prompt, salt)))

            await eventually(is_shared, f"coordinator-{here} tells what is cached; {fleet}")
            second = await two.complete(sampled_request(seed, [*prompt, 40, 41, 42], max_tokens=4))
            cached = second.require_finished().usage.cached_tokens
            num_missed += cached <= len(first_body.prompt_token_ids.token_ids)
    assert num_missed == 0, f"coordinator-{there} did not find what coordinator-{here} left; {fleet}"


@HERE_THERE
async def test_an_id_that_runs_at_one_version_is_refused_by_the_other_and_aborted_through_it(
    here: str, there: str, fleet: MixedFleet
) -> None:
    tenant = f"aborting {here}"
    num_tokens = 10 * NUM_TOKENS  # more than come while an abort is on its way through Redis
    body = sampled_request(1, max_tokens=num_tokens)
    body.request_id = "mine"
    async with (
        client_of(fleet, here, tenant) as one,
        client_of(fleet, there, tenant) as two,
        Reading(one, body) as stream,
    ):
        await stream.until(NUM_BEFORE)
        with pytest.raises(RequestExists):
            await two.complete(body)
        assert await two.abort("mine"), f"coordinator-{there} does not know the request of coordinator-{here}; {fleet}"
        completion = await stream.rest()
        assert completion.choices[0].finished is not None
        assert completion.choices[0].finished.reason == pb.FINISH_REASON_ABORT, str(fleet)
        assert len(completion.choices[0].token_ids) < num_tokens


@HERE_THERE
async def test_a_stream_is_taken_over_with_the_tokens_that_the_other_version_journalled(
    here: str, there: str, fleet: MixedFleet, store: Store
) -> None:
    """The client that takes it over says nothing of what it holds: all comes from the journal, or is computed again."""
    tenant = f"taking over {here}"
    body = sampled_request(2, max_tokens=NUM_TOKENS)
    body.request_id = "mine"
    async with client_of(fleet, here, tenant) as one, client_of(fleet, there, tenant) as two:
        async with Reading(one, body) as stream:
            held = await stream.until(NUM_BEFORE)
            await journal_has(store, RequestKey(tenant, "mine"), NUM_BEFORE)
            again = resumed(body, held)
            del again.resume.choices[:]
            other = sampled_request(2, max_tokens=NUM_TOKENS + 1)
            other.request_id, other.sampling.seed = again.request_id, again.sampling.seed
            other.resume.CopyFrom(again.resume)
            with pytest.raises(InvalidRequest) as differs:
                await two.complete(other)
            assert (differs.value.reason, differs.value.field) == ("RESUME_DIFFERS", "sampling.max_tokens"), str(fleet)
            whole = await two.complete(again)
            with pytest.raises(Cancelled) as caught:
                await stream.rest()
            assert caught.value.reason == "TAKEN_OVER"
        body.request_id = "from the beginning"
        undisturbed = await two.complete(body)
    assert whole.identity == undisturbed.identity, f"from coordinator-{here} to coordinator-{there}; {fleet}"
    assert held.choices[0].token_ids == whole.choices[0].token_ids[: held.num_tokens]
    num_new = whole.require_finished().stats.num_steps
    assert num_new <= NUM_TOKENS - NUM_BEFORE, f"coordinator-{there} computed again what was journalled; {fleet}"


@HERE_THERE
async def test_what_a_tenant_does_at_one_version_counts_at_the_other(here: str, there: str, fleet: MixedFleet) -> None:
    tenant = f"counted {here}"
    async with client_of(fleet, here, tenant) as one, client_of(fleet, there, tenant) as two:
        streams = [Reading(one, sampled_request(seed, max_tokens=NUM_TOKENS)) for seed in range(MOST_REQUESTS)]
        for stream in streams:
            await stream.until(10)
        with pytest.raises(Overloaded) as many:
            await two.complete(sampled_request(9))
        assert many.value.reason == "TOO_MANY_REQUESTS_OF_TENANT", str(fleet)
        for stream in streams:
            await stream.rest()
        # A prompt is admitted as long as anything is left, and then is more than what is left.
        await one.complete(sampled_request(3, [17] * BURST_TOKENS, max_tokens=1))

        async def is_refused() -> bool:
            try:
                await two.complete(sampled_request(4, max_tokens=1))
            except Overloaded as error:
                return error.reason == "QUOTA_EXCEEDED"
            return False

        await eventually(is_refused, f"coordinator-{there} knows what coordinator-{here} has charged; {fleet}")
