"""Requests with a million token ids leave the coordinator's event loop to others, and their output is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest

from specdec.coordinator import tasks
from specdec.coordinator.recovery import replay as replay_module
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    Harness,
    Result,
    collect,
    error_of,
    expected_ids,
    request,
    resumed,
    running,
)

NUM_TOKENS = 300
PIECE = 50


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six pieces for a choice's output, as a million tokens have thirty."""
    monkeypatch.setattr(tasks, "LONG_TOKENS", PIECE)
    monkeypatch.setattr(replay_module, "_AT_ONCE", PIECE)


async def whole(harness: Harness, **fields: Any) -> tuple[api.GenerateRequest, Result]:
    body = request(max_tokens=NUM_TOKENS, ignore_eos=True, **fields)
    return body, await collect(harness.stub.Generate(body))


@pytest.mark.parametrize("num_held", [0, 1, PIECE, PIECE + 1, 4 * PIECE, NUM_TOKENS - 1])
async def test_a_resume_in_pieces_goes_on_behind_what_the_client_has(num_held: int) -> None:
    target = ScriptedTarget()
    async with running([target]) as harness:
        body, first = await whole(harness, n=2)
        again = resumed(first, body)
        for choice in again.resume.choices:
            choice.token_ids[:] = choice.token_ids[:num_held]
            choice.text_offset_bytes = 0
        rest = await collect(harness.stub.Generate(again))
        for index in range(2):
            ids = expected_ids(target, NUM_TOKENS, choice=index)
            assert rest.ids(index) == ids[num_held:]
            assert rest.texts[index] == first.texts[index]
            assert rest.ended[index].reason == first.ended[index].reason


async def test_a_resume_that_is_aborted_while_it_is_replayed_ends_as_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running([ScriptedTarget()]) as harness:
        body, first = await whole(harness)
        again = resumed(first, body)
        again.resume.choices[0].token_ids[:] = again.resume.choices[0].token_ids[: 4 * PIECE]
        again.resume.choices[0].text_offset_bytes = 0
        began = asyncio.Event()
        in_turns = tasks.in_turns

        async def slowly(work: Generator[None, None, Any]) -> Any:
            def steps() -> Generator[None, None, Any]:
                began.set()
                return (yield from work)

            return await in_turns(steps())

        monkeypatch.setattr("specdec.coordinator.generation.in_turns", slowly)
        call = harness.stub.Generate(again)
        await began.wait()
        harness.service._finisher.abort(next(iter(harness.service._sessions.requests)))
        result = await collect(call)
    assert result.ended[0].reason == pb.FINISH_REASON_ABORT
    assert not result.ids() and not result.texts.get(0)


async def test_choices_of_a_long_prompt_are_opened_in_turns_and_share_it() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    prompt = [5 + number % 200 for number in range(4 * PIECE)]
    async with running([target], [draft]) as harness:
        body = request(prompt, max_tokens=8, n=8, ignore_eos=True)
        result = await collect(harness.stub.Generate(body))
    for index in range(8):
        assert result.ids(index) == expected_ids(target, 8, prompt, choice=index)


async def test_the_prompt_of_each_choice_counts_in_the_tenants_budget() -> None:
    prompt = [5 + number % 200 for number in range(4 * PIECE)]
    budget = 12 * len(prompt)
    async with running([ScriptedTarget()], max_held_prompt_bytes_per_tenant=budget, credit_window_tokens=8) as harness:
        many = request(prompt, max_tokens=1000, n=8, ignore_eos=True)
        first = harness.stub.Generate(many)
        await first.read()
        error = await error_of(harness.stub.Generate(many))
        assert error.reason == "PROMPT_BYTES_EXCEEDED"
        one = await collect(harness.stub.Generate(request(prompt, max_tokens=4, ignore_eos=True)))
        assert len(one.ids()) == 4
        first.cancel()
