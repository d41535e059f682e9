"""A slow draft beside a fast one, over real sockets: sessions end up at the fast one, and their tokens never change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from structlog.testing import capture_logs

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.replica import ScriptedSession
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    Harness,
    Result,
    expected_ids,
    finish,
    read_tokens,
    request,
    running,
)

NUM = 400
NUM_AT_MOST = 90
"""Steps until the faster draft has the session alone: 16 late ones and those between, and 64 of a hedge."""


class SlowDraft(ScriptedDraft):
    """Tells what it proposes only when it has been told of so many more commits."""

    num_behind = 8

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[tuple[str, int], list[bytes]] = {}

    def _propose(self, session: ScriptedSession) -> None:
        proposal = self.make_proposal(session)
        kept = self._kept.setdefault((session.session_id, session.epoch), [])
        if proposal is not None:
            kept.append(proposal)
        if len(kept) > self.num_behind:
            self.emit(session, proposal=kept[0])
            kept.clear()


def wrong(session: ScriptedSession) -> bytes:
    """In time, and of no use: each step of the target is a plain one, whatever the draft does."""
    return pb.Proposal(start_position=len(session.token_ids)).SerializeToString()


@dataclass
class Stage:
    """One session at the first of two drafts, which goes on a token at a time."""

    harness: Harness
    target: ScriptedTarget
    first: ScriptedDraft
    second: ScriptedDraft

    def has_session(self, draft: ScriptedDraft) -> bool:
        return any(link.sessions for link in self.harness.service.fleet.drafts if link.address == draft.address)

    @property
    def num_open(self) -> float:
        return self.harness.metric("draft_hedges_open")


@asynccontextmanager
async def stage(first: ScriptedDraft, second: ScriptedDraft) -> AsyncIterator[Stage]:
    target = ScriptedTarget()
    target.limit = 1
    for draft in (first, second):
        draft.make_proposal = wrong
    async with running([target], [first, second], draft_stall_s=60.0) as harness:
        await harness.all_ready()
        yield Stage(harness, target, first, second)


async def steps(at: Stage, call: Any, result: Result, until: Callable[[], bool]) -> None:
    """Let the target decide token by token, each when a fast draft has answered the one before, until it is so."""
    (fast,) = (draft for draft in (at.first, at.second) if not isinstance(draft, SlowDraft))
    for _ in range(NUM_AT_MOST):
        if until():
            return
        limit, num_relayed, is_answered = len(result.ids()) + 1, at.target.num_relayed, at.has_session(fast)
        at.target.set_limit(limit)
        while len(result.ids()) < limit:
            result.add(await call.read())
        if is_answered:
            await at.target.until(lambda num=num_relayed: at.target.num_relayed > num)
    raise AssertionError(f"not within {NUM_AT_MOST} steps")


SAMPLINGS = [{"temperature": 0.0}, {"temperature": 0.9}]
"""Of coupled mode: greedy, and sampled."""


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_a_session_of_a_slow_draft_ends_up_at_the_fast_one_with_the_same_tokens(
    sampling: dict[str, float],
) -> None:
    with capture_logs() as logs:
        async with stage(SlowDraft(), ScriptedDraft()) as at:
            call = at.harness.stub.Generate(request(max_tokens=NUM, **sampling))
            result = await read_tokens(call, 1)
            assert at.has_session(at.first)
            await steps(at, call, result, lambda: at.has_session(at.second) and not at.has_session(at.first))
            # A busy machine may slow the fast one down: then it wins at the second attempt.
            assert at.harness.metric("draft_hedges_total") >= at.harness.metric("draft_hedges_won_total") == 1
            assert at.num_open == 0
            at.target.set_limit(None)
            await finish(call, result)
    assert result.ids() == expected_ids(at.target, NUM)
    events = [line for line in logs if line["event"] in ("draft_hedged", "draft_hedge_ended")]
    assert [line["event"] for line in events[:2]] == ["draft_hedged", "draft_hedge_ended"]
    assert events[0]["hedge"] == at.second.address
    assert at.second.address in [line["kept"] for line in events if line["event"] == "draft_hedge_ended"]


async def test_a_session_of_a_fast_draft_beside_a_slow_one_stays_where_it_is() -> None:
    async with stage(ScriptedDraft(), SlowDraft()) as at:
        call = at.harness.stub.Generate(request(max_tokens=NUM))
        result = await read_tokens(call, 1)
        with pytest.raises(AssertionError, match="not within"):
            await steps(at, call, result, lambda: at.has_session(at.second))
        assert at.harness.metric("draft_hedges_total") == 0
        at.target.set_limit(None)
        await finish(call, result)
    assert result.ids() == expected_ids(at.target, NUM)


@pytest.mark.parametrize("dies_first", [True, False])
async def test_when_one_of_two_drafts_dies_the_session_goes_on_with_the_other_and_the_same_tokens(
    dies_first: bool,
) -> None:
    async with stage(SlowDraft(), ScriptedDraft()) as at:
        call = at.harness.stub.Generate(request(max_tokens=NUM, temperature=0.9))
        result = await read_tokens(call, 1)
        await steps(at, call, result, lambda: at.num_open == 1)
        dead, left = (at.first, at.second) if dies_first else (at.second, at.first)
        await dead.stop()
        while at.num_open:
            await at.harness.replica_changed()
        assert at.has_session(left)
        assert at.harness.metric("draft_fallbacks_total", cause="stream_broken") == 0
        at.target.set_limit(None)
        await finish(call, result)
    assert result.ids() == expected_ids(at.target, NUM)


async def test_in_rejection_mode_a_session_is_opened_at_no_second_draft() -> None:
    async with stage(SlowDraft(), ScriptedDraft()) as at:
        speculation = api.SpeculationParams(verify_mode=pb.VERIFY_MODE_REJECTION)
        call = at.harness.stub.Generate(request(max_tokens=NUM, speculation=speculation))
        result = await read_tokens(call, 1)
        with pytest.raises(AssertionError, match="not within"):
            await steps(at, call, result, lambda: at.has_session(at.second))
        at.target.set_limit(None)
        await finish(call, result)
    assert at.second.opened == []
    assert result.ids() == expected_ids(at.target, NUM)
