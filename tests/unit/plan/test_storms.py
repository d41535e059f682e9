"""Crowds that fail or are refused together must not return together."""

from __future__ import annotations

import numpy as np
import pytest

from bench.fleet_scale.fleets import CountedFleet
from specdec.plan.inputs.traffic import Arrival
from specdec.plan.simulation.faults import Loss, Scope
from specdec.plan.simulation.fleet import Clients
from tests.support.plan import flat_plan


def test_clients_that_were_refused_together_do_not_come_back_together() -> None:
    """A crowd beyond all places: told one wait, it returned as one, and most of it was refused again."""
    plan = flat_plan(0.02, num_targets=4, num_coordinators=2, max_running=64, max_waiting=64)
    crowd = [Arrival(1.0, 10, 60) for _ in range(2000)]
    simulation = CountedFleet(plan, Clients(retries=3), 1)
    assert simulation.run(crowd, 10.0, [], 60.0).tally.num_running == 0
    counts, _ = np.histogram([at_s for at_s in simulation.calls_s if at_s > 1.01], bins=np.arange(1.0, 40.0, 0.1))
    assert max(counts) < 600, "of some 1,750 that were refused at once"


def test_streams_of_a_lost_zone_of_coordinators_come_back_evenly() -> None:
    """A third of all streams; the mean of a tenth of a second is what they are over two seconds."""

    plan = flat_plan(
        0.5, num_targets=60, num_coordinators=6, num_zones=3, max_running=4000, max_waiting=4000, max_sessions=256
    )
    streams = [Arrival(0.001 * number, 1, 200) for number in range(3000)]
    loss = Loss(scope=Scope.ZONE, at_s=10.0, down_s=1000.0)
    simulation = CountedFleet(plan, Clients(), 1)
    tally = simulation.run(streams, 60.0, [loss], 200.0).tally
    assert (tally.num_ended, sum(tally.failures.values())) == (3000, 0)
    back, _ = np.histogram([at_s for at_s in simulation.calls_s if at_s > 14.0], bins=np.arange(14.0, 20.0, 0.1))
    assert sum(back) == pytest.approx(1000, abs=60)
    assert max(back) < 2 * 1000 / 20, "10 times as many before the first wait had room"
