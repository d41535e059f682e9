"""Replicas whose words make no sense: what they cost is theirs, or one session's, and clients get the right tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, status_pb2

from specdec.v1 import common_pb2 as pb
from specdec.v1 import target_pb2
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
from tests.support.services.faults import eventually

NOT_PROTOBUF = b"\xff\xff\xff"
UINT32_MAX = 2**32 - 1


def errors_that_make_no_sense() -> dict[str, status_pb2.Status]:
    error_info = any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=NOT_PROTOBUF)
    return {
        "an unknown code": status_pb2.Status(code=4711, message="oops"),
        "a negative code": status_pb2.Status(code=-(2**31), message="oops"),
        "details that do not parse": status_pb2.Status(code=code_pb2.INTERNAL, message="oops", details=[error_info]),
    }


class TargetWithBadTrailers(ScriptedTarget):
    """Its stream ends with details that are no google.rpc.Status, when it is told to."""

    ends_badly = False

    async def Verify(self, requests: Any, context: Any) -> AsyncIterator[target_pb2.VerifyResponse]:
        async for response in self.serve(requests, context, target_pb2.VerifyResponse):
            if self.ends_badly:
                self.ends_badly = False
                trailers = (("grpc-status-details-bin", NOT_PROTOBUF),)
                await context.abort(grpc.StatusCode.UNAVAILABLE, "no more", trailers)
            yield response


class BoastingTarget(ScriptedTarget):
    """Changes its verdicts before it sends them, as long as there is a `boast`."""

    def __init__(self) -> None:
        super().__init__()
        self.boast: Callable[[pb.Verdict], None] | None = None

    def emit(self, session: ScriptedSession, **body: Any) -> None:
        if "verdict" in body and self.boast is not None:
            told = pb.Verdict()
            told.CopyFrom(body["verdict"])
            self.boast(told)
            body["verdict"] = told
        super().emit(session, **body)


def count_too_much(verdict: pb.Verdict) -> None:
    for name in ("num_wasted", "num_accepted", "step_us", "hold_off_us", "queue_us", "prefill_us", "draft_us"):
        setattr(verdict, name, UINT32_MAX)
    verdict.hit = True
    verdict.verified_by_depth[:] = [UINT32_MAX]


async def test_a_stream_that_ends_with_details_that_do_not_parse_is_opened_again() -> None:
    target = TargetWithBadTrailers()
    target.limit = 5
    async with running([target]) as harness:
        call = harness.stub.Generate(request(max_tokens=20))
        result = await read_tokens(call, 5)
        (link,) = harness.service.fleet.links
        target.ends_badly = True
        target.tell_load(num_running=1)
        while link.num_streams < 2:
            await harness.replica_changed()
        target.set_limit(None)
        await finish(call, result)
    assert result.ids() == expected_ids(target, 20)


@pytest.mark.parametrize("name", errors_that_make_no_sense())
async def test_a_drafts_error_that_makes_no_sense_costs_the_session_its_draft_only(name: str) -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.limit = 5
    async with running([target], [draft]) as harness:
        call = harness.stub.Generate(request(max_tokens=20))
        result = await read_tokens(call, 5)
        draft.fail_session(draft.opened[0][0], errors_that_make_no_sense()[name])
        await draft.until(lambda: len(draft.opened) == 2)
        target.set_limit(None)
        await finish(call, result)
    assert result.ids() == expected_ids(target, 20)


@pytest.mark.parametrize("name", errors_that_make_no_sense())
async def test_a_targets_error_that_makes_no_sense_is_tried_again(name: str) -> None:
    target = ScriptedTarget()
    target.limit = 5
    async with running([target]) as harness:
        call = harness.stub.Generate(request(max_tokens=20))
        result = await read_tokens(call, 5)
        target.fail_session(target.opened[0][0], errors_that_make_no_sense()[name])
        await target.until(lambda: len(target.opened) == 2)
        target.set_limit(None)
        await finish(call, result)
    assert result.ids() == expected_ids(target, 20)


async def test_counts_that_add_up_to_more_than_a_field_holds_end_no_request() -> None:
    target = BoastingTarget()
    target.boast = count_too_much
    async with running([target]) as harness:
        result = await collect(harness.stub.Generate(request(max_tokens=20, n=2)))
    assert [result.ids(choice) for choice in range(2)] == [expected_ids(target, 20, choice=c) for c in range(2)]
    assert result.finished is not None
    assert result.finished.stats.num_wasted == UINT32_MAX
    assert result.finished.stats.num_proposed == UINT32_MAX


async def test_counts_that_add_up_to_more_than_a_field_holds_keep_no_id_from_being_used_again() -> None:
    target = BoastingTarget()
    target.boast = count_too_much
    target.limit = 5
    async with running([target]) as harness:
        call = harness.stub.Generate(request(max_tokens=20, request_id="mine"))
        await read_tokens(call, 5)
        call.cancel()

        async def has_ended() -> bool:
            return harness.metric("requests_total", outcome="CANCELLED") == 1

        await eventually(has_ended, "the request has ended")
        target.set_limit(None)
        result = await collect(harness.stub.Generate(request(max_tokens=20, request_id="mine")))
    assert result.ids() == expected_ids(target, 20)


async def test_more_depths_than_a_proposal_has_are_no_verdict() -> None:
    target = BoastingTarget()

    def count_for_ever(verdict: pb.Verdict) -> None:
        target.boast = None
        verdict.verified_by_depth[:] = [1] * 10_000

    target.boast = count_for_ever
    async with running([target]) as harness:
        result = await collect(harness.stub.Generate(request(max_tokens=20)))
        depths = harness.registry.collect()
        assert sum(len(m.samples) for m in depths if m.name == "specdec_coordinator_proposed_tokens") < 200
        assert harness.metric("token_mismatches_total") == 1
    assert result.ids() == expected_ids(target, 20)


async def test_a_verdict_without_the_logprobs_of_all_its_tokens_loses_none() -> None:
    target = BoastingTarget()
    target.tokens_per_verdict = 4

    def hold_some_back(verdict: pb.Verdict) -> None:
        if len(verdict.token_ids) == 4:
            target.boast = None
            del verdict.logprobs[2:]

    target.boast = hold_some_back
    async with running([target]) as harness:
        result = await collect(harness.stub.Generate(request(max_tokens=20, logprobs=2)))
    assert result.ids() == expected_ids(target, 20)
    assert all(len(token.logprobs.top) == 2 for token in result.tokens[0])


async def test_tokens_from_nowhere_move_the_session_to_another_target() -> None:
    """The journal has a byte for each origin."""
    liar, good = ScriptedTarget(), ScriptedTarget()
    liar._origin = lambda *told: 300  # type: ignore[method-assign]
    async with running([liar, good], ejection_failures=1) as harness:
        await harness.all_ready()
        prompts = [[number + 3, 4, 5] for number in range(8)]
        calls = [harness.stub.Generate(request(prompt, max_tokens=10)) for prompt in prompts]  # at once: to both
        for prompt, result in zip(prompts, await asyncio.gather(*map(collect, calls)), strict=True):
            assert result.ids() == expected_ids(good, 10, prompt)
        assert liar.opened


async def test_more_alternatives_than_were_asked_for_reach_no_client() -> None:
    liar = ScriptedTarget()
    tell = liar._add

    def tell_too_much(verdict: pb.Verdict, *rest: Any) -> None:
        tell(verdict, *rest)
        verdict.logprobs[-1].top.extend([pb.TokenLogprob(token_id=4, logprob=-1.0)] * 1000)

    liar._add = tell_too_much  # type: ignore[method-assign]
    async with running([liar], target_timeout_s=0.3) as harness:
        error = await error_of(harness.stub.Generate(request(max_tokens=3, logprobs=1)))
    assert error.reason == "TARGET_REFUSES"
