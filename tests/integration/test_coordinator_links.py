"""The streams between a coordinator and its replicas: broken, attached again, reset, found twice, counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from specdec.coordinator.links.target_link import TargetLink
from specdec.coordinator.recovery import TargetRecovery
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import target_pb2
from specdec.wire.discovery import ReplicaAddress
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.model import identity
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    collect,
    expected_ids,
    finish,
    read_tokens,
    request,
    running,
)
from tests.support.services.faults import eventually


async def test_a_broken_target_stream_is_attached_again_and_nothing_is_computed_twice() -> None:
    target = ScriptedTarget()
    target.limit = 10
    async with running([target]) as harness:
        call = harness.stub.Generate(request(max_tokens=40))
        result = await read_tokens(call, 10)
        target.break_streams()
        await harness.replica_until("target", "down")
        target.set_limit(None)
        await finish(call, result)
        assert harness.metric("stream_reconnects_total", role="target") == 1
    assert result.ids() == expected_ids(target, 40)
    assert len(target.opened) == 1


async def test_verdicts_lost_in_a_break_are_sent_again_and_delivered_once() -> None:
    target = ScriptedTarget()
    async with running([target], credit_window_tokens=8) as harness:
        call = harness.stub.Generate(request(max_tokens=400))
        result = await read_tokens(call, 1)
        for num in range(20, 400, 40):
            while len(result.ids()) < num:
                result.add(await call.read())
            target.break_streams()
        await finish(call, result)
    assert result.ids() == expected_ids(target, 400)


async def test_a_stream_that_is_reset_is_opened_again_and_goes_on() -> None:
    target = ScriptedTarget()
    target.limit = 10
    async with running([target]) as harness:
        call = harness.stub.Generate(request(max_tokens=40))
        result = await read_tokens(call, 10)
        link = harness.service.fleet.targets[0]
        link.reset("a test")
        while link.num_streams < 2:
            await harness.replica_changed()
        target.set_limit(None)
        await finish(call, result)
    assert result.ids() == expected_ids(target, 40)


class ReluctantTarget(ScriptedTarget):
    """Answers an attach when it is told to."""

    may_answer = True

    def __init__(self) -> None:
        super().__init__()
        self.answer: Any = None

    def attach(self, attach: pb.Attach, stream: Any, response_type: Any) -> None:
        if self.may_answer:
            super().attach(attach, stream, response_type)
        else:
            self.answer = lambda: super(ReluctantTarget, self).attach(attach, stream, response_type)


async def test_a_session_that_left_while_its_target_was_attached_is_closed_there() -> None:
    targets = [ReluctantTarget(), ReluctantTarget()]
    for target in targets:
        target.limit = 10
        await target.start()
    first, second = targets
    async with running([first], target_timeout_s=600.0, connect_timeout_s=60.0) as harness:
        call = harness.stub.Generate(request(max_tokens=40))
        result = await read_tokens(call, 10)
        [session_id] = first.sessions
        first.may_answer = False
        first.break_streams()
        await first.until(lambda: first.answer is not None)
        harness.service.connections.rosters["target"].update(
            [ReplicaAddress(first.address), ReplicaAddress(second.address)]
        )
        await second.until(lambda: session_id in second.sessions)
        first.answer()
        await first.until(lambda: session_id not in first.sessions)
        second.set_limit(None)
        await finish(call, result)
    await second.stop()
    assert first.closed == [(session_id, "replaced")]
    assert result.ids() == expected_ids(first, 40)


async def test_a_replica_that_is_found_under_two_addresses_is_used_once() -> None:
    target = ScriptedTarget()
    target.instance_id = "one"
    target.limit = 10
    await target.start()
    async with running([target], targets=(target.address, f"localhost:{target.port}")) as harness:
        fleet = harness.service.fleet
        while sorted(str(link.state) for link in fleet.targets) != ["incompatible", "ready"]:
            await harness.replica_changed()
        used, unused = sorted(fleet.targets, key=lambda link: not link.is_up)
        call = harness.stub.Generate(request(max_tokens=40))
        result = await read_tokens(call, 10)
        num_streams = used.num_streams
        num_asked = target.num_asked
        await target.until(lambda: target.num_asked > num_asked)  # the one that is not used has tried again
        target.set_limit(None)
        await finish(call, result)
        assert used.address in unused.detail
        assert used.num_streams == num_streams
    assert result.ids() == expected_ids(target, 40)


async def test_replicas_are_counted_from_when_they_are_known_to_when_they_are_gone() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        await harness.replica_until("target", "ready")
        roster = harness.service.connections.rosters["target"]
        roster.update([ReplicaAddress(target.address), ReplicaAddress("127.0.0.1:1")])
        assert harness.metric("replicas", role="target", state="connecting") == 1
        link = harness.service.fleet.targets[1]
        while str(link.state) != "down":
            await harness.replica_changed()
        assert harness.metric("replicas", role="target", state="down") == 1
        roster.update([ReplicaAddress(target.address)])
        assert harness.metric("replicas", role="target", state="down") == 0


async def test_clients_are_told_of_the_drafters_that_all_targets_have_at_the_moment() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    async with running(targets) as harness:
        await harness.all_ready()

        async def are(*names: str) -> bool:
            return list((await harness.stub.GetModelInfo(api.GetModelInfoRequest())).drafters) == list(names)

        assert await are()
        for target in targets:
            request = target_pb2.SetDraftersRequest(drafters="suffix,ngram,unheard_of," + "x" * 10_000)
            await target.SetDrafters(request, None)
        await eventually(lambda: are("ngram", "suffix"), "both have told")
        assert not any(link.load is None or link.load.HasField("drafters") for link in harness.service.fleet.targets)
        await targets[1].SetDrafters(target_pb2.SetDraftersRequest(drafters="eagle3,ngram"), None)
        await eventually(lambda: are("ngram"), "one has told of others")
        targets[0].tell_load(draft_credit=3)

        async def has_come() -> bool:
            return any(link.load is not None and link.load.draft_credit == 3 for link in harness.service.fleet.targets)

        await eventually(has_come, "the load of a target that says nothing of drafters has come")
        assert await are("ngram")


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ((identity("small"), identity("small")), "small"),
        ((identity("small"), None), ""),
        ((identity("small", architecture="x" * 10_000), identity("small")), ""),
    ],
    ids=["both have one", "one has none", "one that cannot be"],
)
async def test_clients_are_told_of_the_draft_that_all_targets_run_themselves(
    own: tuple[pb.ModelIdentity, pb.ModelIdentity | None], told: str
) -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target, draft in zip(targets, own, strict=True):
        target.own_draft = draft
    async with running(targets) as harness:
        await harness.all_ready()
        info = await harness.stub.GetModelInfo(api.GetModelInfoRequest())
    assert info.draft.name == told
    assert list(info.drafters) == (["draft_model"] if told else [])


async def test_a_connected_draft_is_told_of_before_the_targets_own() -> None:
    target = ScriptedTarget()
    target.own_draft = identity("small")
    async with running([target], [ScriptedDraft(identity("draft"))]) as harness:
        await harness.all_ready()
        info = await harness.stub.GetModelInfo(api.GetModelInfoRequest())
    assert info.draft.name == "draft"


async def test_a_fault_in_what_the_end_of_a_stream_sets_off_does_not_cost_the_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = ScriptedTarget()
    faults = [KeyError("a fault")]
    on_down = TargetRecovery.on_down

    def faulty(recovery: TargetRecovery, link: TargetLink, is_fault: bool) -> None:
        on_down(recovery, link, is_fault)
        if faults:
            raise faults.pop()

    monkeypatch.setattr(TargetRecovery, "on_down", faulty)
    async with running([target]) as harness:
        target.break_streams()
        link = harness.service.fleet.targets[0]
        while link.num_streams < 2:
            await harness.replica_changed()
        assert (await collect(harness.stub.Generate(request()))).ids() == expected_ids(target, 20)
    assert not faults


async def test_a_frame_of_many_results_leaves_turns_to_new_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    target = ScriptedTarget()
    target.step_s = 0.02  # the results of a step come in one frame
    taken, turn = Counter[int](), 0
    on_result = TargetLink.on_result

    def counted(link: TargetLink, result: target_pb2.TargetResult) -> None:
        taken[turn] += 1
        on_result(link, result)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(TargetLink, "on_result", counted)
    async with running([target]) as harness:
        calls = [harness.stub.Generate(request(max_tokens=10, seed=seed)) for seed in range(40)]
        counting = asyncio.create_task(count_turns())
        results = await asyncio.gather(*map(collect, calls))
        counting.cancel()
    assert [result.ids() for result in results] == [expected_ids(target, 10, seed=seed) for seed in range(40)]
    assert max(taken.values()) <= 8
