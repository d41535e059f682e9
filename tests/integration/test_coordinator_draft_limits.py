"""What clients ask of speculation is bounded by the operator, and is held against no replica."""

from __future__ import annotations

import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import collect, expected_ids, request, running


@pytest.mark.parametrize(("wanted", "sent"), [(100, 6), (2**32 - 1, 6), (6, 6), (3, 3), (None, None)])
async def test_a_request_gets_no_more_draft_tokens_than_the_operator_allows(
    wanted: int | None, sent: int | None
) -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    bodies: list[pb.OpenSession] = []
    async with running([target], [draft], max_draft_tokens=6) as harness:
        speculation = api.SpeculationParams(verify_mode=pb.VERIFY_MODE_REJECTION, max_draft_tokens=wanted)
        result = await collect(harness.stub.Generate(request(speculation=speculation)))
        for replica in (target, draft):
            await replica.until(lambda at=replica: bool(at.opened))
            bodies += [entry.open for frame in replica.frames for entry in frame.entries if entry.HasField("open")]
        info = await harness.stub.GetModelInfo(api.GetModelInfoRequest())
    assert result.ids() == expected_ids(target, 20)
    assert {body.max_draft_tokens if body.HasField("max_draft_tokens") else None for body in bodies} == {sent}
    assert info.max_draft_tokens == 6


async def test_a_draft_that_refuses_a_sessions_parameters_is_not_ejected_for_it() -> None:
    target, refusing = ScriptedTarget(), ScriptedDraft()
    info = error_details_pb2.ErrorInfo(reason="INVALID_FIELD", domain="specdec")
    violation = error_details_pb2.BadRequest.FieldViolation(field="open.max_draft_tokens", description="too many")
    refusing.refuse = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT, message="open.max_draft_tokens: too many")
    for detail in (info, error_details_pb2.BadRequest(field_violations=[violation])):
        refusing.refuse.details.add().Pack(detail)
    async with running([target], [refusing, ScriptedDraft()], ejection_failures=1) as harness:
        await harness.all_ready()
        calls = [harness.stub.Generate(request([number + 3, 4])) for number in range(4)]
        for call in calls:
            await collect(call)
        assert refusing.opened
        assert all(link.is_ready for link in harness.service.fleet.links)
