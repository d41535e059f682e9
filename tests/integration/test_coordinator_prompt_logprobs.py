"""Log-probabilities of a prompt come once, in order and whole, whatever becomes of targets, streams and clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from specdec.client import Completion
from specdec.client.resuming import resumed_request
from specdec.coordinator.intake import terms
from specdec.coordinator.sessions import prompt_logprobs
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from specdec.v1 import coordinator_pb2_grpc as api_grpc
from specdec.wire.errors import InvalidRequest
from specdec.wire.message_sizes import position_bytes
from tests.support.scripted.model import prompt_positions
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    Harness,
    Result,
    collect,
    error_of,
    expected_ids,
    finish,
    request,
    running,
)
from tests.support.services.faults import SmallBuffers

NUM_TOP = 3
PROMPT = [5 + index % 200 for index in range(60)]
WINDOW = 12
"""Positions that a target may be ahead, in tests of credit."""


def body_of(prompt: list[int] = PROMPT, **fields: Any) -> api.GenerateRequest:
    return request(prompt, **{"prompt_logprobs": NUM_TOP, "max_tokens": 5, **fields})


def assert_whole(result: Result, prompt: list[int] = PROMPT, start: int = 0, *, num_choices: int = 1) -> None:
    told = result.prompt_logprobs
    assert told is not None
    assert told.start_position == start
    assert list(told.token_ids) == prompt[start:]
    asked = pb.OpenSession(num_prompt_logprobs=NUM_TOP)
    assert list(told.positions) == prompt_positions(asked, max(1, start), len(prompt))
    last = max(index for index, kind in enumerate(result.chunks) if kind == "prompt_logprobs")
    assert num_choices > 1 or "delta" not in result.chunks[:last]


async def read_prompt(call: Any, num_positions: int) -> Result:
    """Read a stream until log-probabilities of so many of the prompt's tokens have come."""
    result = Result()
    while result.prompt_logprobs is None or len(result.prompt_logprobs.positions) < num_positions:
        result.add(await call.read())
    return result


@asynccontextmanager
async def halfway() -> AsyncIterator[tuple[Harness, ScriptedTarget, Any, Result]]:
    """A target that stops at position 31 of the prompt, and a call and what came of it when all before has come."""
    target = ScriptedTarget()
    target.prompt_limit = 31
    async with running([target]) as harness:
        call = harness.stub.Generate(body_of())
        yield harness, target, call, await read_prompt(call, 30)


@pytest.fixture
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_logprobs, "_WINDOW_BYTES", WINDOW * position_bytes(NUM_TOP))


@pytest.mark.parametrize("knows_parts", [True, False])
async def test_all_of_them_come_before_the_output(knows_parts: bool) -> None:
    target = ScriptedTarget()
    target.knows_parts = knows_parts
    async with running([target]) as harness:
        result = await collect(harness.stub.Generate(body_of(n=2)))
        assert harness.metric("token_mismatches_total") == 0
    assert_whole(result, num_choices=2)
    assert result.ids(0) == expected_ids(target, 5, PROMPT)
    assert result.ids(1) == expected_ids(target, 5, PROMPT, choice=1)


async def test_a_client_that_knows_no_parts_gets_all_in_one_chunk_whichever_target_dies_meanwhile() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.prompt_limit = 20
    async with running(targets) as harness:
        await harness.all_ready()
        call = harness.stub.Generate(body_of(prompt_logprobs_in_parts=False))
        begun = [asyncio.create_task(target.until(lambda t=target: bool(t.prompt_starts))) for target in targets]
        await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
        for task in begun:
            task.cancel()
        first, other = targets if targets[0].opened else reversed(targets)
        other.set_prompt_limit(None)
        await first.stop()
        result = await collect(call)
    assert_whole(result)
    assert result.chunks.count("prompt_logprobs") == 1
    assert sum(len(target.prompt_starts) for target in targets) == 2


async def test_what_does_not_fit_into_one_chunk_is_refused_unless_the_client_takes_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(terms, "MOST_JOINED_BYTES", len(PROMPT) * position_bytes(NUM_TOP) - 1)
    async with running([ScriptedTarget()]) as harness:
        error = await error_of(harness.stub.Generate(body_of(prompt_logprobs_in_parts=False)))
        assert_whole(await collect(harness.stub.Generate(body_of())))
    assert isinstance(error, InvalidRequest)
    assert error.field == "sampling.prompt_logprobs"


async def test_a_prompt_of_one_token_has_none() -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        result = await collect(harness.stub.Generate(body_of([7])))
    assert result.prompt_logprobs is None
    assert result.ids() == expected_ids(target, 5, [7])


async def test_a_target_that_dies_in_the_middle_is_replaced_by_one_that_goes_on_there() -> None:
    targets = [ScriptedTarget(), ScriptedTarget()]
    for target in targets:
        target.prompt_limit = 20
    async with running(targets) as harness:
        await harness.all_ready()
        call = harness.stub.Generate(body_of())
        result = await read_prompt(call, 19)
        first, other = targets if targets[0].opened else reversed(targets)
        other.set_prompt_limit(None)
        await first.stop()
        await finish(call, result)
        assert harness.metric("token_mismatches_total") == 0
    assert_whole(result)
    assert result.ids() == expected_ids(other, 5, PROMPT)
    assert (first.prompt_starts, other.prompt_starts) == ([1], [20])


async def test_what_a_broken_stream_lost_is_sent_again_and_not_computed_again() -> None:
    async with halfway() as (harness, target, call, result):
        target.break_streams()
        await target.until(lambda: len(target.attaches) == 2)
        target.set_prompt_limit(None)
        await finish(call, result)
        assert harness.metric("token_mismatches_total") == 0
    assert_whole(result)
    assert [listed.prompt_logprobs_position for listed in target.attaches[1].sessions] == [31]
    assert target.prompt_starts == [1]


async def test_parts_that_come_twice_are_told_once() -> None:
    async with halfway() as (_, target, call, result):
        [session] = target.sessions.values()
        part = pb.PromptLogprobsPart(start_position=20, positions=prompt_positions(session.body, 20, 31))
        target.emit(session, prompt_logprobs=part)
        target.set_prompt_limit(None)
        await finish(call, result)
    assert_whole(result)


@pytest.mark.parametrize(
    ("start", "stop", "num_top"), [(33, 40, NUM_TOP), (0, 5, NUM_TOP), (31, 90, NUM_TOP), (31, 32, NUM_TOP + 1)]
)
async def test_parts_that_do_not_continue_what_came_open_the_session_again(start: int, stop: int, num_top: int) -> None:
    async with halfway() as (harness, target, call, result):
        [session] = target.sessions.values()
        asked = pb.OpenSession(num_prompt_logprobs=num_top)
        part = pb.PromptLogprobsPart(start_position=start, positions=prompt_positions(asked, start, stop))
        target.prompt_limit = None
        target.emit(session, prompt_logprobs=part)
        await finish(call, result)
        assert harness.metric("token_mismatches_total") == 1
    assert_whole(result)
    assert target.prompt_starts == [1, 31]


async def test_a_verdict_that_comes_too_early_opens_the_session_again() -> None:
    async with halfway() as (_, target, call, result):
        [session] = target.sessions.values()
        target.emit(session, verdict=pb.Verdict(start_position=60, token_ids=[9], origins=[pb.ORIGIN_PREFILL]))
        target.prompt_limit = None
        await finish(call, result)
    assert_whole(result)
    assert result.ids() == expected_ids(target, 5, PROMPT)


async def test_a_client_that_does_not_read_holds_up_the_target_and_moves_nothing(small_window: None) -> None:
    prompt = [5 + index % 200 for index in range(4000)]
    targets = [ScriptedTarget(), ScriptedTarget()]
    async with running(targets, session_stall_s=1.0, ejection_failures=1) as harness:
        await harness.all_ready()
        async with grpc.aio.insecure_channel(harness.address, options=SmallBuffers().channel_options()) as channel:
            call = api_grpc.CoordinatorServiceStub(channel).Generate(body_of(prompt))
            result = await read_prompt(call, 1)
            target = next(target for target in targets if target.opened)
            [session] = target.sessions.values()
            stood = -1
            while stood != session.prompt_next:
                stood = session.prompt_next
                target.tell_progress(pb.SessionProgress.STATE_PAUSED, stood)
                await asyncio.sleep(1.5)  # longer than a standstill may last
            assert stood < len(prompt) - 1
            assert sum(len(part.positions) for part in session.parts) <= 2 * WINDOW
            assert [str(link.state) for link in harness.service.fleet.links] == ["ready", "ready"]
            await finish(call, result)
    assert_whole(result, prompt)
    assert [len(t.opened) for t in targets].count(0) == 1


@pytest.mark.parametrize("num_held", [1, 20, 59])
async def test_a_client_that_was_cut_off_gets_the_rest(num_held: int) -> None:
    target = ScriptedTarget()
    target.prompt_limit = num_held + 1
    body = body_of(request_id="mine")
    held = Completion()
    async with running([target]) as harness:
        call = harness.stub.Generate(body)
        while held.prompt_logprobs is None or len(held.prompt_logprobs.positions) < num_held:
            held.add(await call.read())
        target.prompt_limit = None
        again = resumed_request(body, held)
        assert again.resume.prompt_logprobs_position == num_held + 1
        rest = await collect(harness.stub.Generate(again))
    if num_held < 59:
        assert_whole(rest, start=num_held + 1)
    else:
        assert rest.prompt_logprobs is None
    assert rest.ids() == expected_ids(target, 5, PROMPT)


async def test_a_client_that_says_nothing_and_holds_no_token_gets_all_again_also_when_the_journal_has_tokens() -> None:
    target = ScriptedTarget()
    target.limit = 3
    body = body_of(request_id="mine", max_tokens=10)
    async with running([target]) as harness:
        call = harness.stub.Generate(body)
        first = await read_prompt(call, 59)
        while len(first.ids()) < 3:
            first.add(await call.read())
        target.set_limit(None)
        again = api.GenerateRequest()
        again.CopyFrom(body)
        assert first.started is not None
        again.resume.resume_token = first.started.resume_token
        rest = await collect(harness.stub.Generate(again))
        with_token = api.GenerateRequest()
        with_token.CopyFrom(again)
        with_token.resume.choices.add(index=0, token_ids=first.ids()[:1])
        late = await collect(harness.stub.Generate(with_token))
    assert_whole(rest)
    assert rest.ids() == expected_ids(target, 10, PROMPT)
    assert late.prompt_logprobs is None
    assert late.ids() == expected_ids(target, 10, PROMPT)[1:]


async def test_a_place_past_the_prompt_is_refused() -> None:
    target = ScriptedTarget()
    body = body_of(request_id="mine")
    async with running([target]) as harness:
        whole = await collect(harness.stub.Generate(body))
        assert whole.started is not None
        body.resume.resume_token = whole.started.resume_token
        body.resume.prompt_logprobs_position = len(PROMPT) + 1
        error = await error_of(harness.stub.Generate(body))
    assert isinstance(error, InvalidRequest)
    assert error.field == "resume.prompt_logprobs_position"
