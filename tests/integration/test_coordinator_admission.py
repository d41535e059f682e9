"""Who gets a place: ids, queue, priorities; and how it is free again when a request ends, whatever ends it."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc as api_grpc
from specdec.wire.errors import (
    Overloaded,
    RequestExists,
)
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.replica import PATIENCE_S
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    Harness,
    collect,
    error_of,
    expected_ids,
    request,
    running,
)


async def started(harness: Harness, body: api.GenerateRequest) -> Any:
    """A running request, read up to its first delta."""
    call = harness.stub.Generate(body)
    while (await call.read()).WhichOneof("chunk") != "delta":
        pass
    return call


async def test_a_live_request_id_is_taken_but_only_for_its_tenant() -> None:
    target = ScriptedTarget()
    target.limit = 3
    async with running([target]) as harness:
        call = await started(harness, request(request_id="same"))
        assert isinstance(await error_of(harness.stub.Generate(request(request_id="same"))), RequestExists)
        other = harness.stub.Generate(request(request_id="same"), metadata=(("specdec-tenant", "other"),))
        assert (await other.read()).HasField("started")
        other.cancel()
        target.set_limit(None)
        await collect(call)
        result = await collect(harness.stub.Generate(request(request_id="same")))
    assert result.ids() == expected_ids(target, 20)


async def test_overload_is_refused_with_a_time_to_retry_and_priorities_go_first() -> None:
    target = ScriptedTarget()
    target.limit = 1
    async with running([target], max_running=1, max_waiting=1) as harness:
        first = await started(harness, request())
        low = harness.stub.Generate(request(priority=5, request_id="low"))
        await wait_for_status(harness, num_waiting=1)
        refused = await error_of(harness.stub.Generate(request(priority=5)))
        assert isinstance(refused, Overloaded)
        assert refused.retry_after_s > 0
        high = harness.stub.Generate(request(priority=-1, request_id="high"))
        evicted = await error_of(low)
        assert isinstance(evicted, Overloaded)
        assert harness.metric("admission_rejects_total", cause="overloaded") == 2
        assert harness.metric("request_seconds_count") == 0  # what was refused says nothing of how long requests take
        target.set_limit(None)
        await collect(first)
        assert (await collect(high)).ids() == expected_ids(target, 20)


async def wait_for_status(harness: Harness, **wanted: int) -> None:
    """Ask for the status until it is so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = await harness.stub.GetStatus(api.GetStatusRequest())
            if all(getattr(status, name) == value for name, value in wanted.items()):
                return


async def test_a_place_in_the_queue_is_lost_after_the_queue_timeout() -> None:
    target = ScriptedTarget()
    target.limit = 1
    async with running([target], max_running=1, queue_timeout_s=0.05) as harness:
        await started(harness, request())
        error = await error_of(harness.stub.Generate(request()))
    assert isinstance(error, Overloaded)
    assert error.reason == "QUEUE_TIMEOUT"


async def test_aborting_ends_the_stream_in_order_and_frees_both_sides() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.limit = 4
    async with running([target], [draft]) as harness:
        call = await started(harness, request(request_id="a", n=2))
        assert (await harness.stub.Abort(api.AbortRequest(request_id="a"))).aborted
        result = await collect(call)
        await target.until(lambda: not target.sessions)
        await draft.until(lambda: not draft.sessions)
        assert not (await harness.stub.Abort(api.AbortRequest(request_id="a"))).aborted
    assert {e.reason for e in result.ended.values()} == {pb.FINISH_REASON_ABORT}
    assert len(result.ended) == 2
    assert result.chunks[-1] == "finished"


async def test_aborting_a_waiting_request_ends_its_stream_in_order() -> None:
    target = ScriptedTarget()
    target.limit = 1
    async with running([target], max_running=1) as harness:
        await started(harness, request())
        waiting = harness.stub.Generate(request(request_id="w"))
        await wait_for_status(harness, num_waiting=1)
        assert (await harness.stub.Abort(api.AbortRequest(request_id="w"))).aborted
        result = await collect(waiting)
        await wait_for_status(harness, num_waiting=0, num_running=1)
    assert result.chunks == ["started", "choice_finished", "finished"]
    assert result.ended[0].reason == pb.FINISH_REASON_ABORT


async def test_a_client_that_goes_away_frees_both_sides_and_its_place() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.limit = 4
    async with running([target], [draft]) as harness:
        call = harness.stub.Generate(request(n=2))
        await target.until(lambda: len(target.sessions) == 2)
        call.cancel()
        await target.until(lambda: not target.sessions)
        await draft.until(lambda: not draft.sessions)
        await wait_for_status(harness, num_running=0)


async def test_a_deadline_reaches_the_target_and_frees_both_sides_and_the_place() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.limit = 4
    async with running([target], [draft]) as harness:
        for timeout_s in (0.3, 3, 30):  # on a busy machine one may pass before anything is opened
            call = harness.stub.Generate(request(n=2), timeout=timeout_s)
            assert (await error_of(call)).code == grpc.StatusCode.DEADLINE_EXCEEDED
            if len(target.opened) >= 2 and draft.opened:
                break
        opened = [entry.open for frame in target.frames for entry in frame.entries if entry.HasField("open")]
        assert 0 < opened[-1].deadline_ms <= timeout_s * 1000 + 10  # gRPC rounds up
        await target.until(lambda: not target.sessions)
        await draft.until(lambda: not draft.sessions)
        await wait_for_status(harness, num_running=0)


async def test_a_cancelled_waiting_request_leaves_the_queue() -> None:
    target = ScriptedTarget()
    target.limit = 1
    async with running([target], max_running=1) as harness:
        first = await started(harness, request())
        waiting = harness.stub.Generate(request())
        await wait_for_status(harness, num_waiting=1)
        waiting.cancel()
        await wait_for_status(harness, num_waiting=0)
        first.cancel()
        await wait_for_status(harness, num_running=0)
    assert len(target.opened) == 1


async def test_a_slow_client_slows_its_own_session_only() -> None:
    target = ScriptedTarget()
    async with running([target], credit_window_tokens=32) as harness:
        # Every token carries twenty alternatives, and the client's window does not grow: it fills soon.
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)]
        async with grpc.aio.insecure_channel(harness.address, options=options) as channel:
            slow = api_grpc.CoordinatorServiceStub(channel).Generate(request(max_tokens=4000, logprobs=20))
            assert (await slow.read()).HasField("started")
            fast = await collect(harness.stub.Generate(request(max_tokens=4000, seed=12)))
            assert fast.ids() == expected_ids(target, 4000, seed=12)
            assert 0 < target.num_output() < 4000
            result = await collect(slow)
    assert result.ids() == expected_ids(target, 4000)
