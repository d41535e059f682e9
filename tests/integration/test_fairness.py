"""A greedy tenant beside a polite one: floods, priorities, streams that nobody reads, deadlines, overload."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import status_pb2

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc as api_grpc
from specdec.wire.errors import NoTarget, Overloaded, from_rpc_error
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

FLOOD = (("specdec-tenant", "flood"),)
POLITE = (("specdec-tenant", "polite"),)
SIXTY_DAYS_S = 60 * 24 * 3600


def opens(target: ScriptedTarget) -> list[pb.OpenSession]:
    """What was opened at a target."""
    return [entry.open for frame in target.frames for entry in frame.entries if entry.HasField("open")]


async def until_status(harness: Harness, **wanted: int) -> None:
    """Ask for the status until it is so."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = await harness.stub.GetStatus(api.GetStatusRequest())
            if all(getattr(status, name) == value for name, value in wanted.items()):
                return


async def until_passed(harness: Harness, wanted_s: float) -> None:
    """Let time pass, which is what is measured, while the coordinator answers."""
    until_s = time.monotonic() + wanted_s
    while time.monotonic() < until_s:
        await harness.stub.GetStatus(api.GetStatusRequest())


async def until_capacity(harness: Harness, num_places: int) -> None:
    """Ask for the status until the coordinator knows how many sessions its targets hold."""
    async with asyncio.timeout(PATIENCE_S):
        while harness.service.fleet.capacity() != num_places:
            await harness.stub.GetStatus(api.GetStatusRequest())


async def outcome(call: Any) -> str:
    """OK, or the reason of the call's error."""
    try:
        await (collect(call) if hasattr(call, "read") else call)
    except grpc.RpcError as error:
        return from_rpc_error(error).reason
    return "OK"


async def test_a_polite_tenant_beside_a_flood_is_never_refused_and_waits_for_a_few_places_only() -> None:
    target = ScriptedTarget()
    async with running([target], max_running=4, max_waiting=64) as harness:
        target.limit = 4
        flood = [asyncio.create_task(outcome(harness.stub.Generate(request(priority=-5), metadata=FLOOD)))
                 for _ in range(200)]  # fmt: skip
        await until_status(harness, num_running=4, num_waiting=64)
        calls = [harness.stub.Generate(request(priority=9), metadata=POLITE) for _ in range(8)]
        polite = [asyncio.create_task(collect(call)) for call in calls]
        async with asyncio.timeout(PATIENCE_S):
            while harness.metric("admission_rejects_total", cause="overloaded") < 200 - 68 + 8:
                await harness.stub.GetStatus(api.GetStatusRequest())
        assert not any(task.done() for task in polite)
        num_done = 0

        def count(_: asyncio.Task[str]) -> None:
            nonlocal num_done
            num_done += 1

        num_refused = sum(task.done() for task in flood)
        for task in flood:
            if not task.done():
                task.add_done_callback(count)
        target.set_limit(None)
        for result in await asyncio.gather(*polite):
            assert result.ids() == expected_ids(target, 20)
        assert num_refused >= 200 - 68
        assert (
            num_done <= 24
        )  # of 60 that were before it: two turns of the flood for each of its own, and 8 for good luck
        outcomes = await asyncio.gather(*flood)
    assert set(outcomes) == {"OK", "OVERLOADED"}


async def test_no_priority_reaches_an_engine_where_it_would_stop_what_runs_of_others() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    async with running([target], [draft]) as harness:
        for priority in (-5, 0, 7):
            await collect(harness.stub.Generate(request(priority=priority)))
    assert [body.priority for body in opens(target)] == [0, 0, 0]
    assert [body.priority for body in opens(draft)] == [0, 0, 0]  # type: ignore[arg-type]


async def test_choices_count_as_places_and_begin_as_places_come() -> None:
    target = ScriptedTarget()
    target.limit = 1
    async with running([target], max_running=4) as harness:
        first = harness.stub.Generate(request(n=3))
        await target.until(lambda: len(target.sessions) == 3)
        wide = harness.stub.Generate(request(n=16))  # more than there are places
        third = harness.stub.Generate(request())
        await until_status(harness, num_running=2, num_waiting=1)
        assert len(target.sessions) == 4
        target.set_limit(None)
        results = await asyncio.gather(collect(first), collect(wide), collect(third))
        num_opened = len(opens(target))
        status = await harness.stub.GetStatus(api.GetStatusRequest())
    for result, num_choices in zip(results, (3, 16, 1), strict=True):
        assert len(result.ended) == num_choices
        for choice in range(num_choices):
            assert result.ids(choice) == expected_ids(target, 20, choice=choice)
    assert (num_opened, status.num_running, status.num_waiting) == (20, 0, 0)


@pytest.mark.parametrize(
    ("fault", "reason"), [(NoTarget("none has room"), "NO_TARGET"), (ValueError("a bug"), "INTERNAL")]
)
async def test_a_fault_of_a_choice_that_begins_later_ends_its_request(
    fault: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ScriptedTarget()
    target.limit = 1

    async def failing(*_: object) -> None:
        raise fault

    async with running([target], max_running=2) as harness:
        call = harness.stub.Generate(request(n=3))
        await target.until(lambda: len(target.sessions) == 2)
        with monkeypatch.context() as patch:
            patch.setattr(harness.service.fleet, "pick_target", failing)
            target.set_limit(None)
            assert (await error_of(call)).reason == reason
        await target.until(lambda: not target.sessions)
        await until_status(harness, num_running=0, num_waiting=0)
        assert len((await collect(harness.stub.Generate(request(n=3)))).ended) == 3  # all places are free again


async def test_one_tenant_cannot_take_all_places_of_the_only_target() -> None:
    target = ScriptedTarget()
    target.limit = 1
    async with running([target]) as harness:
        target.tell_load(num_sessions=0, max_sessions=16)
        await until_capacity(harness, 16)
        flood = [harness.stub.Generate(request(n=16), metadata=FLOOD) for _ in range(2)]
        await target.until(lambda: len(target.sessions) == 15)
        await until_status(harness, num_running=1, num_waiting=1)
        polite = await collect(harness.stub.Generate(request(max_tokens=1), metadata=POLITE))
        assert polite.ids() == expected_ids(target, 1)
        target.set_limit(None)
        results = await asyncio.gather(*map(collect, flood))
    for result in results:
        assert [result.ids(choice) for choice in range(16)] == [
            expected_ids(target, 20, choice=choice) for choice in range(16)
        ]


async def test_aborting_a_request_opens_none_of_its_waiting_choices() -> None:
    target = ScriptedTarget()
    target.limit = 1
    async with running([target], max_running=2) as harness:
        call = harness.stub.Generate(request(n=8, request_id="wide"))
        await target.until(lambda: len(target.sessions) == 2)
        await harness.stub.Abort(api.AbortRequest(request_id="wide"))
        aborted = await collect(call)
        target.set_limit(None)
        await collect(harness.stub.Generate(request(n=2)))
    assert len(aborted.ended) == 8
    assert len(opens(target)) == 4


async def test_a_stream_that_nobody_reads_gives_up_its_place_and_can_be_resumed() -> None:
    target = ScriptedTarget()
    async with running([target], max_running=1, reader_stall_s=0.5) as harness:
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)]
        async with grpc.aio.insecure_channel(harness.address, options=options) as channel:
            unread = api_grpc.CoordinatorServiceStub(channel).Generate(request(max_tokens=4000, logprobs=20))
            await target.until(lambda: bool(target.sessions))
            other = await collect(harness.stub.Generate(request(seed=12), metadata=POLITE))
            assert other.ids() == expected_ids(target, 20, seed=12)
            assert harness.metric("readers_stalled_total") == 1
            with pytest.raises(grpc.RpcError) as caught:
                await collect(unread)
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.CANCELLED, "READER_STALLED")
    assert "ResumeInfo" in details_of(caught.value)


def details_of(error: grpc.RpcError) -> set[str]:
    """Names of the types of an error's details."""
    status = status_pb2.Status()
    for key, value in error.trailing_metadata():  # type: ignore[attr-defined]
        if key == "grpc-status-details-bin":
            status = status_pb2.Status.FromString(value)
    details: list[AnyMessage] = list(status.details)
    return {detail.type_url.rpartition(".")[2] for detail in details}


async def test_calls_beyond_the_limit_are_refused_before_they_are_read() -> None:
    target = ScriptedTarget()
    target.limit = 1
    async with running([target], max_concurrent_calls=2) as harness:
        calls = [harness.stub.Generate(request(seed=seed)) for seed in (1, 2)]
        for call in calls:
            await call.read()
        assert isinstance(await error_of(harness.stub.Generate(request())), Overloaded)
        calls[0].cancel()
        await target.until(lambda: len(target.sessions) == 1)
        async with asyncio.timeout(PATIENCE_S):
            while await outcome(harness.stub.GetStatus(api.GetStatusRequest())) != "OK":
                pass


async def test_a_deadline_that_the_wire_cannot_tell_is_no_fault() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        result = await collect(harness.stub.Generate(request(), timeout=SIXTY_DAYS_S))
    assert result.ids() == expected_ids(target, 20)
    assert opens(target)[0].deadline_ms == 2**32 - 1


async def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    target = ScriptedTarget()
    async with running([target], max_running=1) as harness:
        for _ in range(10):  # from which the coordinator learns how long places are held
            target.limit = 1
            call = harness.stub.Generate(request())
            await target.until(lambda: bool(target.sessions))
            await until_passed(harness, 0.1)
            target.set_limit(None)
            await collect(call)
        target.limit = 1
        harness.stub.Generate(request())
        await until_status(harness, num_running=1)
        waiting = [harness.stub.Generate(request()) for _ in range(200)]
        await until_status(harness, num_waiting=200)
        error = await error_of(harness.stub.Generate(request(), timeout=5.0))
        assert isinstance(error, Overloaded)
        assert error.reason == "DEADLINE_UNREACHABLE"
        assert harness.metric("admission_rejects_total", cause="deadline_unreachable") == 1
        for call in waiting:
            call.cancel()


@pytest.mark.parametrize("shed_after_s", [0.05, None])
async def test_overload_gives_up_speculation_first(shed_after_s: float | None) -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.limit = 1
    async with running([target], [draft], max_running=1, shed_speculation_after_s=shed_after_s) as harness:
        first = harness.stub.Generate(request())
        await until_status(harness, num_running=1)
        calls = [harness.stub.Generate(request()) for _ in range(3)]
        await until_status(harness, num_waiting=3)
        await until_passed(harness, 0.06)
        target.set_limit(None)
        results = await asyncio.gather(*(collect(call) for call in (first, *calls)))
        assert all(result.ids() == expected_ids(target, 20) for result in results)  # not a token differs
        rejection = request(speculation=api.SpeculationParams(verify_mode=pb.VERIFY_MODE_REJECTION))
        await collect(harness.stub.Generate(rejection))
        num_shed = harness.metric("speculation_shed_total")
    speculates = [body.speculate for body in opens(target)]
    if shed_after_s is None:
        assert speculates == [True] * 5
        assert num_shed == 0
    else:
        assert speculates == [True, False, False, False, True]  # a seed's tokens depend on proposals in rejection mode
        assert num_shed == 3
        assert any("speculation" in notice for notice in results[1].started.notices)  # type: ignore[union-attr]


async def test_what_a_tenant_may_have_at_once_is_held_against_it_before_its_prompt_is_read() -> None:
    target = ScriptedTarget()
    target.limit = 1
    async with running([target], max_concurrent_requests_per_tenant=1) as harness:
        harness.stub.Generate(request(), metadata=FLOOD)
        await until_status(harness, num_running=1)
        unreadable = request(prompt="x" * 10_000_000, prompt_ids=())
        error = await error_of(harness.stub.Generate(unreadable, metadata=FLOOD))
        assert error.reason == "TOO_MANY_REQUESTS_OF_TENANT"  # and not that it is too long


async def test_bytes_of_requests_are_budgeted_per_tenant_and_in_all() -> None:
    target = ScriptedTarget()
    target.limit = 1
    budgets = {"max_held_prompt_bytes": 40_000, "max_held_prompt_bytes_per_tenant": 25_000}
    async with running([target], **budgets) as harness:
        big = request(prompt_ids=[7] * 3000)
        num_bytes = big.ByteSize()
        num_fit = 25_000 // num_bytes
        calls = [harness.stub.Generate(big, metadata=FLOOD) for _ in range(num_fit)]
        await until_status(harness, num_running=num_fit)
        refused = await error_of(harness.stub.Generate(big, metadata=FLOOD))
        assert isinstance(refused, Overloaded)
        assert refused.reason == "PROMPT_BYTES_EXCEEDED"
        more = [harness.stub.Generate(big, metadata=POLITE) for _ in range(40_000 // num_bytes - num_fit)]
        await until_status(harness, num_running=num_fit + len(more))
        assert (await error_of(harness.stub.Generate(big, metadata=POLITE))).reason == "PROMPT_BYTES_EXCEEDED"
        assert harness.metric("admission_rejects_total", cause="prompt_bytes") == 2
        target.set_limit(None)
        await asyncio.gather(*map(collect, (*calls, *more)))
        await collect(harness.stub.Generate(big, metadata=FLOOD))  # all of it is free again
