"""When replicas break, err and come back, the client's tokens are always the same, each once."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, status_pb2
from structlog.testing import capture_logs

from coordinator.discovery import Endpoint
from specdec.rpc.errors import Cancelled, DataLoss, InvalidRequest, SpecdecError, Unavailable, from_rpc_error
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.integration.coordinator_harness import Harness, Result, collect, expected_ids, request, running
from tests.integration.scripted_replicas import ScriptedDraft, ScriptedTarget, identity


async def read_tokens(call: Any, num: int) -> Result:
    """Read a stream until this many tokens of the first choice have come."""
    result = Result()
    while len(result.ids()) < num:
        result.add(await call.read())
    return result


async def finish(call: Any, result: Result) -> Result:
    """Read the rest of a stream."""
    while (chunk := await call.read()) is not grpc.aio.EOF:
        result.add(chunk)
    return result


def resumed(first: Result, body: api.GenerateRequest, **held: Any) -> api.GenerateRequest:
    """The request that takes up a stream where `first` ends."""
    assert first.started is not None
    again = api.GenerateRequest()
    again.CopyFrom(body)
    again.request_id = first.started.request_id
    again.sampling.seed = first.started.seed
    again.resume.resume_token = first.started.resume_token
    for index in first.tokens:
        text = first.texts[index].encode()
        choice = api.ResumeChoice(index=index, token_ids=first.ids(index), text_offset_bytes=len(text))
        again.resume.choices.append(choice)
    for name, value in held.items():
        setattr(again.resume.choices[0], name, value)
    return again


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
        with pytest.raises(grpc.RpcError) as caught:
            await collect(call)
        error = from_rpc_error(caught.value)
        assert isinstance(error, Unavailable)
        assert error.reason == "TARGET_LOST"
        assert error.retry_after_s > 0
        with capture_logs() as logs, pytest.raises(grpc.RpcError) as caught:
            await collect(harness.stub.Generate(body))
        assert isinstance(from_rpc_error(caught.value), Unavailable)
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
        with pytest.raises(grpc.RpcError) as caught:
            await collect(call)
        assert isinstance(from_rpc_error(caught.value), Unavailable)
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
        with pytest.raises(grpc.RpcError) as caught:
            await collect(harness.stub.Generate(request()))
    error = from_rpc_error(caught.value)
    assert isinstance(error, Unavailable)
    assert error.reason == "TARGET_REFUSES"


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


async def test_a_client_that_lost_its_stream_takes_it_up_where_it_was() -> None:
    target = ScriptedTarget()
    body = request(max_tokens=60, n=2)
    async with running([target]) as harness:
        call = harness.stub.Generate(body)
        target.limit = 20
        first = await read_tokens(call, 7)
        call.cancel()
        target.set_limit(None)
        rest = await collect(harness.stub.Generate(resumed(first, body)))
        whole = await collect(harness.stub.Generate(body))
    for index in range(2):
        expected = expected_ids(target, 60, choice=index)
        assert first.ids(index) + rest.ids(index) == whole.ids(index) == expected
        assert first.texts.get(index, "") + rest.texts[index] == whole.texts[index]
    assert rest.finished is not None
    assert rest.finished.usage.completion_tokens == 120


async def test_resuming_works_on_another_coordinator_that_never_heard_of_the_request() -> None:
    target = ScriptedTarget()
    target.limit = 12
    body = request(max_tokens=60)
    async with running([target]) as harness:
        first = await read_tokens(harness.stub.Generate(body), 12)
    target = ScriptedTarget()
    async with running([target], owner_id="coordinator-2") as harness:
        rest = await collect(harness.stub.Generate(resumed(first, body)))
        whole = await collect(harness.stub.Generate(body))
    assert first.ids() + rest.ids() == expected_ids(target, 60)
    assert first.texts[0] + rest.texts[0] == whole.texts[0]
    assert [num for _, _, num in target.opened] == [15, 3]


async def test_resuming_a_live_request_takes_it_over_and_the_old_stream_ends() -> None:
    target = ScriptedTarget()
    target.limit = 10
    body = request(max_tokens=60, request_id="mine")
    async with running([target]) as harness:
        old = harness.stub.Generate(body)
        first = await read_tokens(old, 10)
        target.set_limit(None)
        new = harness.stub.Generate(resumed(first, body))
        rest = await collect(new)
        with pytest.raises(grpc.RpcError) as caught:
            await collect(old)
        error = from_rpc_error(caught.value)
    assert isinstance(error, Cancelled)
    assert error.reason == "TAKEN_OVER"
    assert first.ids() + rest.ids() == expected_ids(target, 60)


async def test_resuming_with_tokens_that_were_never_sent_is_data_loss() -> None:
    target = ScriptedTarget()
    target.limit = 10
    body = request(max_tokens=60)
    async with running([target]) as harness:
        call = harness.stub.Generate(body)
        first = await read_tokens(call, 10)
        again = resumed(first, body)
        again.resume.choices[0].token_ids[3] ^= 1
        with pytest.raises(grpc.RpcError) as caught:
            await collect(harness.stub.Generate(again))
    assert isinstance(from_rpc_error(caught.value), DataLoss)


async def test_resuming_what_had_already_ended_gives_the_rest_without_a_session() -> None:
    target = ScriptedTarget()
    body = request(max_tokens=20)
    async with running([target]) as harness:
        whole = await collect(harness.stub.Generate(body))
        first = Result(started=whole.started, texts={0: ""}, tokens={0: whole.tokens[0][:5]})
        rest = await collect(harness.stub.Generate(resumed(first, body)))
    assert rest.ids() == whole.ids()[5:]
    assert rest.texts[0] == whole.texts[0]
    assert rest.ended[0].reason == pb.FINISH_REASON_LENGTH
    assert len(target.opened) == 1


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("resume.resume_token", {"seed": 12}),
        ("resume.choices[0].text_offset_bytes", {"text_offset_bytes": 10_000}),
        ("resume.choices[0].index", {"index": 1}),
    ],
)
async def test_a_resume_that_does_not_fit_is_refused(field: str, change: dict[str, int]) -> None:
    target = ScriptedTarget()
    body = request(max_tokens=20)
    async with running([target]) as harness:
        whole = await collect(harness.stub.Generate(body))
        again = resumed(whole, body, **{k: v for k, v in change.items() if k != "seed"})
        if "seed" in change:
            again.sampling.seed = change["seed"]
        with pytest.raises(grpc.RpcError) as caught:
            await collect(harness.stub.Generate(again))
        error = from_rpc_error(caught.value)
        # The place in the running set is free again, and the id too.
        assert (await collect(harness.stub.Generate(body))).ids() == whole.ids()
    assert isinstance(error, InvalidRequest)
    assert error.field == field


async def test_draining_refuses_newcomers_lets_running_requests_end_and_cuts_off_the_rest() -> None:
    target = ScriptedTarget()
    target.limit = 10
    async with running([target]) as harness:
        quick = harness.stub.Generate(request(max_tokens=20))
        stuck = harness.stub.Generate(request(max_tokens=40))
        await read_tokens(quick, 10)
        await read_tokens(stuck, 10)
        drain = asyncio.create_task(harness.service.drain(0.5))
        error = await refusal(harness)
        assert isinstance(error, Unavailable)
        assert error.reason == "DRAINING"
        target.set_limit(20)
        await collect(quick)
        await drain
        with pytest.raises(grpc.RpcError) as caught:
            await collect(stuck)
    error = from_rpc_error(caught.value)
    assert isinstance(error, Unavailable)
    assert error.reason == "DRAINING"


async def refusal(harness: Harness) -> SpecdecError:
    """What a new request is told."""
    with pytest.raises(grpc.RpcError) as caught:
        await collect(harness.stub.Generate(request()))
    return from_rpc_error(caught.value)


async def test_a_stream_that_is_reset_is_opened_again_and_goes_on() -> None:
    target = ScriptedTarget()
    target.limit = 10
    async with running([target]) as harness:
        call = harness.stub.Generate(request(max_tokens=40))
        result = await read_tokens(call, 10)
        link = harness.service.fleet.targets[0]
        link.reset("a test")
        while link.num_streams < 2:
            await harness.service.fleet.wait_changed(10.0)
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
        harness.service.rosters["target"].update([Endpoint(first.address), Endpoint(second.address)])
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
            await fleet.wait_changed(10.0)
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
        roster = harness.service.rosters["target"]
        roster.update([Endpoint(target.address), Endpoint("127.0.0.1:1")])
        assert harness.metric("replicas", role="target", state="connecting") == 1
        link = harness.service.fleet.targets[1]
        while str(link.state) != "down":
            await harness.service.fleet.wait_changed(10.0)
        assert harness.metric("replicas", role="target", state="down") == 1
        roster.update([Endpoint(target.address)])
        assert harness.metric("replicas", role="target", state="down") == 0


async def test_a_target_that_refuses_a_session_a_thousand_times_may_still_take_it() -> None:
    target = ScriptedTarget()
    target.refuse = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="full")
    waits = {"reconnect_backoff_min_s": 1e-6, "reconnect_backoff_max_s": 1e-5}
    async with running([target], **waits, target_timeout_s=600.0) as harness:
        call = harness.stub.Generate(request())
        await target.until(lambda: len(target.opened) > 1100, timeout_s=60.0)
        target.refuse = None
        assert (await collect(call)).ids() == expected_ids(target, 20)
