"""A draft that lies in every way it has: no target dies of it, and no stream of anybody has another token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from specdec.coordinator.intake.callers import TENANT_KEY
from specdec.v1 import common_pb2 as pb
from specdec.v1 import draft_pb2
from tests.support.scripted.draft import ScriptedDraft
from tests.support.scripted.model import identity
from tests.support.scripted.replica import ScriptedSession
from tests.support.scripted.target import ScriptedTarget
from tests.support.services.coordinator_harness import collect, expected_ids, request, running

UINT32_MAX, INT64_MAX = 2**32 - 1, 2**63 - 1
NUM = 30
TENANTS = ("one", "two", "three")
ANSWERED_S = 60.0


def wrong_tokens(draft: ScriptedDraft, session: ScriptedSession) -> None:
    start = len(session.token_ids)
    draft.emit(session, proposal=pb.Proposal(start_position=start, token_ids=[3] * 4).SerializeToString())


def tokens_of_no_vocabulary(draft: ScriptedDraft, session: ScriptedSession) -> None:
    start = len(session.token_ids)
    draft.emit(session, proposal=pb.Proposal(start_position=start, token_ids=[UINT32_MAX] * 4).SerializeToString())


def huge_counts_and_times(draft: ScriptedDraft, session: ScriptedSession) -> None:
    good = pb.Proposal.FromString(draft.good_proposal(session) or b"")
    good.draft_us = good.path_length = UINT32_MAX
    draft.emit(session, proposal=good.SerializeToString())
    load = pb.LoadReport(
        num_running=UINT32_MAX, num_waiting=UINT32_MAX, draft_credit=UINT32_MAX, step_us=UINT32_MAX,
        kv_blocks_used=UINT32_MAX, num_sessions=UINT32_MAX, num_waiting_tokens=INT64_MAX,
    )  # fmt: skip
    for stream in draft.streams:
        stream.send(draft_pb2.DraftResponse(load=load))


def a_tree_of_its_own_parents(draft: ScriptedDraft, session: ScriptedSession) -> None:
    tree = pb.Proposal(start_position=len(session.token_ids), token_ids=[9] * 9, parents=[8, 7, 6, 5, 4, 3, 2, 1, 0])
    draft.emit(session, proposal=tree.SerializeToString())


def positions_that_there_are_not(draft: ScriptedDraft, session: ScriptedSession) -> None:
    for start in (0, UINT32_MAX, len(session.token_ids) + 10_000):
        draft.emit(session, proposal=pb.Proposal(start_position=start, token_ids=[9] * 4).SerializeToString())


def no_protobuf(draft: ScriptedDraft, session: ScriptedSession) -> None:
    draft.emit(session, proposal=b"\xff\xff\xff")


def a_megabyte(draft: ScriptedDraft, session: ScriptedSession) -> None:
    draft.emit(session, proposal=b"\x12\x80\x80\x40" + b"\x07" * 2**20)


def a_flood(draft: ScriptedDraft, session: ScriptedSession) -> None:
    for _ in range(2000):
        wrong_tokens(draft, session)


def stale_and_future_epochs(draft: ScriptedDraft, session: ScriptedSession) -> None:
    proposal = pb.Proposal(start_position=len(session.token_ids), token_ids=[9] * 4).SerializeToString()
    for epoch in (0, session.epoch - 1, session.epoch + 1, UINT32_MAX):
        result = draft_pb2.DraftResult(session_id=session.session_id, epoch=max(0, epoch), proposal=proposal)
        for stream in draft.streams:
            stream.send(draft_pb2.DraftResponse(results=[result]))


def sessions_of_others(draft: ScriptedDraft, session: ScriptedSession) -> None:
    """What it says of a session it says of all that it has, and of some that nobody has."""
    proposal = pb.Proposal(start_position=len(session.token_ids), token_ids=[9] * 4).SerializeToString()
    error = pb.SessionError(expected_position=UINT32_MAX)
    for session_id in (*draft.sessions, "", "coordinator-1/none", "x" * 70_000):
        results = [
            draft_pb2.DraftResult(session_id=session_id, epoch=session.epoch, proposal=proposal),
            draft_pb2.DraftResult(session_id=session_id, epoch=session.epoch + 1, error=error),
        ]
        for stream in draft.streams:
            stream.send(draft_pb2.DraftResponse(results=results))


Lie = Callable[[ScriptedDraft, ScriptedSession], None]
LIES: list[Lie] = [
    wrong_tokens, tokens_of_no_vocabulary, huge_counts_and_times, a_tree_of_its_own_parents, no_protobuf, a_megabyte,
    positions_that_there_are_not, a_flood, stale_and_future_epochs, sessions_of_others,
]  # fmt: skip


class LyingDraft(ScriptedDraft):
    """Tells a lie at every turn in place of a proposal."""

    def __init__(self, lies: list[Lie]) -> None:
        super().__init__(identity("lying-draft"))
        self._lies = lies
        self.num_told = 0

    def _propose(self, session: ScriptedSession) -> None:
        self._lies[self.num_told % len(self._lies)](self, session)
        self.num_told += 1


@pytest.mark.parametrize("lies", [[lie] for lie in LIES] + [LIES], ids=lambda lies: lies[0].__name__ + str(len(lies)))
async def test_no_lie_of_a_draft_changes_a_token_of_anybody(lies: list[Lie]) -> None:
    target, liar, honest = ScriptedTarget(), LyingDraft(lies), ScriptedDraft()
    async with running([target], [liar, honest]) as harness:
        await harness.all_ready()
        for turn in range(3):
            calls = {
                (tenant, seed): harness.stub.Generate(
                    request(max_tokens=NUM, seed=seed), metadata=((TENANT_KEY, tenant),)
                )
                for seed, tenant in enumerate(TENANTS * 2, start=10 * turn)
            }
            async with asyncio.timeout(ANSWERED_S):
                results = await asyncio.gather(*map(collect, calls.values()))
            for (_, seed), result in zip(calls, results, strict=True):
                assert result.ids() == expected_ids(target, NUM, seed=seed)
        assert liar.num_told > 0
        assert all(link.is_ready for link in harness.service.fleet.links if link.role == "target")
        assert target.num_deaths == 0
