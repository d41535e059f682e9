"""A request that ends whatever steps it: two replicas at most, and no stream but its own."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from specdec.coordinator.links.link_events import LinkState
from specdec.coordinator.sessions.session import Session
from specdec.wire.discovery import ReplicaAddress
from specdec.wire.errors import Internal
from tests.support.scripted.replica import ScriptedSession
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    Harness,
    collect,
    error_of,
    expected_ids,
    finish,
    read_tokens,
    request,
    running,
)
from tests.support.services.faults import eventually

POISON = 99
NUM_TOKENS = 120


def num_hidden(logs: list[EventDict]) -> int:
    """Deaths whose cause gRPC did not hand on, because a write was under way: they count for nobody."""
    return sum("broke while it was written to" in str(line.get("detail")) for line in logs)


def is_poison(session: ScriptedSession) -> bool:
    return session.body.token_ids[0] == POISON


@pytest.mark.parametrize("num_targets", [1, 2, 3])
@pytest.mark.parametrize("num_innocent", [1, 6])
async def test_one_request_ends_two_engines_at_most_and_no_other_stream(num_targets: int, num_innocent: int) -> None:
    targets = [ScriptedTarget() for _ in range(num_targets)]
    for target in targets:
        target.dies_of = is_poison
        target.limit = 10
    with capture_logs() as logs:
        async with running(targets, max_running=num_innocent + 1) as harness:
            await harness.all_ready()
            bodies = [request([number + 3, 4, 5], max_tokens=NUM_TOKENS) for number in range(num_innocent)]
            calls = [harness.stub.Generate(body) for body in bodies]
            results = [await read_tokens(call, 10) for call in calls]
            guilty = harness.stub.Generate(request([POISON, 4, 5], max_tokens=NUM_TOKENS))
            for target in targets:
                target.set_limit(None)
            error = await error_of(guilty)
            for call, result in zip(calls, results, strict=True):
                await finish(call, result)
    assert isinstance(error, Internal)
    assert error.reason == "REQUEST_QUARANTINED"
    assert sum(target.num_deaths for target in targets) == 2 + num_hidden(logs)
    for number, result in enumerate(results):
        assert result.ids() == expected_ids(targets[0], NUM_TOKENS, [number + 3, 4, 5])


async def test_several_choices_of_one_request_are_tried_together() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.dies_of = is_poison
    with capture_logs() as logs:
        async with running(targets) as harness:
            await harness.all_ready()
            calls = [harness.stub.Generate(request([7, 4, 5], n=3, max_tokens=400)) for _ in range(2)]
            guilty = harness.stub.Generate(request([POISON, 4, 5], n=3, max_tokens=400))
            assert (await error_of(guilty)).reason == "REQUEST_QUARANTINED"
            results = [await collect(call) for call in calls]
    assert sum(target.num_deaths for target in targets) == 2 + num_hidden(logs)
    for result in results:
        assert [result.ids(i) for i in range(3)] == [
            expected_ids(targets[0], 400, [7, 4, 5], choice=i) for i in range(3)
        ]


async def test_a_request_that_gets_on_between_deaths_is_none_to_be_blamed() -> None:
    target = ScriptedTarget()
    target.limit = 0
    async with running([target]) as harness:
        call = harness.stub.Generate(request(max_tokens=200))
        num = 0
        result = None
        for _ in range(5):
            num += 20
            target.set_limit(num)
            if result is None:
                result = await read_tokens(call, num)
            while len(result.ids()) < num:
                result.add(await call.read())
            target.die()
            await target.until(lambda: bool(target.sessions))
        target.set_limit(None)
        assert result is not None
        await finish(call, result)
    assert result.ids() == expected_ids(target, 200)


async def test_a_session_that_faults_twice_is_quarantined_and_replicas_are_not_blamed() -> None:
    targets = [ScriptedTarget() for _ in range(3)]
    for target in targets:
        target.faults_on = is_poison
    async with running(targets, ejection_failures=1) as harness:
        await harness.all_ready()
        error = await error_of(harness.stub.Generate(request([POISON, 4, 5])))
        assert error.reason == "REQUEST_QUARANTINED"
        assert sorted(len(target.opened) for target in targets) == [0, 1, 1]
        assert all(link.is_ready for link in harness.service.fleet.links)
        assert (await collect(harness.stub.Generate(request()))).ids() == expected_ids(targets[0], 20)


async def test_a_replica_that_faults_on_what_another_can_do_is_the_one_to_blame() -> None:
    bad, good = ScriptedTarget(), ScriptedTarget()
    bad.faults_on = lambda session: True
    async with running([bad, good], ejection_failures=1) as harness:
        await harness.all_ready()
        calls = [harness.stub.Generate(request([number + 3, 4, 5], max_tokens=40)) for number in range(4)]
        for number, call in enumerate(calls):
            assert (await collect(call)).ids() == expected_ids(good, 40, [number + 3, 4, 5])
        assert bad.opened
        states = {link.address: str(link.state) for link in harness.service.fleet.links}
    assert states == {bad.address: "ejected", good.address: "ready"}


async def test_a_connection_that_is_cut_twice_makes_no_request_guilty() -> None:
    target = ScriptedTarget()
    target.limit = 5
    with capture_logs() as logs:
        async with running([target]) as harness:
            call = harness.stub.Generate(request(max_tokens=40))
            result = await read_tokens(call, 5)
            for _ in range(4):
                num_asked = target.num_asked
                target.break_streams()
                await target.until(lambda seen=num_asked: target.num_asked > seen and bool(target.streams))
            target.set_limit(None)
            await finish(call, result)
    assert result.ids() == expected_ids(target, 40)
    assert not [line for line in logs if line["event"] == "request_quarantined"]


async def test_of_a_target_that_is_gone_for_good_no_request_is_remembered() -> None:
    gone, other = ScriptedTarget(), ScriptedTarget()
    gone.instance_id, other.instance_id = "gone", "other"
    gone.limit = other.limit = 5
    async with running([gone, other]) as harness:
        await harness.all_ready()
        call = harness.stub.Generate(request(max_tokens=20))
        result = await read_tokens(call, 5)
        if not gone.sessions:
            gone, other = other, gone
        (stream,) = (weakref.ref(session.request.stream) for session in session_table(harness))
        await gone.stop()
        other.set_limit(None)
        await finish(call, result)
        roster = harness.service.connections.rosters["target"]
        roster.update([ReplicaAddress(other.address)])
        assert [link.address for link in harness.service.fleet.targets] == [other.address]

        async def is_forgotten() -> bool:
            gc.collect()
            return stream() is None

        await eventually(is_forgotten, "the request is forgotten")
    assert result.ids() == expected_ids(other, 20)


def session_table(harness: Harness) -> list[Session]:
    return [session for link in harness.service.fleet.targets for session in link.sessions.values()]


async def test_targets_that_are_killed_at_the_same_moment_make_no_request_guilty() -> None:
    targets = [ScriptedTarget(), ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.limit = 10
    async with running(targets) as harness:
        await harness.all_ready()
        calls = [harness.stub.Generate(request([n + 3, 4, 5], max_tokens=90)) for n in range(9)]
        results = [await read_tokens(call, 10) for call in calls]
        for target in targets:
            target.set_limit(None)
            target.die()
        for call, result in zip(calls, results, strict=True):
            await finish(call, result)
    for number, result in enumerate(results):
        assert result.ids() == expected_ids(targets[0], 90, [number + 3, 4, 5])


async def test_suspects_whose_turn_never_comes_for_lack_of_credit_do_not_hold_up_others() -> None:
    """A client that reads nothing has a session that cannot get on: others go on beside it."""
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.limit = 30
    async with running(targets, credit_window_tokens=8) as harness:
        await harness.all_ready()
        calls = [harness.stub.Generate(request([n + 3, 4, 5], max_tokens=90)) for n in range(4)]
        results = [await read_tokens(call, 8) for call in calls]
        for target in targets:
            target.set_limit(None)
            target.die()
        async with asyncio.timeout(20):
            for call, result in zip(reversed(calls), reversed(results), strict=True):
                await finish(call, result)
    for number, result in enumerate(results):
        assert result.ids() == expected_ids(targets[0], 90, [number + 3, 4, 5])


async def test_choices_of_one_request_that_fail_at_one_target_accuse_it_once() -> None:
    bad, good = ScriptedTarget(), ScriptedTarget()
    bad.faults_on = lambda session: True
    async with running([bad, good]) as harness:
        await harness.all_ready()
        link = next(link for link in harness.service.fleet.targets if link.address == good.address)
        link.set_standing(LinkState.EJECTED)  # so that it begins at the bad one
        call = harness.stub.Generate(request(max_tokens=10, n=2))
        await call.read()
        link.set_standing(LinkState.READY)
        result = await collect(call)
    assert [result.ids(0), result.ids(1)] == [expected_ids(good, 10, choice=n) for n in range(2)]
