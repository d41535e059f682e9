"""A request that ends whatever steps it, at targets that tell for whom they were at work and step suspects alone."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from specdec.v1 import common_pb2 as pb
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.replica import ScriptedSession
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    collect,
    error_of,
    expected_ids,
    finish,
    read_tokens,
    request,
    running,
)

POISON = 99
NUM_TOKENS = 120


def is_poison(session: ScriptedSession) -> bool:
    return session.body.token_ids[0] == POISON


def make_targets(count: int) -> list[ScriptedTarget]:
    targets = [ScriptedTarget() for _ in range(count)]
    for number, target in enumerate(targets):
        target.instance_id, target.last_end = f"first-{number}", pb.EngineEnd()
        target.dies_of = is_poison
    return targets


@pytest.mark.parametrize("num_targets", [1, 2, 3])
@pytest.mark.parametrize("num_innocent", [1, 15])
async def test_a_guilty_request_ends_two_engines_at_most_and_no_other_stream(
    num_targets: int, num_innocent: int
) -> None:
    targets = make_targets(num_targets)
    for target in targets:
        target.limit = 10
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
    assert error.reason == "REQUEST_QUARANTINED"
    assert sum(target.num_deaths for target in targets) == 2
    for number, result in enumerate(results):
        assert result.ids() == expected_ids(targets[0], NUM_TOKENS, [number + 3, 4, 5])


async def test_who_was_in_no_step_that_ended_an_engine_is_never_stepped_apart() -> None:
    targets = make_targets(2)
    for target in targets:
        target.limit = 5
    async with running(targets) as harness:
        await harness.all_ready()
        calls = [harness.stub.Generate(request([n + 3, 4, 5], max_tokens=60)) for n in range(4)]
        results = [await read_tokens(call, 5) for call in calls]
        [first, second] = targets
        for target in targets:
            target.set_limit(None)
        first.die([])
        for call, result in zip(calls, results, strict=True):
            await finish(call, result)
    opened = [frame for target in targets for frame in target.frames]
    assert all(not entry.open.apart_until for frame in opened for entry in frame.entries)
    for number, result in enumerate(results):
        assert result.ids() == expected_ids(second, 60, [number + 3, 4, 5])


async def test_a_replica_is_asked_how_its_engine_ended_where_grpc_has_lost_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    targets = make_targets(2)
    monkeypatch.setattr("specdec.coordinator.links.stream_end.engine_end_in", lambda trailing: None)
    monkeypatch.setattr("specdec.coordinator.links.stream_end.from_rpc_error", lambda error: _lost())
    with capture_logs() as logs:
        async with running(targets) as harness:
            await harness.all_ready()
            calls = [harness.stub.Generate(request([n + 3, 4, 5], max_tokens=400)) for n in range(3)]
            guilty = harness.stub.Generate(request([POISON, 4, 5], max_tokens=NUM_TOKENS))
            assert (await error_of(guilty)).reason == "REQUEST_QUARANTINED"
            for number, call in enumerate(calls):
                assert (await collect(call)).ids() == expected_ids(targets[0], 400, [number + 3, 4, 5])
    assert sum(target.num_deaths for target in targets) == 2
    assert len([line for line in logs if line["event"] == "request_quarantined"]) == 1


def _lost() -> Exception:
    from specdec.coordinator.links.stream_end import NOT_HANDED_ON
    from specdec.wire.errors import Unavailable

    return Unavailable("the stream broke while it was written to", reason=NOT_HANDED_ON)


async def test_a_session_under_which_two_drafts_died_goes_on_without_one_and_others_keep_theirs() -> None:
    target = ScriptedTarget()
    drafts = [ScriptedDraft(), ScriptedDraft()]
    for number, draft in enumerate(drafts):
        draft.instance_id, draft.last_end = f"first-{number}", pb.EngineEnd()
        draft.dies_of = is_poison
    async with running([target], drafts) as harness:
        await harness.all_ready()
        calls = [harness.stub.Generate(request([n + 3, 4, 5], max_tokens=400)) for n in range(4)]
        guilty = harness.stub.Generate(request([POISON, 4, 5], max_tokens=300))
        assert (await collect(guilty)).ids() == expected_ids(target, 300, [POISON, 4, 5])
        results = [await collect(call) for call in calls]
    assert sum(draft.num_deaths for draft in drafts) == 2
    for number, result in enumerate(results):
        assert result.ids() == expected_ids(target, 400, [number + 3, 4, 5])
    # One whose draft was slow for a moment may have had both at its end.
    kept = {session_id for draft in drafts for session_id, reason in draft.closed if reason == "finished"}
    assert len(kept) == len(calls)
