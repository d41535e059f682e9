"""Drafts that are lost in a fleet: no stream ends, and targets decode plainly where no other draft can follow."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import simpy

from specdec.plan.inputs.traffic import Arrival
from specdec.plan.simulation.curve import ReplicaCurve
from specdec.plan.simulation.draft_pool import PoolSettings
from specdec.plan.simulation.faults import Loss, Rollout, Scope
from specdec.plan.simulation.fleet import Clients, FleetSimulation
from tests.support.plan import flat_curve, flat_plan, simulated

DRAFTED, PLAIN_TURN_S = flat_curve(0.03, tokens=3), 0.02
"""Three tokens, or one, a turn; what a curve of three says of shares is that all sessions commit three."""


@pytest.mark.parametrize(
    ("scope", "num_left", "silent_s"),
    [(Scope.DRAFT, 5, 0.0), (Scope.DRAFT_NODE, 4, 2.0), (Scope.ZONE, 4, 2.0), (Scope.REPLICA, 6, 0.0)],
)
def test_targets_decode_plainly_for_sessions_of_lost_drafts_until_others_have_them(
    scope: Scope, num_left: int, silent_s: float
) -> None:
    asked: list[float] = []

    def curve_at(share: float) -> ReplicaCurve:
        asked.append(share)
        return DRAFTED

    drafts = PoolSettings(num=6, per_node=2, num_zones=3, curve_at=curve_at)
    plan = flat_plan(0.02, num_targets=3, num_coordinators=3, num_zones=3, drafts=drafts, max_running=1000)
    simulation = FleetSimulation(plan, Clients(), 1)
    seen: dict[str, float] = {}

    def look() -> Generator[simpy.Event, Any, None]:
        pool = simulation.drafts
        assert pool is not None
        for name, at_s in (("before", 4.9), ("lost", 5.1), ("taken up", 5.6 + silent_s), ("back", 15.1)):
            yield simulation.env.timeout(at_s - simulation.env.now)
            seen[name] = pool.plain_share

    simulation.env.process(look())
    arrivals = [Arrival(0.1, 10, 2000) for _ in range(60)]
    run = simulation.run(arrivals, 20.0, [Loss(scope=scope, at_s=5.0, down_s=10.0)], 200.0)
    lost = 1 - num_left / 6
    assert seen == {"before": 0.0, "lost": pytest.approx(lost), "taken up": 0.0, "back": 0.0}
    assert asked[0] == asked[-1] == 1.0
    assert num_left == 6 or asked[1] == pytest.approx(num_left / 6)
    assert run.tally.num_ended == 60, "and nothing is lost"


def test_without_any_draft_a_fleet_is_as_fast_as_without_speculation() -> None:
    drafts = PoolSettings(num=2, per_node=2, num_zones=1, curve_at=lambda share: DRAFTED)
    arrivals = [Arrival(0.1, 10, 1000) for _ in range(10)]

    def took_s(drafts: PoolSettings | None, events: list[Loss]) -> float:
        plan = flat_plan(PLAIN_TURN_S, num_targets=1, num_coordinators=1, drafts=drafts)
        return simulated(plan, arrivals, 1.0, events, 200.0).tally.last_end_s

    lost = [Loss(scope=Scope.DRAFT_NODE, at_s=0.0, down_s=1000.0)]
    assert took_s(drafts, lost) == pytest.approx(took_s(None, []), rel=0.01)
    assert took_s(drafts, []) < 0.6 * took_s(drafts, lost)


def test_an_update_replaces_drafts_beside_targets() -> None:
    """One of two is away at a time: the other has its sessions; the only one is missed by all."""
    asked: list[float] = []

    def curve_at(share: float) -> ReplicaCurve:
        asked.append(share)
        return DRAFTED

    arrivals = [Arrival(0.1, 10, 1000) for _ in range(10)]
    for num, wanted in ((2, [1.0, 0.5, 1.0, 0.5, 1.0]), (1, [1.0, 1.0])):
        asked.clear()
        drafts = PoolSettings(num=num, per_node=1, num_zones=1, curve_at=curve_at)
        plan = flat_plan(PLAIN_TURN_S, num_targets=3, drafts=drafts)
        run = simulated(plan, arrivals, 1.0, [Rollout(at_s=1.0, drain_s=2.0, start_s=2.0)], 200.0)
        assert asked == wanted
        assert run.tally.num_ended == 10
