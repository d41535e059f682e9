"""A replica says that a session's logits are no numbers: no other target is asked, no draft again, none is ejected."""

from __future__ import annotations

from google.rpc import code_pb2, error_details_pb2, status_pb2

from specdec.v1 import coordinator_pb2 as api
from specdec.wire.errors import Internal
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import error_of, expected_ids, finish, read_tokens, request, running


def non_finite() -> status_pb2.Status:
    status = status_pb2.Status(code=code_pb2.INTERNAL, message="the model's logits hold NaN")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="NON_FINITE_LOGITS", domain="specdec"))
    return status


async def test_a_target_that_says_so_fails_the_request_which_no_other_target_gets() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.limit = 10
    async with running(targets, ejection_failures=1) as harness:
        await harness.all_ready()
        call, beside = harness.stub.Generate(request(seed=11)), harness.stub.Generate(request(seed=12))
        await read_tokens(call, 10)
        first = await read_tokens(beside, 10)
        holder = next(t for t in targets if any(s.body.sampling.seed == 11 for s in t.sessions.values()))
        [session_id] = [s.session_id for s in holder.sessions.values() if s.body.sampling.seed == 11]
        holder.fail_session(session_id, non_finite())
        error = await error_of(call)
        assert isinstance(error, Internal)
        assert (error.reason, error.message) == ("NON_FINITE_LOGITS", "the model's logits hold NaN")
        for target in targets:
            target.set_limit(None)
        await finish(beside, first)
        status = await harness.stub.GetStatus(api.GetStatusRequest())
        assert [replica.state for replica in status.replicas] == ["ready", "ready"]
        assert harness.metric("session_reopens_total", role="target") == 0
    assert first.ids() == expected_ids(targets[0], 20, seed=12)
    assert sum(session == session_id for target in targets for session, _, _ in target.opened) == 1


async def fail_at_draft(drafts: list[ScriptedDraft], seed: int) -> str:
    """Let a draft say so of the session with this seed, until it is closed there; returns the session's id."""
    draft = next(d for d in drafts if any(s.body.sampling.seed == seed for s in d.sessions.values()))
    [session_id] = [s.session_id for s in draft.sessions.values() if s.body.sampling.seed == seed]
    draft.fail_session(session_id, non_finite())

    def is_closed() -> bool:
        entries = [entry for frame in draft.frames for entry in frame.entries]
        return any(e.session_id == session_id and e.WhichOneof("entry") == "close" for e in entries)

    await draft.until(is_closed)
    return session_id


async def test_a_draft_that_says_so_is_not_ejected_for_it() -> None:
    target, drafts = ScriptedTarget(), [ScriptedDraft(), ScriptedDraft()]
    target.limit = 10
    async with running([target], drafts, ejection_failures=1) as harness:
        await harness.all_ready()
        call = harness.stub.Generate(request())
        result = await read_tokens(call, 10)
        await fail_at_draft(drafts, 11)
        assert harness.metric("draft_fallbacks_total", cause="non_finite_logits") == 1
        status = await harness.stub.GetStatus(api.GetStatusRequest())
        assert {replica.state for replica in status.replicas} == {"ready"}
        target.set_limit(None)
        await finish(call, result)
    assert result.ids() == expected_ids(target, 20)
    assert sum(len(draft.opened) for draft in drafts) == 1


async def test_a_session_of_which_a_draft_said_so_gets_no_draft_that_returns() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.limit = 10
    async with running([target], [draft]) as harness:
        call, beside = harness.stub.Generate(request(seed=11)), harness.stub.Generate(request(seed=12))
        result, first = await read_tokens(call, 10), await read_tokens(beside, 10)
        session_id = await fail_at_draft([draft], 11)
        await draft.stop()
        await harness.replica_until("draft", "down")
        await draft.start()
        await draft.until(lambda: len(draft.opened) > 2)
        target.set_limit(None)
        await finish(call, result)
        await finish(beside, first)
    assert [epoch for session, epoch, _ in draft.opened if session == session_id] == [1]
    assert result.ids() == expected_ids(target, 20)
    assert first.ids() == expected_ids(target, 20, seed=12)
