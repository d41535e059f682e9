"""Chats over coordinators that each know a part of the targets: who gets their next requests decides what is cached."""

from __future__ import annotations

import dataclasses

from bench.fleet_scale.chats import NUM_TURNS, chats
from specdec.plan.simulation.faults import Loss, Scope
from specdec.plan.simulation.fleet import FleetPlan
from specdec.plan.simulation.tally import RunTally
from tests.support.plan import flat_curve, flat_plan, simulated

NUM_CHATS = 40
PLAN = flat_plan(
    0.5, num_targets=24, num_coordinators=9, num_zones=3, subset_size=4, max_running=1000, max_waiting=1000,
    max_batch_tokens=2048, curve=flat_curve(0.5, tokens=20),
)  # fmt: skip


def run(plan: FleetPlan, popular: float = 0.0, loss: Loss | None = None) -> RunTally:
    arrivals = chats(NUM_CHATS, popular)
    tally = simulated(plan, arrivals, arrivals[-1].at_s, [] if loss is None else [loss], 60.0).tally
    assert (tally.num_ended, tally.num_running) == (NUM_CHATS * NUM_TURNS, 0)
    return tally


def test_requests_of_a_chat_find_what_is_cached_if_they_go_to_one_coordinator() -> None:
    in_turn, by_chat = (run(dataclasses.replace(PLAN, by_chat=by_chat)) for by_chat in (False, True))
    assert by_chat.cached_share > 0.7 > 0.5 > in_turn.cached_share
    assert by_chat.first_token.quantile(0.9) <= in_turn.first_token.quantile(0.9)


def test_chats_with_one_beginning_swamp_no_coordinator() -> None:
    by_chat = run(PLAN, popular=1.0)
    assert by_chat.num_refused_calls == 0
    assert by_chat.cached_share > 0.5


def test_chats_of_lost_coordinators_go_on_at_others_and_are_cached_again() -> None:
    tally = run(PLAN, loss=Loss(scope=Scope.ZONE, at_s=30.0, down_s=1000.0))
    assert not tally.failures and not tally.refusals
    assert tally.cached_share > 0.55, "a third of the chats is computed once more"
