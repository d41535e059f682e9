"""When a session gets a second draft, for how long, and which one it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from specdec.coordinator.sessions.drafting import Drafting, DraftSide, start_position
from specdec.coordinator.sessions.session import Session
from specdec.v1 import common_pb2 as pb
from tests.support.services.simulated_drafts import SimulatedDraft, World

FAST_S, SLOW_S = 0.002, 0.090
"""A step takes 10 ms, and a proposal is of use for 40."""
MOST_STEPS = 16 + 9 + 64
"""From when a draft becomes slow, until the faster one has the session alone: noticed, its last answer, the hedge."""
MOST_HEDGES = 6
"""In some 2000 steps: each takes twice as many late steps as the one before."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(lambda clock: monkeypatch.setattr("time.monotonic", clock))


def hosts(session: Session) -> list[str]:
    return [side.host.address for side in session.drafting.sides]


def until_hedged(world: World, session: Session, num_steps: int = MOST_STEPS) -> None:
    for _ in range(num_steps):
        world.run(1)
        if len(hosts(session)) == 2:
            return
    raise AssertionError("it is not hedged")


def counts(world: World) -> tuple[float, float, float]:
    """Hedges that were begun, that were won, and that are open."""
    num_begun, num_won = world.metric("draft_hedges_total"), world.metric("draft_hedges_won_total")
    return num_begun, num_won, world.metric("draft_hedges_open")


async def test_a_draft_that_answers_within_a_step_is_never_hedged(world: World) -> None:
    fast, _other = world.drafts(FAST_S, FAST_S)
    session = world.open(fast)
    world.run(300)
    assert hosts(session) == [fast.address]
    assert counts(world) == (0, 0, 0)


@pytest.mark.parametrize("first_is_slow", [True, False])
async def test_a_session_ends_up_at_the_faster_draft_within_a_bounded_number_of_steps(
    world: World, first_is_slow: bool
) -> None:
    one, two = world.drafts(SLOW_S, FAST_S) if first_is_slow else reversed(world.drafts(FAST_S, SLOW_S))
    session = world.open(one)
    world.run(MOST_STEPS)
    assert hosts(session) == [two.address]
    assert not one.sessions
    world.run(1000)
    assert hosts(session) == [two.address]
    assert counts(world) == (1, 1, 0)
    assert world.metric("draft_fallbacks_total", cause="slow") == 0, "it never was without a draft"
    assert all(link.is_ready for link in (one, two)), "slowness is no failure"


async def test_a_draft_that_is_late_for_every_other_burst_is_not_hedged(world: World) -> None:
    first, _other = world.drafts(FAST_S, FAST_S)
    first.delay_s = lambda: SLOW_S if round(world.now_s * 100) % 24 < 8 else FAST_S
    world.open(first)
    world.run(500)
    assert counts(world) == (0, 0, 0)


async def test_drafts_that_take_turns_in_being_slow_make_hedges_ever_rarer(world: World) -> None:
    one, two = world.drafts(FAST_S, FAST_S)
    one.delay_s = lambda: SLOW_S if int(world.now_s) % 2 else FAST_S
    two.delay_s = lambda: FAST_S if int(world.now_s) % 2 else SLOW_S
    session = world.open(one)
    world.run(2000)
    num_begun, _, num_open = counts(world)
    assert 1 <= num_begun <= MOST_HEDGES
    assert num_open == 0
    assert len(hosts(session)) == 1


async def test_of_two_slow_drafts_the_first_keeps_the_session_and_few_hedges_are_tried(world: World) -> None:
    one, two = world.drafts(SLOW_S, SLOW_S)
    session = world.open(one)
    world.run(2000)
    num_begun, num_won, num_open = counts(world)
    assert 1 <= num_begun <= MOST_HEDGES
    assert (num_won, num_open) == (0, 0)
    assert hosts(session) == [one.address]
    assert not two.sessions


async def test_a_draft_that_is_known_to_be_as_slow_gets_no_hedge(world: World) -> None:
    one, two = world.drafts(SLOW_S, SLOW_S)
    other = world.open(two)
    world.run(3)
    session = world.open(one)
    for known in (session, other):
        known.drafting.num_changes = 6  # patient until it is known
    world.run(60)
    for known in (session, other):
        known.drafting.num_changes = 0
    world.run(500)
    assert counts(world) == (0, 0, 0)


async def test_a_draft_that_recovers_while_it_is_hedged_keeps_its_session(world: World) -> None:
    one, _two = world.drafts(SLOW_S, FAST_S)
    session = world.open(one)
    until_hedged(world, session)
    one.delay_s = lambda: FAST_S
    world.run(MOST_STEPS)
    assert hosts(session) == [one.address]
    assert counts(world) == (1, 0, 0)


def the_hedge(one: SimulatedDraft, two: SimulatedDraft) -> SimulatedDraft:
    return two


def the_first(one: SimulatedDraft, two: SimulatedDraft) -> SimulatedDraft:
    return one


@pytest.mark.parametrize("dies", [the_hedge, the_first])
async def test_when_one_of_two_drafts_dies_the_other_goes_on_and_nothing_is_opened_again(
    world: World, dies: Callable[[SimulatedDraft, SimulatedDraft], SimulatedDraft]
) -> None:
    one, two = world.drafts(SLOW_S, FAST_S)
    session = world.open(one)
    until_hedged(world, session)
    dead = dies(one, two)
    left = two if dead is one else one
    dead.die()
    assert hosts(session) == [left.address]
    num_openings = session.drafting.num_openings
    world.run(20)
    assert hosts(session) == [left.address]
    assert session.drafting.num_openings == num_openings
    assert counts(world) == (1, float(dead is one), 0)
    assert world.metric("draft_fallbacks_total", cause="stream_broken") == 0


async def test_a_hedge_that_proposes_nothing_ends_after_a_bounded_number_of_steps(world: World) -> None:
    one, two = world.drafts(SLOW_S, FAST_S)
    two.delay_s = lambda: None
    session = world.open(one)
    until_hedged(world, session)
    world.run(64)
    assert hosts(session) == [one.address]
    assert counts(world) == (1, 0, 0)


async def test_a_hedge_ends_after_a_bounded_time_when_the_session_gets_no_step(world: World) -> None:
    one, _two = world.drafts(SLOW_S, FAST_S)
    session = world.open(one)
    until_hedged(world, session)
    world.now_s += 5.1
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(hosts(session)) == 1
    assert counts(world)[2] == 0


async def test_a_session_that_ends_while_it_is_hedged_leaves_nothing_behind(world: World) -> None:
    one, two = world.drafts(SLOW_S, FAST_S)
    session = world.open(one)
    until_hedged(world, session)
    world.finisher.abort(session.request)
    assert not one.sessions
    assert not two.sessions
    assert counts(world) == (1, 0, 0)


async def test_in_rejection_mode_a_session_never_has_two_drafts_and_moves_to_one_that_is_known_to_be_faster(
    world: World,
) -> None:
    one, two = world.drafts(SLOW_S, FAST_S)
    session = world.open(one, pb.VERIFY_MODE_REJECTION)
    seen: list[list[str]] = []
    world.run(400, lambda: seen.append(hosts(session)))
    assert set(map(tuple, seen)) == {(one.address,)}, "nothing is known of the other one"
    world.open(two, pb.VERIFY_MODE_REJECTION)
    world.run(100, lambda: seen.append(hosts(session)))
    assert seen[-1] == [two.address]
    assert max(map(len, seen)) == 1
    assert counts(world) == (0, 0, 0)
    assert world.metric("draft_fallbacks_total", cause="slow") == 1


async def test_of_many_sessions_one_in_eight_is_hedged_at_once(world: World) -> None:
    one, two = world.drafts(SLOW_S, FAST_S)
    sessions = [world.open(one) for _ in range(16)]
    open_at_once: list[float] = []
    world.run(200, lambda: open_at_once.append(counts(world)[2]))
    assert max(open_at_once) == 2
    assert len({session.session_id for session in sessions} & two.sessions.keys()) >= 8, "one after the other"


async def test_with_a_share_of_zero_sessions_stay_with_slow_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(lambda clock: monkeypatch.setattr("time.monotonic", clock), share=0.0)
    one, two = world.drafts(SLOW_S, FAST_S)
    modes = (pb.VERIFY_MODE_COUPLED, pb.VERIFY_MODE_REJECTION)
    sessions = [world.open(one, mode) for mode in modes]
    world.open(two)
    world.run(300)
    assert [hosts(session) for session in sessions] == [[one.address], [one.address]]


@pytest.mark.parametrize(
    "load",
    [
        {"num_sessions": 4, "max_sessions": 8},
        {"num_sessions": 1, "max_sessions": 8, "num_waiting": 1},
        {"num_sessions": 1, "max_sessions": 8, "kv_blocks_used": 95, "kv_blocks_total": 100},
    ],
)
async def test_a_draft_with_work_of_its_own_gets_no_hedge(world: World, load: dict[str, int]) -> None:
    one, two = world.drafts(SLOW_S, FAST_S)
    two.tell_load(**load)
    world.open(one)
    world.run(300)
    assert counts(world) == (0, 0, 0)


async def test_a_draft_that_becomes_full_gives_up_its_hedge_and_no_other_session(world: World) -> None:
    one, two = world.drafts(SLOW_S, FAST_S)
    own = world.open(two)
    session = world.open(one)
    until_hedged(world, session)
    two.tell_load(num_sessions=8, max_sessions=8)
    assert hosts(session) == [one.address]
    assert hosts(own) == [two.address]
    assert counts(world) == (1, 0, 0)


async def test_while_requests_wait_for_places_no_session_has_two_drafts(world: World) -> None:
    one, _two = world.drafts(SLOW_S, FAST_S)
    session = world.open(one)
    until_hedged(world, session)
    world.is_overloaded = True
    world.run(1)
    assert hosts(session) == [one.address]
    world.run(300)
    assert counts(world) == (1, 0, 0)


async def test_a_proposal_that_the_target_refuses_costs_a_hedged_session_both_drafts_and_marks_neither(
    world: World,
) -> None:
    one, two = world.drafts(SLOW_S, FAST_S)
    session = world.open(one)
    until_hedged(world, session)
    for _ in range(20):
        world.loop.on_proposal_rejected(session, pb.ProposalRejected())
    assert hosts(session) == []
    assert all(link.is_ready for link in (one, two))
    assert world.metric("draft_fallbacks_total", cause="bad_proposal") == 1


async def test_what_comes_from_an_earlier_opening_is_dropped_though_another_draft_was_there_between(
    world: World,
) -> None:
    one, two = world.drafts(FAST_S, FAST_S)
    session = world.open(one)
    first_epoch = session.drafting.epoch_at(one)
    one.close_session(session, "for the test")
    two.open_session(session)
    two.close_session(session, "for the test")
    one.open_session(session)
    assert session.drafting.epoch_at(one) > first_epoch


@pytest.mark.parametrize("start", [1, 127, 128, 4096, 2**31, 2**32 - 1])
def test_the_start_of_a_proposal_is_read_without_the_rest(start: int) -> None:
    encoded = pb.Proposal(start_position=start, token_ids=[1, 2]).SerializeToString()
    assert start_position(encoded) == start
    assert start_position(encoded + b"\xff" * 50) == start


@pytest.mark.parametrize("encoded", [b"", b"\x08", b"\x08\xff\xff\xff\xff\xff\xff", b"\x12\x01\x05", b"\xff" * 9])
def test_of_what_does_not_begin_like_a_proposal_nothing_is_read(encoded: bytes) -> None:
    assert start_position(encoded) is None


def a_side(world: World) -> tuple[Drafting, DraftSide]:
    (draft,) = world.drafts(FAST_S)
    drafting = Drafting()
    return drafting, drafting.opened(draft)


def at(start: int) -> bytes:
    return pb.Proposal(start_position=start, token_ids=[1]).SerializeToString()


async def test_a_commit_is_answered_by_the_first_proposal_that_knows_of_it(world: World) -> None:
    _, side = a_side(world)
    assert side.proposed(at(3), 1.0) is None
    side.committed(4, 2.0, is_plain=True)
    assert side.committed(5, 2.5, is_plain=True) == 0.5
    assert side.proposed(at(3), 3.0) is None
    assert side.proposed(at(4), 4.0) == 2.0
    assert side.proposed(at(5), 5.0) is None


async def test_the_first_proposal_waits_for_the_prompt_and_measures_nothing(world: World) -> None:
    _, side = a_side(world)
    side.committed(4, 1.0, is_plain=True)
    assert side.proposed(at(4), 9.0) == 8.0
    assert (side.num_answers, side.num_late) == (0, 0)
    side.committed(5, 10.0, is_plain=True)
    side.proposed(at(5), 10.5)
    assert (side.num_answers, side.answer_s) == (1, 0.5)


async def test_a_commit_that_a_dropped_draft_was_told_of_counts_for_no_other(world: World) -> None:
    drafting, side = a_side(world)
    side.committed(4, 1.0, is_plain=True)
    drafting.closed(side.host)
    again = drafting.opened(side.host)
    assert again.proposed(at(9), 9.0) is None
