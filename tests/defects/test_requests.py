"""What single requests did to everybody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from specdec.client import Client, ClientSettings
from specdec.commands.up.cluster import Cluster
from specdec.wire.errors import SpecdecError
from tests.support.services.faults import addresses_of, held_back, make_request, plain, speculated

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(400)]

ANSWER_S = 60.0
FOREIGN_S = 10.0
"""What others do may cost a small request so long, on a busy machine."""
SMALL_MESSAGE_BYTES = 256 * 1024
MOST_RSS_BYTES = 1 << 30


def of_tenant(name: str) -> ClientSettings:
    return ClientSettings(metadata=(("specdec-tenant", name),))


async def test_a1_a_request_whose_logits_overflow_ends_no_engine_and_gets_no_token(
    start: Callable[..., Cluster], engines: Callable[[Cluster], dict[str, psutil.Process]]
) -> None:
    cluster = start()
    before = engines(cluster)
    async with Client(cluster.address) as client:
        with pytest.raises(SpecdecError) as caught:
            async with asyncio.timeout(ANSWER_S):
                await client.complete(make_request(max_tokens=40, temperature=1.0, repetition_penalty=1e-40))
        assert caught.value.reason in ("INVALID_REQUEST", "NON_FINITE_LOGITS")
        await speculated(client, make_request(max_tokens=100))
    assert engines(cluster) == before


async def test_a7_log_probabilities_beyond_a_message_end_their_own_request_at_most(
    start: Callable[..., Cluster],
) -> None:
    limits = {"max_message_bytes": SMALL_MESSAGE_BYTES}
    cluster = start(
        num_targets=2, num_drafts=0, target_settings={**limits, "max_model_len": 3500}, coordinator_settings=limits
    )
    body = make_request(max_tokens=8, prompt_logprobs=20)
    body.prompt_token_ids.token_ids.extend(10 + (7 * index) % 200 for index in range(3000))
    async with Client(cluster.address) as client:
        with suppress(SpecdecError):  # An answer, or an error of its own; both in time.
            async with asyncio.timeout(ANSWER_S):
                await client.complete(body)
        states = {replica.address: replica.state for replica in (await client.status()).replicas}
        assert set(states.values()) == {"ready"}
        await client.complete(make_request(max_tokens=16))


async def test_a9_prompts_beyond_a_tenants_limits_cost_others_neither_memory_nor_time(
    start: Callable[..., Cluster],
) -> None:
    cluster = start(num_drafts=0, coordinator_settings={"max_concurrent_requests_per_tenant": 2})
    coordinator = psutil.Process(cluster.services["coordinator"].pid)
    huge = plain(make_request(max_tokens=8, prompt="The quick brown fox. " * 195_000))
    address = cluster.address
    async with Client(address, of_tenant("greedy")) as greedy, Client(address, of_tenant("polite")) as polite:
        await polite.complete(plain(make_request(max_tokens=8)))

        async def flood() -> None:
            with suppress(SpecdecError):
                await greedy.complete(huge)

        tasks = [asyncio.create_task(flood()) for _ in range(16)]
        most_bytes, longest_s = 0, 0.0
        while not all(task.done() for task in tasks):
            began_s = time.monotonic()
            await polite.complete(plain(make_request(max_tokens=8)))
            longest_s = max(longest_s, time.monotonic() - began_s)
            most_bytes = max(most_bytes, coordinator.memory_info().rss)
    assert longest_s < FOREIGN_S
    assert most_bytes < MOST_RSS_BYTES


@pytest.mark.parametrize("full", [0, 1])
async def test_a10_a_target_that_another_coordinator_has_filled_is_left_for_an_idle_one(
    start: Callable[..., Cluster], beside: Callable[..., Cluster], full: int
) -> None:
    cluster = start(num_targets=2, num_drafts=0, target_settings={"max_sessions": 2})
    targets = addresses_of(cluster)["targets"]
    other = beside("coordinator", targets=[targets[full]], credit_window_tokens=16)
    other.wait_connected(1)
    async with held_back(other.address) as client, Client(cluster.address) as asking:
        held = [client.generate(plain(make_request(max_tokens=2000, seed=seed))) for seed in (1, 2)]
        for stream in held:
            for _ in range(3):
                await anext(stream)
        async with asyncio.timeout(FOREIGN_S):
            for seed in range(3, 9):
                await asking.complete(plain(make_request(max_tokens=16, seed=seed)))
        for stream in held:
            await stream.aclose()  # type: ignore[attr-defined]


async def test_a11_no_request_passes_the_operators_limit_on_drafts(start: Callable[..., Cluster]) -> None:
    limit = {"max_draft_tokens": 1}
    cluster = start(draft_settings=limit, target_settings=limit)
    body = make_request(max_tokens=200)
    body.speculation.max_draft_tokens = 60
    async with Client(cluster.address) as client:
        finished = (await speculated(client, body)).choices[0].finished
    assert finished is not None
    assert list(finished.stats.verified_by_depth[1:]) == []
