"""Requests that end early, by whatever hand, give back all they held."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from specdec.client import Client, ClientSettings
from specdec.commands.up.cluster import Cluster
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import DeadlineExceeded
from tests.support.services.faults import PATIENCE_S, Reading, all_blocks_free, eventually, held_back, make_request

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

AT_ONCE = 8
MAX_TOKENS = 400


@pytest.fixture
async def client(tiny_cluster: Cluster) -> AsyncIterator[Client]:
    """A client, and the check that afterwards nothing is held anywhere."""
    async with Client(tiny_cluster.address) as client:
        yield client

        async def is_idle() -> bool:
            status = await client.status()
            return status.num_running == status.num_waiting == 0

        await eventually(is_idle, "no request runs")
    await all_blocks_free(tiny_cluster)


async def cancel_at_random(client: Client, count: int) -> int:
    """Start requests and cancel each after a random number of chunks or a random time; returns how many ended first."""
    chance = random.Random(0)
    places = asyncio.Semaphore(AT_ONCE)
    num_ended = 0

    async def one(number: int) -> None:
        nonlocal num_ended
        body = make_request(max_tokens=MAX_TOKENS, temperature=1.0, seed=number, n=chance.choice([1, 1, 3]))
        after_tokens, after_s = chance.randrange(MAX_TOKENS), chance.uniform(0.0, 0.3)
        async with places, Reading(client, body) as stream:
            if chance.random() < 0.5:
                await stream.until(after_tokens)
                return
            reading = asyncio.create_task(stream.rest())
            done, _ = await asyncio.wait([reading], timeout=after_s)
            num_ended += len(done)
            reading.cancel()
            await asyncio.wait([reading])

    await asyncio.gather(*(one(number) for number in range(count)))
    return num_ended


async def test_100_requests_cancelled_at_random_moments_give_back_all_blocks(client: Client) -> None:
    assert await cancel_at_random(client, 100) < 50


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_1000_requests_cancelled_at_random_moments_give_back_all_blocks(client: Client) -> None:
    assert await cancel_at_random(client, 1000) < 500


async def test_a_request_runs_as_ever_after_others_were_cancelled(client: Client) -> None:
    body = make_request(max_tokens=50, temperature=1.0)
    before = await client.complete(body)
    await cancel_at_random(client, 10)
    assert (await client.complete(body)).identity == before.identity


async def test_a_deadline_in_the_middle_of_a_stream_ends_it_and_frees_both_sides(
    tiny_cluster: Cluster, client: Client
) -> None:
    body = make_request(max_tokens=MAX_TOKENS, temperature=1.0, n=16)
    async with Client(tiny_cluster.address, ClientSettings(timeout_s=0.5)) as hurried:
        with pytest.raises(DeadlineExceeded):
            async with Reading(hurried, body) as stream:
                await stream.rest()
        assert stream.completion.finished is None


async def test_a_client_that_goes_away_frees_both_sides(tiny_cluster: Cluster, client: Client) -> None:
    leaving = Client(tiny_cluster.address)
    chunks = leaving.generate(make_request(max_tokens=MAX_TOKENS, n=8))
    await anext(chunks)
    await leaving.close()


async def test_abort_ends_the_stream_in_order(tiny_cluster: Cluster, client: Client) -> None:
    body = make_request(max_tokens=MAX_TOKENS, temperature=1.0, n=8)
    body.request_id = "to-abort"
    async with held_back(tiny_cluster.address) as reader, Reading(reader, body) as stream:
        await stream.until(8)
        assert await client.abort("to-abort")
        completion = await asyncio.wait_for(stream.rest(), PATIENCE_S)
    reasons = [choice.finished.reason for choice in completion.choices.values() if choice.finished]
    assert len(reasons) == 8
    assert pb.FINISH_REASON_ABORT in reasons
    assert completion.require_finished().usage.completion_tokens == completion.num_tokens


async def test_aborting_what_does_not_run_does_nothing(client: Client) -> None:
    assert not await client.abort("never-heard-of")
    assert (await client.complete(api.GenerateRequest(prompt="x", sampling={"max_tokens": 2}))).num_tokens
