"""The coordinator over real sockets, between replicas that follow a script."""

from __future__ import annotations

from specdec.v1 import common_pb2 as pb
from tests.integration.coordinator_harness import collect, expected_ids, request, running
from tests.integration.scripted_replicas import ScriptedDraft, ScriptedTarget


async def test_a_request_without_a_draft_streams_the_targets_tokens() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        result = await collect(harness.stub.Generate(request()))
    assert result.ids() == expected_ids(target, 20)
    assert result.chunks[0] == "started"
    assert result.chunks[-1] == "finished"
    assert result.ended[0].reason == pb.FINISH_REASON_LENGTH


async def test_a_draft_changes_origins_but_not_tokens() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    async with running([target], [draft]) as harness:
        result = await collect(harness.stub.Generate(request(max_tokens=200)))
    assert result.ids() == expected_ids(target, 200)
    assert pb.ORIGIN_DRAFT in result.origins()
