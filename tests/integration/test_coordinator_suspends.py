"""Drafts whose proposals a target does not want: told once, then nothing, then all at once. Answers never change."""

from __future__ import annotations

import pytest

from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.replica import ScriptedSession
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import (
    collect,
    expected_ids,
    finish,
    read_tokens,
    request,
    running,
)

NUM = 120


def num_output(session: ScriptedSession) -> int:
    return len(session.token_ids) - session.body.num_prompt_tokens


async def test_a_suspended_draft_hears_nothing_until_it_hears_all() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.suspends = lambda session: 20 <= num_output(session) < 100
    async with running([target], [draft]) as harness:
        await harness.all_ready()
        result = await collect(harness.stub.Generate(request(max_tokens=NUM)))
        await draft.until(lambda: not draft.sessions)
    assert result.ids() == expected_ids(target, NUM)
    suspending = [commit for commit in draft.commits if commit.suspend]
    assert len(suspending) == 1
    (resuming,) = [
        c for c in draft.commits if c.start_position > suspending[0].start_position and len(c.token_ids) > 50
    ]
    assert resuming.start_position == suspending[0].start_position + len(suspending[0].token_ids)
    later = [commit for commit in draft.commits if commit.start_position > resuming.start_position]
    assert later
    assert not any(commit.suspend for commit in later)
    told = [token for commit in draft.commits for token in commit.token_ids]
    assert told == result.ids()[: len(told)]


@pytest.mark.parametrize("num_drafts", [0, 1])
async def test_a_target_is_told_whether_to_expect_a_draft(num_drafts: int) -> None:
    target, drafts = ScriptedTarget(), [ScriptedDraft() for _ in range(num_drafts)]
    target.limit = 5
    async with running([target], drafts) as harness:
        await harness.all_ready()
        call = harness.stub.Generate(request(max_tokens=NUM))
        await target.until(lambda: target.num_output() == 5)
        assert [session.body.has_no_draft for session in target.sessions.values()] == [not num_drafts]
        target.set_limit(None)
        await collect(call)


async def test_one_that_was_suspended_is_used_again() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.suspends = lambda session: num_output(session) < 60
    async with running([target], [draft]) as harness:
        await harness.all_ready()
        target.limit = 60
        call = harness.stub.Generate(request(max_tokens=NUM))
        await target.until(lambda: target.num_output() == 60)
        target.set_needs_proposals(True)  # from here on it steps only with a proposal at hand
        target.set_limit(None)
        result = await collect(call)
    assert result.ids() == expected_ids(target, NUM)
    assert any(commit.suspend for commit in draft.commits)


async def test_a_draft_that_is_suspended_for_long_is_neither_stalled_nor_slow() -> None:
    target, draft, other = ScriptedTarget(), ScriptedDraft(), ScriptedDraft()
    target.suspends = lambda session: True
    async with running([target], [draft, other], draft_stall_s=0.02) as harness:
        await harness.all_ready()
        results = [await collect(harness.stub.Generate(request(max_tokens=400))) for _ in range(3)]
        assert harness.metric("draft_fallbacks_total", cause="stalled") == 0
        assert harness.metric("draft_hedges_total") == 0
        assert all(link.is_ready for link in harness.service.fleet.drafts)
    assert all(result.ids() == expected_ids(target, 400) for result in results)
    assert len(draft.opened) + len(other.opened) == 3


async def test_a_draft_that_returns_while_its_session_is_suspended_is_told_again() -> None:
    target, draft = ScriptedTarget(), ScriptedDraft()
    target.suspends = lambda session: 10 <= num_output(session) < 90
    target.limit = 40
    async with running([target], [draft]) as harness:
        call = harness.stub.Generate(request(max_tokens=NUM))
        result = await read_tokens(call, 40)  # the coordinator has what it will tell the draft
        await draft.until(lambda: any(commit.suspend for commit in draft.commits))
        draft.break_streams()
        await draft.until(lambda: any(len(s.body.token_ids) > 40 for s in draft.sessions.values()))
        target.set_limit(60)
        await draft.until(lambda: sum(commit.suspend for commit in draft.commits) == 2)
        target.set_limit(None)
        await finish(call, result)
        await draft.until(lambda: not draft.sessions)
    assert result.ids() == expected_ids(target, NUM)
    assert sum(commit.suspend for commit in draft.commits) == 2


async def test_the_target_changes_hands_and_the_new_one_decides() -> None:
    first, second, draft = ScriptedTarget(), ScriptedTarget(), ScriptedDraft()
    first.suspends = lambda session: True
    first.limit = 30
    async with running([first, second], [draft]) as harness:
        await harness.all_ready()
        targets = {link.address: link for link in harness.service.fleet.targets}
        harness.service.fleet.targets = [targets[first.address]]
        call = harness.stub.Generate(request(max_tokens=NUM))
        await first.until(lambda: first.num_output() == 30)
        harness.service.fleet.targets = [targets[second.address], targets[first.address]]
        await first.stop()
        result = await collect(call)
        await draft.until(lambda: not draft.sessions)
    assert result.ids() == expected_ids(second, NUM)
    assert not draft.commits[-1].suspend
