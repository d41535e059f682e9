"""Drafts whose proposals are of no use, or far too many, lose their sessions and then all; answers never change."""

from __future__ import annotations

from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.replica import ScriptedSession
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    Harness,
    Result,
    collect,
    expected_ids,
    finish,
    read_tokens,
    request,
    running,
)
from tests.support.services.faults import eventually

NUM = 300


def wrong(session: ScriptedSession) -> bytes:
    return pb.Proposal(start_position=len(session.token_ids), token_ids=[1]).SerializeToString()


def state_of(harness: Harness, draft: ScriptedDraft) -> str:
    return next(str(link.state) for link in harness.service.fleet.links if link.address == draft.address)


async def answers(harness: Harness, num: int) -> list[Result]:
    calls = [harness.stub.Generate(request([n + 3, 4, 5], max_tokens=NUM)) for n in range(num)]
    return [await collect(call) for call in calls]


async def test_a_draft_that_is_never_right_is_ejected_and_one_that_is_stays() -> None:
    target, liar, honest = ScriptedTarget(), ScriptedDraft(), ScriptedDraft()
    target.needs_proposals = True
    liar.make_proposal = wrong
    # Longer than any machine takes for the calls: an ejection that has ended is no longer seen.
    forever = {"ejection_s": 3600.0, "ejection_max_s": 3600.0, "draft_reopen_s": 3600.0}
    async with running([target], [liar, honest], **forever) as harness:
        await harness.all_ready()
        calls = [harness.stub.Generate(request([n + 3, 4, 5], max_tokens=50)) for n in range(20)]
        results = [await collect(call) for call in calls]
        assert state_of(harness, liar) == "ejected"
        assert state_of(harness, honest) == "ready"
        await liar.until(lambda: not liar.sessions)  # they went to the other one, and waited for nothing
    assert [r.ids() for r in results] == [expected_ids(target, 50, [n + 3, 4, 5]) for n in range(20)]


async def test_one_session_that_no_draft_foresees_goes_on_without_and_its_draft_stays() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    draft.make_proposal = wrong
    target.tokens_per_verdict = 1
    async with running([target], [draft, ScriptedDraft()], draft_reopen_s=60.0) as harness:
        await harness.all_ready()
        draft_first = next(link for link in harness.service.fleet.drafts if link.address == draft.address)
        harness.service.fleet.drafts = [draft_first]
        target.needs_proposals = True
        call = harness.stub.Generate(request(max_tokens=NUM))
        await draft.until(lambda: bool(draft.closed))
        target.set_needs_proposals(False)
        result = await collect(call)
        assert harness.metric("draft_fallbacks_total", cause="never_accepted") == 1
        assert draft_first.is_ready
    assert result.ids() == expected_ids(target, NUM)


async def test_a_draft_that_floods_is_cut_off_and_targets_see_a_bounded_part_of_it() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.limit = 1
    async with running([target], [draft], draft_reopen_s=60.0) as harness:
        call = harness.stub.Generate(request(max_tokens=NUM))
        await draft.until(lambda: bool(draft.sessions))
        (session,) = draft.sessions.values()
        for _ in range(3000):
            draft.emit(session, proposal=wrong(session))
        await draft.until(lambda: bool(draft.closed))
        assert harness.metric("draft_fallbacks_total", cause="flood") == 1
        assert target.num_relayed <= 2 * 256
        target.set_limit(None)
        result = await collect(call)
    assert result.ids() == expected_ids(target, NUM)


async def test_a_draft_that_says_again_and_again_that_a_session_is_open_is_cut_off() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.limit = 3
    async with running([target], [draft]) as harness:
        call = harness.stub.Generate(request(max_tokens=40))
        result = await read_tokens(call, 3)
        await draft.until(lambda: bool(draft.sessions))
        (session,) = draft.sessions.values()
        link = harness.service.fleet.drafts[0]
        num_before = link.num_streams
        opened = draft_pb2.DraftResult(session_id=session.session_id, epoch=session.epoch, opened=pb.SessionOpened())
        for _ in range(5):
            session.stream.send(draft_pb2.DraftResponse(results=[opened] * 1000))

        async def is_cut_off() -> bool:
            return link.num_streams > num_before

        await eventually(is_cut_off, "its stream is ended")
        target.set_limit(None)
        await finish(call, result)
    assert result.ids() == expected_ids(target, 40)
