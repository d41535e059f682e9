"""Several targets and drafts: sessions spread, follow their target, and leave what drains, ends or keeps failing."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from specdec.coordinator.links.link_events import LinkState
from specdec.coordinator.links.target_link import TargetLink
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2, target_pb2
from specdec.wire.errors import Cancelled, from_rpc_error
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.replica import PATIENCE_S
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import collect, expected_ids, finish, read_tokens, request, running
from tests.support.services.faults import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_TOKENS = 300


async def test_requests_spread_over_targets_and_drafts() -> None:
    targets, drafts = [ScriptedTarget(), ScriptedTarget()], [ScriptedDraft(), ScriptedDraft()]
    for target in targets:
        target.limit = 5
    async with running(targets, drafts) as harness:
        await harness.all_ready()
        calls = [harness.stub.Generate(request((seed, 6, 7), max_tokens=20)) for seed in range(8)]
        for replica in (*targets, *drafts):
            await replica.until(lambda replica=replica: len(replica.opened) == 4)  # type: ignore[misc]
        for call in calls:
            call.cancel()


async def test_a_draft_hears_of_each_target_by_name_and_a_session_names_its_own() -> None:
    targets, draft = [ScriptedTarget(), ScriptedTarget()], ScriptedDraft()
    for target in targets:
        target.limit = 5
    async with running(targets, [draft]) as harness:
        await harness.all_ready()
        for credit, (target, link) in enumerate(zip(targets, harness.service.fleet.targets, strict=True), start=1):
            target.streams[-1].send(load_response(credit))

            async def is_known(link: TargetLink = link, credit: int = credit) -> bool:
                return link.load is not None and link.load.draft_credit == credit

            await eventually(is_known, "the load has come")
        calls = [harness.stub.Generate(request((seed, 6, 7), max_tokens=20)) for seed in range(2)]
        await draft.until(lambda: len(draft.opened) == 2)
        for target in targets:
            await target.until(lambda target=target: len(target.opened) == 1)  # type: ignore[misc]
        told = {t.target: t.load.draft_credit for frame in draft.frames for t in target_loads(frame)}
        named = {session.session_id: session.body.target for session in draft.sessions.values()}
        held = {session_id: target.address for target in targets for session_id in target.sessions}
        for call in calls:
            call.cancel()
    assert told == {targets[0].address: 1, targets[1].address: 2}
    assert named == held
    assert len(set(named.values())) == 2


async def test_a_draft_hears_only_of_the_targets_for_whose_sessions_it_drafts() -> None:
    targets, drafts = [ScriptedTarget(), ScriptedTarget()], [ScriptedDraft(), ScriptedDraft()]
    for target in targets:
        target.limit = 3
    async with running(targets, drafts) as harness:
        await harness.all_ready()
        calls = [harness.stub.Generate(request((seed, 6, 7), max_tokens=20)) for seed in range(2)]
        for replica in (*targets, *drafts):
            await replica.until(lambda replica=replica: len(replica.opened) == 1)  # type: ignore[misc]
        for credit, target in enumerate(targets, start=1):
            target.streams[-1].send(load_response(credit))
            target.set_limit(6)
        for credit, target in enumerate(targets, start=1):
            own = next(draft for draft in drafts if of_sessions(draft) == {target.address})
            await own.until(lambda own=own, credit=credit: credit in told_credits(own))  # type: ignore[misc]
        heard = [{told.target for frame in draft.frames for told in target_loads(frame)} for draft in drafts]
        assert heard == [of_sessions(draft) for draft in drafts]
        for call in calls:
            call.cancel()


async def test_a_target_whose_stream_ends_is_left_at_once() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.limit = 10
    async with running(targets, target_timeout_s=600.0) as harness:
        await harness.all_ready()
        call = asyncio.create_task(collect(harness.stub.Generate(request(max_tokens=40))))

        async def is_open() -> bool:
            return any(target.opened for target in targets)

        await eventually(is_open, "a target holds the session")
        holder = next(t for t in targets if t.opened)
        other = next(t for t in targets if t is not holder)
        other.limit = None
        await holder.stop()
        result = await asyncio.wait_for(call, PATIENCE_S)
    assert result.ids() == expected_ids(holder, 40)


async def test_a_draining_target_gets_no_new_sessions_and_keeps_those_it_has() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    async with running(targets) as harness:
        await harness.all_ready()
        targets[0].streams[-1].send(load_response(1, draining=True))
        link = harness.service.fleet.targets[0]
        while str(link.state) != "draining":
            await harness.replica_changed()
        for seed in range(4):
            await collect(harness.stub.Generate(request((seed, 6, 7))))
        assert harness.metric("replicas", role="target", state="draining") == 1
        assert harness.metric("replicas", role="target", state="ready") == 1
    assert targets[0].opened == []
    assert len(targets[1].opened) == 4


async def test_a_target_that_keeps_failing_is_ejected_and_trusted_again_after_a_probation() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        await target.start()
    bad, good = sorted(targets, key=lambda target: target.address)  # of two idle targets the first address is picked
    bad.refuse = status_pb2.Status(code=code_pb2.UNAVAILABLE, message="out of order")
    async with running(targets, ejection_failures=2, ejection_s=0.2, ejection_max_s=0.2) as harness:
        fleet = harness.service.fleet
        await harness.all_ready()
        link = next(link for link in fleet.targets if link.address == bad.address)
        states = {str(link.state)}
        for seed in range(200):
            result = await collect(harness.stub.Generate(request((seed, 6, 7))))
            assert result.ids() == expected_ids(good, 20, (seed, 6, 7))
            states.add(str(link.state))
            if str(link.state) == "ejected":
                bad.refuse = None
                await harness.replica_changed()
                states.add(str(link.state))
            if states >= {"ejected", "probation"} and link.is_ready:
                break
    assert states == {"ready", "ejected", "probation"}


async def test_a_target_on_probation_gets_one_session_at_a_time() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.limit = 5
    async with running(targets) as harness:
        fleet = harness.service.fleet
        while not all(link.is_ready for link in fleet.links):
            await harness.replica_changed()
        fleet.targets[0].set_standing(LinkState.PROBATION)
        calls = [harness.stub.Generate(request((seed, 6, 7))) for seed in range(4)]
        results = [await read_tokens(call, 5) for call in calls]
        assert [len(target.opened) for target in targets] == [1, 3]
        for target in targets:
            target.set_limit(None)
        for seed, (call, result) in enumerate(zip(calls, results, strict=True)):
            assert (await finish(call, result)).ids() == expected_ids(targets[0], 20, (seed, 6, 7))


@pytest.mark.parametrize("reason", ["STALE_LEASE", "SESSION_TAKEN_OVER"])
async def test_a_session_that_another_coordinator_holds_ends_at_once_and_its_target_is_not_ejected(reason: str) -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    status = status_pb2.Status(code=code_pb2.FAILED_PRECONDITION, message="held elsewhere")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain="specdec"))
    async with running(targets, ejection_failures=1, target_timeout_s=600.0) as harness:
        await harness.all_ready()
        for target in targets:
            target.refuse = status
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(harness.stub.Generate(request()))
        error = from_rpc_error(caught.value)
        assert isinstance(error, Cancelled)
        assert error.reason == "TAKEN_OVER"
        assert [str(link.state) for link in harness.service.fleet.targets] == ["ready", "ready"]


def load_response(credit: int, draining: bool = False) -> target_pb2.VerifyResponse:
    return target_pb2.VerifyResponse(load=pb.LoadReport(draft_credit=credit, draining=draining))


def of_sessions(draft: ScriptedDraft) -> set[str]:
    """The targets of a draft's sessions."""
    return {session.body.target for session in draft.sessions.values()}


def told_credits(draft: ScriptedDraft) -> set[int]:
    return {told.load.draft_credit for frame in draft.frames for told in target_loads(frame)}


def target_loads(frame: draft_pb2.DraftRequest) -> list[draft_pb2.TargetLoad]:
    return list(frame.target_loads)
