"""New sessions go where there is room, whoever fills the others; a refusal is answered elsewhere, at once."""

from __future__ import annotations

import asyncio

import pytest
from google.rpc import code_pb2, status_pb2

from specdec.v1 import coordinator_pb2 as api
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import Harness, collect, expected_ids, request, running

FULL = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="full")


async def until_told(harness: Harness, num: int) -> None:
    """Wait until so many targets have told how many sessions they have."""
    async with asyncio.timeout(10):
        while True:
            status = await harness.stub.GetStatus(api.GetStatusRequest())
            if sum(replica.load.HasField("num_sessions") for replica in status.replicas) == num:
                return


@pytest.mark.parametrize("load", [{"num_sessions": 8, "max_sessions": 8}, {"num_sessions": 1, "max_sessions": 8}])
async def test_what_other_coordinators_opened_counts(load: dict[str, int]) -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    async with running(targets) as harness:
        await harness.all_ready()
        preferred = min(targets, key=lambda target: target.address)  # of two that are alike
        preferred.tell_load(**load)
        await until_told(harness, 1)
        for number in range(3):
            result = await collect(harness.stub.Generate(request([number + 3, 4])))
            assert result.ids() == expected_ids(preferred, 20, [number + 3, 4])
    assert preferred.opened == []


async def test_a_prompt_known_to_a_full_target_goes_to_one_with_room() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    prompt = list(range(3, 103))
    async with running(targets) as harness:
        await harness.all_ready()
        await collect(harness.stub.Generate(request(prompt)))
        known, other = sorted(targets, key=lambda target: not target.opened)
        known.tell_load(num_sessions=4, max_sessions=4)
        await until_told(harness, 1)
        await collect(harness.stub.Generate(request(prompt)))
    assert (len(known.opened), len(other.opened)) == (1, 1)


async def test_a_session_that_is_refused_for_want_of_room_is_opened_elsewhere_at_once() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.refuse = FULL
    async with running(targets, reconnect_first_s=30.0, reconnect_backoff_max_s=30.0) as harness:
        await harness.all_ready()
        full = min(targets, key=lambda target: target.address)
        other = max(targets, key=lambda target: target.address)
        other.refuse = None
        async with asyncio.timeout(25):
            result = await collect(harness.stub.Generate(request()))
        assert result.ids() == expected_ids(full, 20)
        assert all(link.is_ready for link in harness.service.fleet.links), "to be full is no failure"
        await collect(harness.stub.Generate(request()))
    assert (len(full.opened), len(other.opened)) == (1, 2)


async def test_where_all_are_full_a_retry_goes_to_whoever_has_room_first() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.refuse = FULL
    async with running(targets) as harness:
        await harness.all_ready()
        call = harness.stub.Generate(request())
        for target in targets:
            await target.until(lambda at=target: bool(at.opened))
        last = targets[0] if targets[0].opened[-1][1] > targets[1].opened[-1][1] else targets[1]
        free = next(target for target in targets if target is not last)
        free.refuse = None
        free.tell_load(num_sessions=0, max_sessions=4)
        result = await collect(call)
    assert result.ids() == expected_ids(free, 20)
