"""Requests with a million token ids leave the coordinator's event loop to others, and their output is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest

from specdec.coordinator import tasks
from specdec.coordinator.generation import GenerateCalls
from specdec.coordinator.intake.planning import RequestPlan
from specdec.coordinator.links.draft_link import DraftLink
from specdec.coordinator.links.target_link import TargetLink
from specdec.coordinator.recovery import replay as replay_module
from specdec.coordinator.replicas import fleet
from specdec.coordinator.sessions.session import Session
from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.replica import ScriptedReplica
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    Harness,
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


@pytest.mark.parametrize("end", ["abort", "take_over"])
async def test_a_request_that_ends_while_its_choices_copy_a_long_prompt_opens_none(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ScriptedTarget()
    made, ended = list[int](), list[bool]()
    make = GenerateCalls._session

    def count(calls: GenerateCalls, plan: RequestPlan, choice: int) -> Session:
        if not made:
            asyncio.get_running_loop().call_soon(stop, calls, plan)
        made.append(choice)
        return make(calls, plan, choice)

    def stop(calls: GenerateCalls, plan: RequestPlan) -> None:
        ended.append(len(made) == 1)  # in the turn after the first copy
        getattr(calls._finisher, end)(plan.request)

    monkeypatch.setattr(GenerateCalls, "_session", count)
    async with running([target]) as harness:
        call = harness.stub.Generate(request(range(5, 5 + 4 * PIECE), max_tokens=8, n=4, ignore_eos=True))
        if end == "abort":
            result = await collect(call)
            assert [result.ended[index].reason for index in range(4)] == [pb.FINISH_REASON_ABORT] * 4
        else:
            assert (await error_of(call)).reason == "TAKEN_OVER"
        assert not target.sessions and not target.prompt_starts
    assert ended == [True]
    assert made == [0, 1, 2, 3]


async def test_choices_of_a_long_prompt_are_opened_in_turns_and_share_it() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    prompt = [5 + number % 200 for number in range(4 * PIECE)]
    async with running([target], [draft]) as harness:
        body = request(prompt, max_tokens=8, n=8, ignore_eos=True)
        result = await collect(harness.stub.Generate(body))
    for index in range(8):
        assert result.ids(index) == expected_ids(target, 8, prompt, choice=index)


async def test_blocks_of_a_long_prompt_and_output_are_hashed_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = list[int]()
    block_digests = fleet.block_digests

    def counted(token_ids: Sequence[int], salt: bytes, known: Sequence[bytes]) -> list[bytes]:
        digests = block_digests(token_ids, salt, known)
        hashed.append(len(digests) - len(known))
        return digests

    monkeypatch.setattr(fleet, "block_digests", counted)
    monkeypatch.setattr(fleet, "LONG_TOKENS", 2 * fleet.BLOCK_TOKENS)
    prompt = [5 + number % 200 for number in range(20 * fleet.BLOCK_TOKENS)]
    target = ScriptedTarget()
    async with running([target]) as harness:
        for _ in range(2):
            result = await collect(harness.stub.Generate(request(prompt, max_tokens=300, ignore_eos=True)))
            assert result.ids() == expected_ids(target, 300, prompt)
    assert hashed == [*[2] * 10, 2] * 2


class Turns:
    """Tokens of the sessions that are opened in each turn of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.walked: list[int] = []
        self._now = 0
        for link in (TargetLink, DraftLink):
            monkeypatch.setattr(link, "open_session", self._counted(link.open_session))

    def _counted(self, open_session: Callable[[Any, Session], None]) -> Callable[[Any, Session], None]:
        def counted(link: Any, session: Session) -> None:
            if not self._now:
                asyncio.get_running_loop().call_soon(self._end)
            self._now += session.position + len(session.prediction) * isinstance(link, TargetLink)
            open_session(link, session)

        return counted

    def _end(self) -> None:
        self.walked.append(self._now)
        self._now = 0


@pytest.mark.parametrize("how", ["for good", "until it comes back", "for a moment"])
@pytest.mark.parametrize("role", ["target", "draft"])
async def test_sessions_of_a_lost_replica_are_opened_again_in_parts(
    role: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_of_role = 1 if how == "until it comes back" else 2
    targets = [ScriptedTarget() for _ in range(num_of_role if role == "target" else 1)]
    drafts = [ScriptedDraft() for _ in range(num_of_role if role == "draft" else 1)]
    for target in targets:
        target.limit = 4
    prompts = [[5 + (number * 7 + place) % 200 for place in range(PIECE // 2)] for number in range(16)]
    async with running(targets, drafts) as harness:
        await harness.all_ready()
        turns = Turns(monkeypatch)
        calls = [harness.stub.Generate(request(prompt, max_tokens=12, ignore_eos=True)) for prompt in prompts]
        results = [await read_tokens(call, 4) for call in calls]
        replica: ScriptedReplica = max(targets if role == "target" else drafts, key=lambda one: len(one.sessions))
        turns.walked.clear()
        if how == "for a moment":
            replica.break_streams()
        else:
            await replica.stop()
        if how == "until it comes back":
            await harness.replica_until(role, "down")
            await replica.start()
            await harness.all_ready()
        for target in targets:
            target.set_limit(None)
        for call, result in zip(calls, results, strict=True):
            await finish(call, result)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.ids() == expected_ids(targets[0], 12, prompt)
    # A session is opened at its target and at its draft.
    assert max(turns.walked) <= 2 * 2 * PIECE
    assert sum(turns.walked) >= len(prompts) // 2 * PIECE // 2


async def test_choices_with_a_long_prediction_are_opened_in_turns_at_target_and_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    body = request(max_tokens=8, n=8, ignore_eos=True)
    body.prediction.token_ids.token_ids.extend([9] * 4 * PIECE)
    async with running([target], [draft]) as harness:
        await harness.all_ready()
        turns = Turns(monkeypatch)
        result = await collect(harness.stub.Generate(body))
        await draft.until(lambda: len(draft.opened) == 8)
    assert [result.ids(index) for index in range(8)] == [expected_ids(target, 8, choice=index) for index in range(8)]
    assert max(turns.walked) <= 5 * PIECE


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
