"""A replica that is there and does nothing for a session loses it, and only then; the tokens are the same."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from structlog.testing import capture_logs

from specdec.coordinator.links.link_events import LinkState
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import Unavailable
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    Harness,
    error_of,
    expected_ids,
    finish,
    read_tokens,
    request,
    running,
)
from tests.support.services.faults import PATIENCE_S, eventually

QUEUED, RUNNING = pb.SessionProgress.STATE_QUEUED, pb.SessionProgress.STATE_RUNNING
STALL_S = 1.5
"""Seconds without progress: far above those for which a busy machine stops this process."""
IDLE = {"max_sessions": 8, "kv_blocks_total": 100}


async def told(target: ScriptedTarget, for_s: float, state: pb.SessionProgress.State.ValueType, step: int) -> None:
    """A target that tells of its sessions ten times as often as anything is looked at."""
    ends_s, computed = time.monotonic() + for_s, 0
    while time.monotonic() < ends_s:
        computed += step
        target.tell_progress(state, computed)
        await asyncio.sleep(0.01)


def split(targets: list[ScriptedTarget]) -> tuple[ScriptedTarget, ScriptedTarget]:
    """The one that has the session, and the other."""
    holder, other = sorted(targets, key=lambda target: not target.opened)
    return holder, other


async def opened_at(targets: list[ScriptedTarget]) -> tuple[ScriptedTarget, ScriptedTarget]:
    """As `split`, once one of them has a session."""
    waits = [asyncio.create_task(target.until(lambda at=target: bool(at.sessions))) for target in targets]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return split(targets)


async def until_loads(harness: Harness, condition: Callable[[pb.LoadReport], bool], num: int) -> None:
    """Wait until so many replicas have reported such a load."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = await harness.stub.GetStatus(api.GetStatusRequest())
            if sum(condition(replica.load) for replica in status.replicas) == num:
                return


async def test_a_session_whose_target_stands_still_goes_on_at_another_which_is_then_preferred() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.limit = 10
    async with running(targets, session_stall_s=0.4, ejection_failures=1) as harness:
        await harness.all_ready()
        call = harness.stub.Generate(request(max_tokens=40))
        result = await read_tokens(call, 10)
        holder, other = split(targets)
        other.limit = None
        await finish(call, result)
        states = {link.address: str(link.state) for link in harness.service.fleet.links}
    assert result.ids() == expected_ids(holder, 40)
    assert states[holder.address] == "ejected"


async def test_a_target_that_tells_of_progress_keeps_its_session_and_one_that_repeats_itself_does_not() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.limit = 0
    async with running(targets, session_stall_s=STALL_S) as harness:
        await harness.all_ready()
        call = harness.stub.Generate(request(max_tokens=40))
        holder, other = await opened_at(targets)
        other.limit = None
        await told(holder, 2 * STALL_S, RUNNING, 32)
        assert other.opened == []
        started_s = time.monotonic()
        saying = asyncio.create_task(told(holder, 60.0, RUNNING, 0))
        result = await read_tokens(call, 40)
        took_s = time.monotonic() - started_s
        saying.cancel()
    assert result.ids() == expected_ids(holder, 40)
    assert took_s < 3 * STALL_S, "its target tells of progress: no threefold patience"


async def test_without_another_target_a_session_waits_and_goes_on_there() -> None:
    target = ScriptedTarget()
    target.limit = 10
    async with running([target], session_stall_s=0.05) as harness:
        call = harness.stub.Generate(request(max_tokens=40))
        result = await read_tokens(call, 10)
        await asyncio.sleep(0.6)
        target.set_limit(None)
        await finish(call, result)
    assert result.ids() == expected_ids(target, 40)
    assert len(target.opened) == 1


async def test_without_another_target_a_standstill_ends_unavailable_in_the_end() -> None:
    target = ScriptedTarget()
    target.limit = 10
    async with running([target], session_stall_s=0.1, target_timeout_s=0.2) as harness:
        call = harness.stub.Generate(request(max_tokens=40))
        await read_tokens(call, 10)
        saying = asyncio.create_task(told(target, 20.0, RUNNING, 0))
        error = await error_of(call)
        saying.cancel()
    assert isinstance(error, Unavailable)
    assert error.reason == "TARGET_STALLED"


async def test_a_session_that_is_queued_stays_while_nobody_is_idle_and_goes_to_whoever_is() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.limit = 0
    async with running(targets, session_stall_s=STALL_S) as harness:
        await harness.all_ready()
        for target in targets:
            target.tell_load(num_waiting=3, **IDLE)
        await until_loads(harness, lambda load: load.num_waiting == 3, 2)
        call = harness.stub.Generate(request(max_tokens=40))
        holder, other = await opened_at(targets)
        other.limit = None
        await told(holder, 1.5 * STALL_S, QUEUED, 0)
        assert other.opened == []
        other.tell_load(num_waiting=0, **IDLE)
        saying = asyncio.create_task(told(holder, 60.0, QUEUED, 0))
        result = await read_tokens(call, 40)
        saying.cancel()
        assert all(link.is_ready for link in harness.service.fleet.links), "a queue is no failure"
    assert result.ids() == expected_ids(holder, 40)


async def test_a_coordinator_that_stood_still_itself_moves_nothing_and_blames_nobody() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.limit = 5
    async with running(targets, session_stall_s=2.0, ejection_failures=1) as harness:
        await harness.all_ready()
        call = harness.stub.Generate(request(max_tokens=20))
        result = await read_tokens(call, 5)
        holder, other = split(targets)
        holder.tell_progress(RUNNING, 1)
        (session,) = (s for link in harness.service.fleet.targets for s in link.sessions.values())

        async def is_heard() -> bool:
            return session.target.progress is not None

        await eventually(is_heard, "the target has told of progress")
        # Like a process that is stopped: nothing is heard and nothing is said.
        asyncio.get_running_loop().call_soon(time.sleep, 4.0)
        await asyncio.sleep(0)
        holder.set_limit(None)
        await finish(call, result)
        assert all(link.is_ready for link in harness.service.fleet.links)
    assert result.ids() == expected_ids(holder, 20)
    assert other.opened == []


async def test_where_all_targets_stand_still_a_session_moves_ever_more_rarely() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.limit = 10
    async with running(targets, session_stall_s=0.05) as harness:
        await harness.all_ready()
        call = harness.stub.Generate(request(max_tokens=40))
        result = await read_tokens(call, 10)
        await asyncio.sleep(2.0)
        num_opened = sum(len(target.opened) for target in targets)
        for target in targets:
            target.set_limit(None)
        await finish(call, result)
    # After 0.15, 0.3, 0.6 and 1.2 s.
    assert 2 <= num_opened <= 5
    assert result.ids() == expected_ids(targets[0], 40)


async def test_a_draft_that_proposes_nothing_loses_its_sessions_to_another() -> None:
    target, silent, good = ScriptedTarget(), ScriptedDraft(), ScriptedDraft()
    silent.make_proposal = lambda session: None
    target.limit = 1
    async with running([target], [silent, good], draft_stall_s=1.0) as harness:
        await harness.all_ready()
        calls = [harness.stub.Generate(request([n + 3, 4], max_tokens=1000)) for n in range(2)]
        results = [await read_tokens(call, 1) for call in calls]
        assert len(silent.opened) == len(good.opened) == 1
        limit = 1
        async with asyncio.timeout(PATIENCE_S):
            while len(good.opened) < 2:  # commits, one by one
                limit += 1
                target.set_limit(limit)
                for call, result in zip(calls, results, strict=True):
                    while len(result.ids()) < limit:
                        result.add(await call.read())
                await asyncio.sleep(0.01)
        assert harness.metric("draft_fallbacks_total", cause="stalled") == 1
        target.set_limit(None)
        for call, result in zip(calls, results, strict=True):
            await finish(call, result)
    assert [result.ids() for result in results] == [expected_ids(target, 1000, [n + 3, 4]) for n in range(2)]


async def test_a_draft_that_is_told_not_to_propose_is_no_standstill() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    draft.make_proposal = lambda session: None
    target.limit = 1
    with capture_logs() as logs:
        async with running([target], [draft, ScriptedDraft()], draft_stall_s=0.02) as harness:
            await harness.all_ready()
            target.tell_load(draft_credit=0, num_running=1)
            await until_loads(harness, lambda load: load.num_running == 1, 1)
            call = harness.stub.Generate(request(max_tokens=40))
            result = await read_tokens(call, 1)
            for limit in range(2, 30):
                target.set_limit(limit)
                while len(result.ids()) < limit:
                    result.add(await call.read())
                await asyncio.sleep(0.005)
            target.set_limit(None)
            await finish(call, result)
    assert result.ids() == expected_ids(target, 40)
    assert not [line for line in logs if line["event"] == "draft_stalled"]


async def test_a_session_moves_to_a_ready_target_though_another_is_on_probation() -> None:
    targets = [ScriptedTarget() for _ in range(3)]
    for target in targets:
        target.limit = 5
    async with running(targets, session_stall_s=0.1, target_timeout_s=0.3) as harness:
        await harness.all_ready()
        call = harness.stub.Generate(request(max_tokens=20))
        result = await read_tokens(call, 5)
        holder, *others = sorted(targets, key=lambda target: not target.opened)
        for target in others:
            target.limit = None
        on_trial = next(link for link in harness.service.fleet.targets if link.address == others[1].address)
        on_trial.set_standing(LinkState.PROBATION)
        telling = asyncio.create_task(told(holder, 60.0, RUNNING, 0))
        try:
            await finish(call, result)
        finally:
            telling.cancel()
    assert result.ids() == expected_ids(holder, 20)
