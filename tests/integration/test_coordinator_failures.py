"""When replicas err, are lost and come back, the client's tokens are always the same, each once."""

from __future__ import annotations

import asyncio

from google.rpc import code_pb2, error_details_pb2, status_pb2
from structlog.testing import capture_logs

from specdec.v1 import common_pb2 as pb
from specdec.wire.errors import InvalidRequest, Overloaded, Unavailable, to_status
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.model import identity
from tests.support.scripted.replica import PATIENCE_S, ScriptedSession
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    Result,
    collect,
    error_of,
    expected_ids,
    finish,
    read_tokens,
    request,
    resumed,
    running,
)
from tests.support.services.faults import eventually


async def test_a_restarted_target_gets_the_session_again_with_all_its_tokens() -> None:
    target = ScriptedTarget()
    target.limit = 10
    async with running([target]) as harness:
        call = harness.stub.Generate(request(max_tokens=40))
        result = await read_tokens(call, 10)
        await target.stop()
        await harness.replica_until("target", "down")
        target.set_limit(None)
        await target.start()
        await finish(call, result)
    assert result.ids() == expected_ids(target, 40)
    assert [(epoch, num) for _, epoch, num in target.opened] == [(1, 3), (2, 13)]


async def test_a_target_gone_too_long_is_replaced_by_another_of_the_same_model() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.limit = 10
    async with running(targets, target_timeout_s=0.05) as harness:
        await harness.all_ready()
        call = harness.stub.Generate(request(max_tokens=40))
        result = await read_tokens(call, 10)
        holder = next(t for t in targets if t.opened)
        other = next(t for t in targets if t is not holder)
        other.limit = None
        await holder.stop()
        await finish(call, result)
    assert result.ids() == expected_ids(holder, 40)
    assert [num for _, _, num in other.opened] == [13]


async def test_a_lost_target_without_replacement_is_unavailable_and_the_request_can_be_resumed() -> None:
    target = ScriptedTarget()
    target.limit = 10
    body = request(max_tokens=40)
    async with running([target], target_timeout_s=0.05) as harness:
        call = harness.stub.Generate(body)
        result = await read_tokens(call, 10)
        await target.stop()
        error = await error_of(call)
        assert isinstance(error, Unavailable)
        assert error.reason == "TARGET_LOST"
        assert error.retry_after_s > 0
        with capture_logs() as logs:
            error = await error_of(harness.stub.Generate(body))
        assert isinstance(error, Unavailable)
        (told,) = [line for line in logs if line["event"] == "request_failed"]
        assert (told["log_level"], told["code"], told["reason"]) == ("warning", "UNAVAILABLE", "NO_TARGET")
        assert told["request_id"] and told["error"]
        target.set_limit(None)
        await target.start()
        await harness.replica_until("target", "ready")
        rest = await collect(harness.stub.Generate(resumed(result, body)))
    assert result.ids() + rest.ids() == expected_ids(target, 40)


async def test_another_model_behind_the_same_address_never_continues_a_request() -> None:
    target = ScriptedTarget()
    target.limit = 10
    async with running([target], target_timeout_s=5.0) as harness:
        call = harness.stub.Generate(request(max_tokens=40))
        await read_tokens(call, 10)
        await target.stop()
        target.identity = identity(weights_digest="w2")
        await target.start()
        error = await error_of(call)
        assert isinstance(error, Unavailable)
        result = await collect(harness.stub.Generate(request(max_tokens=5)))
    assert result.started is not None
    assert result.started.model.weights_digest == "w2"


async def test_a_request_whose_target_is_lost_is_not_moved_to_one_that_serves_another_model_by_then() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.limit = 10
    async with running(targets, target_timeout_s=2.0) as harness:
        call = harness.stub.Generate(request(max_tokens=40))
        await read_tokens(call, 10)
        holder, other = sorted(targets, key=lambda target: not target.opened)
        await other.stop()
        await holder.stop()
        other.identity = identity(weights_digest="w2")
        await other.start()
        error = await error_of(call)
        assert isinstance(error, Unavailable)
        assert error.reason == "TARGET_LOST"
        assert other.opened == []
        result = await collect(harness.stub.Generate(request(max_tokens=5)))
    assert result.started is not None
    assert result.started.model.weights_digest == "w2"


async def test_a_target_that_refuses_a_session_for_a_while_gets_it_again() -> None:
    target = ScriptedTarget()
    target.refuse = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="full")
    async with running([target]) as harness:
        call = harness.stub.Generate(request())
        await target.until(lambda: len(target.opened) >= 3)
        target.refuse = None
        result = await finish(call, Result())
    assert result.ids() == expected_ids(target, 20)
    epochs = [epoch for _, epoch, _ in target.opened]
    assert epochs == sorted(set(epochs))


async def test_a_target_that_keeps_refusing_makes_the_request_unavailable() -> None:
    target = ScriptedTarget()
    target.refuse = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="full")
    async with running([target], target_timeout_s=0.1) as harness:
        error = await error_of(harness.stub.Generate(request()))
    assert isinstance(error, Unavailable)
    assert error.reason == "TARGET_REFUSES"


async def test_a_constraint_beside_too_many_others_is_not_tried_elsewhere_and_its_client_is_told_to_wait() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    info = error_details_pb2.ErrorInfo(reason="CONSTRAINT_OVERLOAD", domain="specdec")
    full = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="open.sampling.constraint.regex: too many")
    full.details.add().Pack(info)
    for target in targets:
        target.refuse = full
    async with running(targets) as harness:
        await harness.all_ready()
        error = await error_of(harness.stub.Generate(request()))
    assert isinstance(error, Overloaded)
    assert (str(error), error.reason) == ("sampling.constraint.regex: too many", "CONSTRAINT_OVERLOAD")
    assert error.retry_after_s >= 30
    assert sum(len(target.opened) for target in targets) == 1


async def test_a_sampling_parameter_that_a_target_refuses_is_named_as_the_client_sent_it() -> None:
    target = ScriptedTarget()
    target.refuse = to_status(InvalidRequest("open.sampling.allowed_token_ids", "no token in common"))
    async with running([target]) as harness:
        error = await error_of(harness.stub.Generate(request()))
    assert isinstance(error, InvalidRequest)
    assert (error.field, str(error)) == (
        "sampling.allowed_token_ids",
        "sampling.allowed_token_ids: no token in common",
    )


async def test_a_draft_that_dies_is_done_without_and_speculation_comes_back_with_it() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.needs_proposals = True
    target.limit = 50
    async with running([target], [draft]) as harness:
        call = harness.stub.Generate(request(max_tokens=200))
        result = await read_tokens(call, 50)
        await draft.stop()
        await harness.replica_until("draft", "down")
        target.set_needs_proposals(False)
        target.set_limit(100)
        while len(result.ids()) < 100:
            result.add(await call.read())
        assert result.origins()[-40:] == [pb.ORIGIN_DECODE] * 40
        target.set_needs_proposals(True)
        await draft.start()
        await draft.until(lambda: len(draft.opened) == 2)
        target.set_limit(None)
        await finish(call, result)
        assert harness.metric("draft_fallbacks_total", cause="stream_broken") == 1
    assert result.ids() == expected_ids(target, 200)
    assert pb.ORIGIN_DRAFT in result.origins()[110:]
    _, epoch, num_tokens = draft.opened[1]
    assert (epoch, num_tokens) == (2, 3 + len(result.ids()[: num_tokens - 3]))
    assert num_tokens >= 103


async def test_a_draft_that_errs_loses_the_session_and_gets_it_again() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.limit = 10
    async with running([target], [draft]) as harness:
        call = harness.stub.Generate(request(max_tokens=40))
        result = await read_tokens(call, 10)
        session_id = draft.opened[0][0]
        draft.fail_session(session_id, status_pb2.Status(code=code_pb2.INTERNAL, message="oops"))
        await draft.until(lambda: len(draft.opened) == 2)
        target.set_limit(None)
        await finish(call, result)
    assert result.ids() == expected_ids(target, 40)
    assert draft.opened[1][1:] == (2, 13)


async def test_a_draft_whose_proposals_do_not_parse_costs_the_session_its_draft_only() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    draft.make_proposal = lambda session: b"\xff\xff\xff"
    target.limit = 10  # of 200 tokens, else all may be there before the draft's first word
    async with running([target], [draft]) as harness:
        call = harness.stub.Generate(request(max_tokens=200))
        await target.until(lambda: target.num_relayed > 0)
        target.set_limit(None)
        result = await collect(call)
        assert harness.metric("draft_fallbacks_total", cause="bad_proposal") >= 1
    assert result.ids() == expected_ids(target, 200)
    assert len(target.opened) == 1


async def test_a_draft_that_never_answers_is_no_obstacle() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    draft.make_proposal = lambda session: None
    async with running([target], [draft]) as harness:
        result = await collect(harness.stub.Generate(request()))
    assert result.ids() == expected_ids(target, 20)


async def test_draining_refuses_newcomers_and_lets_running_requests_end() -> None:
    target = ScriptedTarget()
    target.limit = 10
    async with running([target]) as harness:
        call = harness.stub.Generate(request(max_tokens=20))
        result = await read_tokens(call, 10)
        drain = asyncio.create_task(harness.service.drain(PATIENCE_S))
        error = await error_of(harness.stub.Generate(request()))
        assert isinstance(error, Unavailable)
        assert error.reason == "DRAINING"
        target.set_limit(None)
        await finish(call, result)
        await drain
    assert result.ids() == expected_ids(target, 20)


async def test_draining_cuts_off_what_still_runs_in_the_end_and_replicas_are_told_before_their_streams_end() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.limit = 10
    async with running([target], [draft]) as harness:
        call = harness.stub.Generate(request(max_tokens=40))
        await read_tokens(call, 10)
        await harness.service.drain(0.05)
        await harness.service.stop()
        assert [len(replica.closed) for replica in (target, draft)] == [1, 1]
        error = await error_of(call)
    assert isinstance(error, Unavailable)
    assert error.reason == "DRAINING"


async def test_a_target_that_refuses_a_session_a_thousand_times_may_still_take_it() -> None:
    target = ScriptedTarget()
    target.refuse = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="full")
    waits = {"reconnect_first_s": 1e-6, "reconnect_backoff_max_s": 1e-5}
    async with running([target], **waits, target_timeout_s=600.0) as harness:
        call = harness.stub.Generate(request())
        await target.until(lambda: len(target.opened) > 1100)
        target.refuse = None
        assert (await collect(call)).ids() == expected_ids(target, 20)


async def test_a_session_that_is_cancelled_while_it_is_to_be_opened_again_is_closed_where_it_was() -> None:
    target = ScriptedTarget()
    target.limit = 5
    async with running([target], reconnect_first_s=3.0, reconnect_backoff_max_s=3.0) as harness:
        call = harness.stub.Generate(request(max_tokens=40))
        await read_tokens(call, 5)
        (session,) = target.sessions.values()
        target.emit(session, verdict=pb.Verdict(start_position=900, token_ids=[5], origins=[1]))

        async def is_noticed() -> bool:
            return harness.metric("token_mismatches_total") == 1

        await eventually(is_noticed, "what it said is no verdict")
        call.cancel()
        await target.until(lambda: not target.sessions)


async def test_a_request_whose_only_target_breaks_its_stream_at_each_opening_ends() -> None:
    target = ScriptedTarget()
    target.limit = 0

    def end_all(_: ScriptedSession) -> None:
        target.sessions.clear()
        for stream in target.streams:
            stream.abort(Unavailable("broken", reason="SOMETHING"))

    target.on_open = end_all
    async with running([target], target_timeout_s=0.5) as harness:
        async with asyncio.timeout(PATIENCE_S):
            error = await error_of(harness.stub.Generate(request(max_tokens=10)))
    assert isinstance(error, Unavailable)
    assert error.reason == "TARGET_LOST"
