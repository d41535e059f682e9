"""A coordinator that is full or about to leave: what runs ends well, what comes is told when to try again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.client import Client
from specdec.commands.up.cluster import Cluster
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2_grpc
from specdec.wire.errors import Overloaded, Unavailable, from_rpc_error
from tests.support.services.faults import (
    CREDIT_WINDOW,
    Reading,
    addresses_of,
    all_blocks_free,
    another,
    eventually,
    freeze,
    held_back,
    make_request,
    thaw,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

LONG = 2000


@pytest.fixture(scope="module")
def narrow(steady_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator with one place, and room for one more request to wait."""
    settings: dict[str, object] = {**addresses_of(steady_cluster), "max_running": 1, "max_waiting": 1}
    settings["credit_window_tokens"] = CREDIT_WINDOW
    with another("coordinator", tmp_path_factory.mktemp("narrow"), **settings) as coordinator:
        yield coordinator


async def wait_for_counts(client: Client, num_running: int, num_waiting: int) -> None:
    async def is_so() -> bool:
        status = await client.status()
        return (status.num_running, status.num_waiting) == (num_running, num_waiting)

    await eventually(is_so, f"{num_running} requests run and {num_waiting} wait")


async def test_a_request_too_many_is_told_when_to_try_again_and_the_others_end_well(
    steady_cluster: Cluster, narrow: Cluster
) -> None:
    short = make_request(max_tokens=10, temperature=1.0)
    async with held_back(narrow.address) as client:
        expected = await client.complete(short)
        async with Reading(client, make_request(max_tokens=LONG)) as stream:
            await stream.until(1)
            freeze(steady_cluster, "target")
            try:
                waiting = asyncio.create_task(client.complete(short))
                await wait_for_counts(client, 1, 1)
                with pytest.raises(Overloaded) as caught:
                    await client.complete(short)
                assert caught.value.retry_after_s > 0
                assert caught.value.reason == "OVERLOADED"
            finally:
                thaw(steady_cluster, "target")
        assert (await waiting).identity == expected.identity
        await wait_for_counts(client, 0, 0)
    await all_blocks_free(steady_cluster)


async def test_a_more_urgent_request_takes_the_place_in_line_of_a_less_urgent_one(
    steady_cluster: Cluster, narrow: Cluster
) -> None:
    patient, urgent = make_request(max_tokens=10), make_request(max_tokens=10)
    patient.priority, urgent.priority = 5, -5
    async with held_back(narrow.address) as client:
        async with Reading(client, make_request(max_tokens=LONG)) as stream:
            await stream.until(1)
            freeze(steady_cluster, "target")
            try:
                less = asyncio.create_task(client.complete(patient))
                await wait_for_counts(client, 1, 1)
                more = asyncio.create_task(client.complete(urgent))
                with pytest.raises(Overloaded):
                    await less
            finally:
                thaw(steady_cluster, "target")
        assert (await more).num_tokens == 10


async def test_a_request_that_waits_can_be_aborted(steady_cluster: Cluster, narrow: Cluster) -> None:
    body = make_request(max_tokens=10)
    body.request_id = "in-line"
    async with held_back(narrow.address) as client:
        async with Reading(client, make_request(max_tokens=LONG)) as stream:
            await stream.until(1)
            freeze(steady_cluster, "target")
            try:
                waiting = asyncio.create_task(client.complete(body))
                await wait_for_counts(client, 1, 1)
                assert await client.abort("in-line")
                completion = await waiting
            finally:
                thaw(steady_cluster, "target")
        assert completion.num_tokens == 0
        [choice] = completion.choices.values()
        assert choice.finished is not None
        assert choice.finished.reason == pb.FINISH_REASON_ABORT
        await wait_for_counts(client, 0, 0)


async def test_a_coordinator_that_is_told_to_leave_ends_what_runs_and_refuses_what_comes(
    steady_cluster: Cluster, tmp_path: Path
) -> None:
    body = make_request(max_tokens=LONG, temperature=1.0)
    settings = {**addresses_of(steady_cluster), "credit_window_tokens": CREDIT_WINDOW}
    with another("coordinator", tmp_path, **settings) as leaving:
        service = leaving.services["coordinator"]
        async with held_back(leaving.address) as client, grpc.aio.insecure_channel(leaving.address) as channel:
            undisturbed = await client.complete(body)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            async with Reading(client, body) as stream:
                await stream.until(10)
                service.terminate()
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await coordinator_pb2_grpc.CoordinatorServiceStub(channel).Generate(body).read()
                error = from_rpc_error(caught.value)
                assert isinstance(error, Unavailable)
                assert error.reason == "DRAINING"
                completion = await stream.rest()
            watch.cancel()
        assert completion.identity == undisturbed.identity
        assert service.wait(60.0)
        assert service.exit_code == 0
    await all_blocks_free(steady_cluster)
