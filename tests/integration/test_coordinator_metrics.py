"""A coordinator's metrics tell what its clients saw: the same tokens, the same steps, and times within theirs."""

from __future__ import annotations

import time

from specdec.v1 import common_pb2 as pb
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.model import make_tokenizer
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    Harness,
    collect,
    expected_ids,
    finish,
    read_tokens,
    request,
    running,
)
from tests.support.services.faults import eventually


async def until_ended(harness: Harness, num: int = 1) -> None:
    async def have_ended() -> bool:
        return harness.metric("request_seconds_count") == num and harness.metric("sessions", role="target") == 0

    await eventually(have_ended, f"{num} requests have ended")


async def test_tokens_steps_and_depths_are_those_of_the_clients_statistics() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft(num_ahead=4)
    target.needs_proposals = True
    async with running([target], [draft]) as harness:
        result = await collect(harness.stub.Generate(request(max_tokens=101)))
        await until_ended(harness)
        stats = result.ended[0].stats
        assert harness.metric("requests_total", outcome="OK") == 1
        assert harness.metric("tokens_total", origin="draft") == result.origins().count(pb.ORIGIN_DRAFT) > 0
        assert harness.metric("steps_total", kind="verify") == stats.num_verify_steps > 0
        assert harness.metric("steps_total", kind="prefill") == 1
        # A burst of n tokens counts as n intervals.
        assert harness.metric("inter_token_seconds_count") == 100 > stats.num_steps
        assert harness.metric("steps_total", kind="plain") == stats.num_steps - stats.num_verify_steps
        assert harness.metric("hits_total") == stats.num_hits > 0
        for metric, by_depth in (("proposed", stats.verified_by_depth), ("accepted", stats.accepted_by_depth)):
            assert [
                harness.metric(f"{metric}_tokens_total", depth=str(depth)) for depth in range(1, len(by_depth) + 1)
            ] == list(by_depth)


async def test_drafted_tokens_past_a_stop_string_are_not_counted_as_accepted() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft(num_ahead=8)
    target.needs_proposals = True
    tokenizer = make_tokenizer()
    ids = expected_ids(target, 60)
    end = next(n for n in range(33, 60) if "\ufffd" not in tokenizer.decode(ids[n - 3 : n]))
    stop = tokenizer.decode(ids[end - 2 : end])
    async with running([target], [draft]) as harness:
        result = await collect(harness.stub.Generate(request(max_tokens=60, stop=[stop])))
        await until_ended(harness)
        num_depths = len(result.ended[0].stats.verified_by_depth)
        num_accepted = sum(
            harness.metric("accepted_tokens_total", depth=str(depth)) for depth in range(1, num_depths + 1)
        )
    assert result.ended[0].reason == pb.FINISH_REASON_STOP
    assert num_accepted == result.origins().count(pb.ORIGIN_DRAFT) > 0


async def test_times_are_within_those_that_the_client_measured() -> None:
    target = ScriptedTarget()
    target.limit = 10
    async with running([target]) as harness:
        began_s = time.monotonic()
        call = harness.stub.Generate(request(max_tokens=60))
        result = await read_tokens(call, 10)
        first_s = time.monotonic() - began_s
        target.set_limit(None)
        await finish(call, result)
        await until_ended(harness)
        took_s = time.monotonic() - began_s
        to_first_s = harness.metric("time_to_first_token_seconds_sum")
        assert harness.metric("time_to_first_token_seconds_count") == 1
        assert 0 < to_first_s <= first_s
        assert to_first_s < harness.metric("request_seconds_sum") <= took_s
        assert harness.metric("inter_token_seconds_count") == 59
        assert 0 < harness.metric("inter_token_seconds_sum") <= took_s


async def test_sessions_are_counted_while_they_are_open() -> None:
    target = ScriptedTarget()
    target.limit = 3
    async with running([target]) as harness:
        call = harness.stub.Generate(request(n=2))
        result = await read_tokens(call, 3)
        assert harness.metric("sessions", role="target") == 2
        assert harness.metric("sessions", role="draft") == 0
        target.set_limit(None)
        await finish(call, result)
        await until_ended(harness)
