"""Whatever becomes of the draft, the stream has the tokens of an undisturbed run."""

from __future__ import annotations

import asyncio
import re

import pytest

from specdec.commands.up.cluster import Cluster
from specdec.v1 import common_pb2 as pb
from tests.support.services.faults import (
    HOLD_OFF_MS,
    POLL_S,
    Reading,
    eventually,
    freeze,
    held_back,
    make_request,
    scrape,
    speculated,
    thaw,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

BEFORE = 20
NUM_TOKENS = 200


def metrics_of(cluster: Cluster) -> dict[str, float]:
    arguments = " ".join(cluster.services["coordinator"].spec.arguments)
    match = re.search(r"--metrics-port=(\d+)", arguments)
    assert match is not None
    return scrape(int(match[1]))


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 1.0])
async def test_killing_the_draft_in_the_middle_of_a_stream_changes_no_token(whole: Cluster, temperature: float) -> None:
    body = make_request(temperature=temperature)
    broken = "specdec_coordinator_draft_fallbacks_total{cause=stream_broken}"
    async with held_back(whole.address) as client:
        undisturbed = await speculated(client, body)
        before = metrics_of(whole).get(broken, 0.0)
        async with Reading(client, body) as stream:
            await stream.until(BEFORE)
            whole.kill("draft")

            async def is_noticed() -> bool:
                return metrics_of(whole).get(broken, 0.0) > before

            await eventually(is_noticed, "the coordinator knows that the draft is gone")
            completion = await stream.rest()
        assert metrics_of(whole)[broken] == before + 1
    assert completion.identity == undisturbed.identity


@pytest.mark.long
async def test_a_draft_that_comes_back_in_the_middle_of_a_stream_is_used_again(whole: Cluster) -> None:
    body = make_request(max_tokens=NUM_TOKENS)
    async with held_back(whole.address) as client:
        undisturbed = await speculated(client, body)
        async with Reading(client, body) as stream:
            await stream.until(BEFORE)
            freeze(whole, "target")
            whole.kill("draft")
            whole.restart("draft")
            whole.wait_healthy("draft")
            thaw(whole, "target")  # its stream was given up meanwhile, and is opened again
            whole.wait_connected()
            for num_tokens in range(BEFORE, NUM_TOKENS, 4):
                await stream.until(num_tokens)
                await asyncio.sleep(POLL_S)  # the draft, which starts anew, may be slower than the stream
            completion = await stream.rest()
    assert completion.identity == undisturbed.identity
    origins = [token.origin for token in completion.choices[0].tokens]
    assert origins[-100:].count(pb.ORIGIN_DRAFT) > 20


@pytest.mark.long
async def test_a_hung_draft_is_waited_for_a_few_times_and_then_no_more(whole: Cluster) -> None:
    body = make_request()
    async with held_back(whole.address) as client:
        undisturbed = await speculated(client, body)
        async with Reading(client, body) as stream:
            await stream.until(BEFORE)
            freeze(whole, "draft")
            assert (await stream.rest()).identity == undisturbed.identity
        without = await client.complete(body)
        assert without.identity == undisturbed.identity
        stats = without.require_finished().stats
        assert stats.num_verify_steps == 0
        assert stats.hold_off_ms < 10 * HOLD_OFF_MS
        thaw(whole, "draft")

        async def speculates() -> bool:
            completion = await client.complete(body)
            assert completion.identity == undisturbed.identity
            return completion.require_finished().stats.num_accepted > 0

        await eventually(speculates, "speculation resumes")
