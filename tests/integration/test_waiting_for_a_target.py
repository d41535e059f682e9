"""A request that has its place, and waits for a target: what ends the wait, and which targets it will not have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import Cancelled, Unavailable
from tests.support.scripted.model import identity
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    Harness,
    collect,
    error_of,
    expected_ids,
    read_tokens,
    request,
    resumed,
    running,
)
from tests.support.services.faults import eventually

FOR_EVER_S = 600.0
"""Far longer than a test may take: one that waits for it fails."""


@asynccontextmanager
async def without_a_target(target: ScriptedTarget) -> AsyncIterator[Harness]:
    """A coordinator whose only target has gone."""
    async with running([target], target_timeout_s=FOR_EVER_S) as harness:
        await target.stop()
        await harness.replica_until("target", "down")
        yield harness


async def num_running(harness: Harness) -> int:
    return (await harness.stub.GetStatus(api.GetStatusRequest())).num_running


async def waits(harness: Harness) -> None:
    """Wait until a request has its place."""

    async def is_admitted() -> bool:
        return await num_running(harness) == 1

    await eventually(is_admitted, "the request has its place")


async def has_ended(harness: Harness) -> None:
    """Wait until no request has a place."""

    async def is_free() -> bool:
        return await num_running(harness) == 0

    await eventually(is_free, "the place is free")


async def test_an_abort_ends_the_wait_for_a_target_in_order() -> None:
    async with without_a_target(ScriptedTarget()) as harness:
        call = harness.stub.Generate(request(request_id="mine", n=2))
        await waits(harness)
        assert (await harness.stub.Abort(api.AbortRequest(request_id="mine"))).aborted
        result = await collect(call)
        assert await num_running(harness) == 0
    assert result.chunks == ["started", "choice_finished", "choice_finished", "finished"]
    assert {ended.reason for ended in result.ended.values()} == {pb.FINISH_REASON_ABORT}


async def test_draining_ends_the_wait_for_a_target_with_its_reason() -> None:
    async with without_a_target(ScriptedTarget()) as harness:
        call = harness.stub.Generate(request())
        await waits(harness)
        await harness.service.drain(0)
        error = await error_of(call)
    assert isinstance(error, Unavailable)
    assert error.reason == "DRAINING"


async def test_a_client_that_leaves_ends_the_wait_for_a_target() -> None:
    async with without_a_target(ScriptedTarget()) as harness:
        call = harness.stub.Generate(request())
        await waits(harness)
        call.cancel()
        await has_ended(harness)
        assert harness.metric("requests_total", outcome="CANCELLED") == 1


async def test_a_resume_ends_the_wait_of_the_stream_that_it_takes_over() -> None:
    target = ScriptedTarget()
    target.limit = 10
    body = request(max_tokens=40, request_id="mine")
    async with running([target], target_timeout_s=FOR_EVER_S) as harness:
        old = harness.stub.Generate(body)
        first = await read_tokens(old, 10)
        await target.stop()
        await harness.replica_until("target", "down")
        old.cancel()
        await has_ended(harness)
        waiting = harness.stub.Generate(resumed(first, body))
        await waits(harness)
        last = harness.stub.Generate(resumed(first, body))
        error = await error_of(waiting)
        target.set_limit(None)
        await target.start()
        rest = await collect(last)
    assert isinstance(error, Cancelled)
    assert error.reason == "TAKEN_OVER"
    assert first.ids() + rest.ids() == expected_ids(target, 40)


async def test_a_request_that_was_accepted_for_one_model_is_never_begun_on_another() -> None:
    target = ScriptedTarget()
    target.limit = 10
    async with running([target], max_running=1, target_timeout_s=2.0) as harness:
        first = harness.stub.Generate(request())
        await read_tokens(first, 10)
        queued = harness.stub.Generate(request())

        async def is_queued() -> bool:
            return harness.metric("queue_length") == 1

        await eventually(is_queued, "the second request waits")
        await target.stop()
        target.identity = identity(weights_digest="w2")
        await target.start()
        assert (await error_of(first)).reason == "TARGET_LOST"
        error = await error_of(queued)
        newcomer = await collect(harness.stub.Generate(request(max_tokens=5)))
    assert isinstance(error, Unavailable)
    assert error.reason == "NO_TARGET"
    assert newcomer.started is not None
    assert newcomer.started.model.weights_digest == "w2"
