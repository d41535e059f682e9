"""When a target dies, hangs or leaves, streams go on with the same tokens, or end so that they can be taken up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.commands.up.cluster import Cluster
from specdec.wire.errors import Unavailable
from tests.support.services.engine_processes import engine_of
from tests.support.services.faults import (
    CREDIT_WINDOW,
    Reading,
    addresses_of,
    another,
    freeze,
    held_back,
    make_request,
    resumed,
    start_again,
    thaw,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

BEFORE = 20


async def test_a_target_that_is_killed_and_restarted_goes_on_with_the_same_tokens(whole: Cluster) -> None:
    body = make_request(temperature=1.0, n=2)
    async with held_back(whole.address) as client:
        undisturbed = await client.complete(body)
        async with Reading(client, body) as stream:
            await stream.until(BEFORE)
            whole.kill("target")
            whole.restart("target")
            completion = await stream.rest()
    assert completion.identity == undisturbed.identity


@pytest.mark.long
async def test_target_and_draft_killed_together_and_restarted_go_on_with_the_same_tokens(whole: Cluster) -> None:
    body = make_request(temperature=0.7)
    async with held_back(whole.address) as client:
        undisturbed = await client.complete(body)
        async with Reading(client, body) as stream:
            await stream.until(BEFORE)
            whole.kill("target")
            whole.kill("draft")
            start_again(whole, "target", "draft")
            completion = await stream.rest()
    assert completion.identity == undisturbed.identity


@pytest.mark.long
async def test_a_target_that_hangs_for_a_while_goes_on_with_the_same_tokens(whole: Cluster) -> None:
    body = make_request()
    async with held_back(whole.address) as client:
        undisturbed = await client.complete(body)
        async with Reading(client, body) as stream:
            await stream.until(BEFORE)
            freeze(whole, "target")
            reading = asyncio.create_task(stream.rest())
            assert not (await asyncio.wait([reading], timeout=0.5))[0], "tokens came from a frozen target"
            thaw(whole, "target")
            assert (await reading).identity == undisturbed.identity


@pytest.mark.long
async def test_a_target_that_stays_away_ends_the_stream_so_that_it_can_be_resumed(
    whole: Cluster, tmp_path: Path
) -> None:
    body = make_request(temperature=1.0)
    settings = {**addresses_of(whole), "target_timeout_s": 1.0, "credit_window_tokens": CREDIT_WINDOW}
    with another("coordinator", tmp_path, **settings) as impatient:
        async with held_back(impatient.address) as client:
            undisturbed = await client.complete(body)
            async with Reading(client, body) as stream:
                held = await stream.until(BEFORE)
                whole.kill("target")
                with pytest.raises(Unavailable) as caught:
                    await stream.rest()
            assert caught.value.reason == "TARGET_LOST"
            assert caught.value.retry_after_s > 0
            assert held.num_tokens < 200
            whole.restart("target")
            impatient.wait_connected(num_ready=2)
            rest = await client.complete(resumed(body, held))
    [ours], [part], [end] = undisturbed.choices.values(), held.choices.values(), rest.choices.values()
    assert part.token_ids + end.token_ids == ours.token_ids
    assert part.text + end.text == ours.text


@pytest.mark.long
async def test_a_replica_whose_engine_dies_stops_serving_until_it_has_another(whole: Cluster) -> None:
    service = whole.services["target"]
    assert service.pid is not None
    engine = engine_of(whole, "target")
    async with grpc.aio.insecure_channel(service.spec.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        engine.kill()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
    assert service.is_running
    assert any("SIGKILL" in line for line in service.last_log_lines())


@pytest.mark.long
async def test_requests_wait_for_a_target_that_is_starting(whole: Cluster) -> None:
    body = make_request(max_tokens=20)
    async with held_back(whole.address) as client:
        undisturbed = await client.complete(body)
        whole.kill("target")
        waiting = asyncio.create_task(client.complete(body))
        await asyncio.sleep(0)
        whole.restart("target")
        assert (await waiting).identity == undisturbed.identity


@pytest.mark.long
@pytest.mark.parametrize("name", ["target", "draft"])
async def test_a_replica_that_drains_lets_its_sessions_end(whole: Cluster, name: str) -> None:
    body = make_request()
    async with held_back(whole.address) as client:
        undisturbed = await client.complete(body)
        async with Reading(client, body) as stream:
            await stream.until(BEFORE)
            whole.services[name].terminate()
            completion = await stream.rest()
    assert completion.identity == undisturbed.identity
    assert whole.services[name].wait(60.0)
    assert whole.services[name].exit_code == 0
