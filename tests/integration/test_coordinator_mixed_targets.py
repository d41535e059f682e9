"""Targets that differ: what all of them can do is served, and nobody's output changes on the way without a word."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import FailedPrecondition, InvalidRequest, Unavailable
from tests.support.scripted.model import EOS, identity
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    Harness,
    collect,
    error_of,
    expected_ids,
    finish,
    read_tokens,
    request,
    resumed,
    running,
)

OTHER_NUMERICS = {"numerics_id": "n2"}


def a_target(**changes: Any) -> ScriptedTarget:
    return ScriptedTarget(identity(**changes))


async def states(harness: Harness) -> dict[str, str]:
    status = await harness.stub.GetStatus(api.GetStatusRequest())
    return {replica.state: replica.detail for replica in status.replicas}


async def test_two_contexts_give_one_output_that_of_the_shorter() -> None:
    targets = [a_target(max_model_len=60), a_target(max_model_len=20)]
    async with running(targets) as harness:
        await harness.all_ready()
        results = [await collect(harness.stub.Generate(request(max_tokens=50))) for _ in range(6)]
        info = await harness.stub.GetModelInfo(api.GetModelInfoRequest())
        error = await error_of(harness.stub.Generate(request([5] * 20)))
    assert [result.ids() for result in results] == [expected_ids(targets[0], 17)] * 6
    assert {result.ended[0].reason for result in results} == {pb.FINISH_REASON_LENGTH}
    assert info.max_model_len == info.target.max_model_len == 20
    assert isinstance(error, InvalidRequest)


async def test_a_target_too_short_for_a_running_request_never_gets_it() -> None:
    long, short = a_target(max_model_len=60), a_target(max_model_len=20)
    long.limit = 5
    await long.start()
    await short.start()
    port = short.port
    await short.stop()
    async with running([long, short], target_timeout_s=0.2) as harness:
        assert port == short.port
        body = request(max_tokens=50)
        call = harness.stub.Generate(body)
        result = await read_tokens(call, 5)
        await short.start()
        await harness.all_ready()
        await long.stop()
        error = await error_of(call)
        assert isinstance(error, Unavailable)
        assert error.reason == "TARGET_LOST"
        assert short.opened == []
        long.limit = None
        await long.start()
        await harness.all_ready()
        rest = await collect(harness.stub.Generate(resumed(result, body)))
        again = await collect(harness.stub.Generate(body))
    # What was begun with the longer context goes on with it; what begins now has the shorter one.
    assert result.ids() + rest.ids() == expected_ids(long, 50)
    assert again.ids() == expected_ids(long, 17)


async def test_the_longer_context_is_served_again_when_the_shorter_target_has_gone() -> None:
    targets = [a_target(max_model_len=60), a_target(max_model_len=20)]
    async with running(targets) as harness:
        await harness.all_ready()
        await targets[1].stop()
        while any(link.address == targets[1].address and link.is_up for link in harness.service.fleet.links):
            await harness.replica_changed()
        result = await collect(harness.stub.Generate(request(max_tokens=50)))
    assert result.ids() == expected_ids(targets[0], 50)


async def test_sampling_defaults_are_those_of_the_targets_that_are_there() -> None:
    """Targets are rolled out with other defaults; the coordinator runs on."""
    old, new = a_target(sampling_defaults={"max_new_tokens": 5}), a_target(sampling_defaults={"max_new_tokens": 8})
    await new.start()
    await new.stop()
    body = request()
    body.sampling.ClearField("max_tokens")
    async with running([old, new]) as harness:
        await new.start()
        await harness.all_ready()
        both = [await collect(harness.stub.Generate(body)) for _ in range(4)]
        await old.stop()
        while any(link.address == old.address and link.is_up for link in harness.service.fleet.links):
            await harness.replica_changed()
        after = await collect(harness.stub.Generate(body))
    assert [len(result.ids()) for result in both] == [5] * 4
    assert len(after.ids()) == 8


async def test_after_a_former_release_targets_of_two_configs_do_not_share_sessions() -> None:
    targets = [a_target(), a_target(config_digest="c1"), a_target(config_digest="c2")]
    for target in targets[1:]:
        await target.start()
        await target.stop()
    async with running(targets) as harness:
        for target in targets[1:]:
            await target.start()
        while "incompatible" not in (seen := await states(harness)):
            await harness.replica_changed()
    assert "has another config.json at each" in seen["incompatible"]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [({"eos_token_ids": [EOS, 2]}, "their end-of-sequence ids differ (1; 1, 2)"), (OTHER_NUMERICS, "(n1, n2)")],
)
async def test_a_target_whose_output_would_differ_is_incompatible_and_says_why(
    changes: dict[str, Any], cause: str
) -> None:
    first, second = a_target(), a_target(**changes)
    await second.start()
    await second.stop()
    async with running([first, second]) as harness:
        await second.start()
        while "incompatible" not in (seen := await states(harness)):
            await harness.replica_changed()
        assert "ready" in seen
        assert cause in seen["incompatible"]
        results = [await collect(harness.stub.Generate(request())) for _ in range(3)]
    assert [result.ids() for result in results] == [expected_ids(first, 20)] * 3
    assert second.opened == []


async def test_other_numerics_are_adopted_when_the_last_of_the_old_is_gone_and_finish_nothing_of_theirs() -> None:
    old, new = a_target(), a_target(**OTHER_NUMERICS)
    old.limit = 5
    await new.start()
    await new.stop()
    async with running([old, new], target_timeout_s=0.3) as harness:
        body = request(max_tokens=30)
        call = harness.stub.Generate(body)
        result = await read_tokens(call, 5)
        await old.stop()
        await new.start()
        error = await error_of(call)
        assert isinstance(error, Unavailable)
        assert error.reason == "TARGET_LOST"
        link = next(link for link in harness.service.fleet.targets if link.address == new.address)
        while not link.is_ready:
            await harness.replica_changed()
        later = await collect(harness.stub.Generate(request(max_tokens=5)))
        assert later.started is not None
        assert later.started.model.numerics_id == "n2"
        refused = await error_of(harness.stub.Generate(resumed(result, body)))
    assert isinstance(refused, FailedPrecondition)
    assert refused.reason == "NUMERICS_CHANGED"
    assert [num for _, _, num in new.opened] == [3]


async def test_where_numerics_may_differ_a_choice_that_two_computed_says_so_and_no_other() -> None:
    targets = [a_target(), a_target(**OTHER_NUMERICS)]
    for target in targets:
        target.limit = 5
    async with running(targets, allow_mixed_numerics=True) as harness:
        await harness.all_ready()
        body = request(max_tokens=30)
        call = harness.stub.Generate(body)
        result = await read_tokens(call, 5)
        holder, other = sorted(targets, key=lambda target: not target.opened)
        other.set_limit(None)
        await holder.stop()
        await finish(call, result)
        untouched = await collect(harness.stub.Generate(request(max_tokens=5)))
    first, second = holder.identity.numerics_id, other.identity.numerics_id
    assert list(result.ended[0].numerics_ids) == [first, second]
    assert result.finished is not None
    assert result.finished.numerics_changed
    assert untouched.finished is not None
    assert not untouched.finished.numerics_changed
    assert list(untouched.ended[0].numerics_ids) == []


async def test_where_numerics_may_differ_a_request_resumed_with_others_says_so() -> None:
    old, new = a_target(), a_target(**OTHER_NUMERICS)
    old.limit = 5
    body = request(max_tokens=30)
    async with running([old], allow_mixed_numerics=True) as harness:
        result = await read_tokens(harness.stub.Generate(body), 5)
    async with running([new], allow_mixed_numerics=True, owner_id="coordinator-2") as harness:
        rest = await collect(harness.stub.Generate(resumed(result, body)))
    assert list(rest.ended[0].numerics_ids) == ["n1", "n2"]


async def test_where_numerics_may_differ_new_requests_keep_to_one_kind() -> None:
    targets = [a_target(), a_target(**OTHER_NUMERICS), a_target()]
    async with running(targets, allow_mixed_numerics=True) as harness:
        await harness.all_ready()
        for number in range(12):
            await collect(harness.stub.Generate(request([number + 3, 4, 5], max_tokens=3)))
        served = harness.service.fleet.require_served().identity.numerics_id
    used = {target.identity.numerics_id for target in targets if target.opened}
    assert used == {served}
