"""Fleets in simulated time: what is conserved, what is reproducible, and what queueing theory says."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import simpy

from specdec.plan.inputs.traffic import Arrival, Lengths, Rate
from specdec.plan.simulation.autoscaler import ScalingRule
from specdec.plan.simulation.faults import Loss, Rollout, Scope
from specdec.plan.simulation.fleet import Clients, FleetPlan, FleetSimulation
from specdec.plan.simulation.tally import TimeCounts
from tests.support.plan import flat_plan, simulated

TRAFFIC = Rate(per_s=20.0, prompts=Lengths(100, 0.5), outputs=Lengths(30, 0.5))


def mean_s(times: TimeCounts) -> float:
    return float(np.mean([times.quantile((index + 0.5) / 1000) for index in range(1000)]))


@pytest.mark.parametrize(
    "event",
    [
        None,
        Loss(scope=Scope.REPLICA, at_s=5.0, down_s=5.0),
        Loss(scope=Scope.NODE, at_s=5.0, down_s=8.0),
        Loss(scope=Scope.ZONE, at_s=5.0, down_s=8.0),
        Rollout(at_s=3.0, drain_s=1.0, start_s=1.0),
    ],
)
def test_each_request_ends_once_with_all_its_tokens_whatever_is_lost(event: Loss | Rollout | None) -> None:
    arrivals = TRAFFIC.arrivals(20.0, seed=3)
    plan = flat_plan(num_targets=6, targets_per_node=2, num_zones=3, num_coordinators=3, loss=0.01)
    run = simulated(plan, arrivals, 20.0, [] if event is None else [event], 100.0)
    tally = run.tally
    assert (tally.num_arrived, tally.num_running) == (len(arrivals), 0)
    assert (tally.num_ended, sum(tally.failures.values())) == (len(arrivals), 0)
    assert tally.num_tokens == sum(arrival.output_tokens for arrival in arrivals)
    assert len(tally.first_token) == len(arrivals)
    assert len(tally.first_token) + len(tally.inter_token) >= tally.num_tokens - tally.num_moved
    assert (tally.num_moved > 0) is isinstance(event, Loss)


def test_a_fleet_without_room_refuses_and_counts_every_request_once() -> None:
    arrivals = TRAFFIC.arrivals(20.0, seed=3)
    plan = flat_plan(0.2, num_targets=1, num_coordinators=1, max_running=4, max_waiting=3, queue_timeout_s=2.0)
    tally = simulated(plan, arrivals, 20.0, [], 200.0).tally
    assert tally.num_running == 0
    assert {"OVERLOADED", "QUEUE_TIMEOUT"} >= set(tally.refusals) and sum(tally.refusals.values()) > 100
    assert tally.num_ended + sum(tally.refusals.values()) == len(arrivals)


def test_a_stream_without_a_target_fails_after_the_time_out() -> None:
    loss = Loss(scope=Scope.REPLICA, at_s=1.0, down_s=1000.0)
    run = simulated(flat_plan(num_targets=1), [Arrival(0.5, 10, 10_000)], 100.0, [loss])
    assert dict(run.tally.failures) == {"NO_TARGET": 1}
    assert run.tally.num_running == 0


def test_equal_seeds_give_equal_runs_and_other_seeds_others() -> None:
    plan = flat_plan(num_targets=3, num_coordinators=2, loss=0.05)
    plan = dataclasses.replace(plan, subset_size=2)
    loss = [Loss(scope=Scope.REPLICA, at_s=3.0, down_s=3.0)]

    def figures(seed: int) -> tuple[float, ...]:
        run = simulated(plan, TRAFFIC.arrivals(10.0, seed), 10.0, loss, seed=seed)
        first = run.tally.first_token
        return (run.busy, run.kv_share, first.quantile(0.5), first.quantile(0.99), float(run.tally.num_tokens))

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


@pytest.mark.parametrize("use", [0.5, 0.7])
def test_one_server_with_steps_of_one_length_waits_as_the_m_d_1_queue_does(use: float) -> None:
    """The wait is in the coordinator's own admission queue. The tolerance is four standard errors of such a run."""
    service_s, num = 0.1, 6000
    traffic = Rate(per_s=use / service_s, prompts=Lengths(1), outputs=Lengths(1))
    plan = flat_plan(
        service_s,
        num_targets=1,
        num_coordinators=1,
        max_batch_tokens=1,
        max_sessions=1,
        max_running=1,
        max_waiting=10_000,
        queue_timeout_s=1e6,
        shed_after_s=None,
        hop_s=0.0,
    )
    seconds = num * service_s / use
    run = FleetSimulation(plan, Clients(way_s=0.0), 1).run(traffic.arrivals(seconds, 5), seconds)
    expected_s = use * service_s / (2 * (1 - use))
    assert mean_s(run.tally.queued) == pytest.approx(expected_s, rel=0.12 if use < 0.6 else 0.2)
    assert run.busy == pytest.approx(use, rel=0.05)


def test_prompts_that_share_a_prefix_go_where_it_is_cached() -> None:
    def turns(ids: bool) -> list[Arrival]:
        return [
            Arrival(turn + chat * 0.01, 4096, 4, prefix=tuple(range(chat * 100, chat * 100 + 8)) if ids else ())
            for turn in range(10)
            for chat in range(8)
        ]

    plan = flat_plan(0.05, num_targets=4, num_coordinators=1)
    shared, alone = (simulated(plan, sorted(turns(ids), key=lambda a: a.at_s), 20.0).tally for ids in (True, False))
    assert shared.num_ended == alone.num_ended == 80
    assert mean_s(shared.first_token) < 0.5 * mean_s(alone.first_token)


def test_targets_of_one_core_take_turns_and_one_alone_has_all_of_it() -> None:
    plan = flat_plan(0.1, num_targets=2, num_coordinators=1)
    shared = dataclasses.replace(plan, targets_per_core=2)
    both = [Arrival(0.0, 1, 11), Arrival(0.0, 1, 11)]

    def took_s(plan: FleetPlan, arrivals: list[Arrival]) -> float:
        tally = simulated(plan, arrivals, 30.0).tally
        assert tally.num_ended == len(arrivals)
        return tally.last_end_s

    assert took_s(plan, both) == pytest.approx(1.1, abs=0.02)
    assert took_s(shared, both) == pytest.approx(2.2, abs=0.02)
    assert took_s(shared, both[:1]) == pytest.approx(1.1, abs=0.02)
    # Work is conserved: the second one ends when the work of both is done, whenever it came.
    assert took_s(shared, [both[0], Arrival(0.55, 1, 11)]) == pytest.approx(2.2, abs=0.02)


def test_a_coordinator_begins_requests_in_turn() -> None:
    arrivals = [Arrival(0.0, 1, 1) for _ in range(10)]
    late = simulated(flat_plan(0.01, num_coordinators=1, open_s=0.1), arrivals, 30.0).tally
    assert late.first_token.quantile(0.99) == pytest.approx(1.0, rel=0.05)
    assert simulated(flat_plan(0.01, num_coordinators=1), arrivals, 30.0).tally.first_token.quantile(0.99) < 0.1


DAY = Rate(
    per_s=0.06,
    prompts=Lengths(200, 0.5),
    outputs=Lengths(10, 0.5),
    burstiness=0.2,
    swing=0.8,
    tenants=(("greedy", 19.0), ("polite", 1.0)),
)


def test_a_day_of_bursty_traffic_is_served_with_goodput_and_shares() -> None:
    """The polite tenant, with a twentieth of the requests, loses none to the greedy one's bursts."""
    arrivals = DAY.arrivals(86_400.0, seed=11)
    offered = {name: sum(a.output_tokens for a in arrivals if a.tenant == name) for name in ("greedy", "polite")}
    # A server for two at once: at the peak there is more work than it can do.
    plan = flat_plan(
        2.0, num_targets=1, num_coordinators=1, max_batch_seqs=2, max_running=2, max_waiting=8, queue_timeout_s=120.0
    )
    clients = Clients(first_token_s=60.0, inter_token_s=4.0, retries=0)
    tally = FleetSimulation(plan, clients, 1).run(arrivals, 86_400.0, [], 600.0).tally
    nameless = [dataclasses.replace(arrival, tenant="") for arrival in arrivals]
    crowd = FleetSimulation(plan, clients, 1).run(nameless, 86_400.0, [], 600.0).tally
    assert tally.num_running == 0
    assert sum(tally.refusals.values()) > 0.02 * len(arrivals), "the day is no test without bursts above the capacity"
    assert tally.tokens_of["polite"] >= 0.99 * offered["polite"]
    assert tally.tokens_of["greedy"] < 0.98 * offered["greedy"]
    assert crowd.num_ended < 0.98 * len(arrivals)
    assert tally.num_good >= 0.6 * len(arrivals)


def test_a_day_with_the_charts_autoscaling_is_served_with_fewer_targets() -> None:
    """The same bursts, and a fleet that follows them: nobody is refused, and fewer targets are enough."""
    arrivals = DAY.arrivals(86_400.0, seed=11)
    offered = {name: sum(a.output_tokens for a in arrivals if a.tenant == name) for name in ("greedy", "polite")}
    rule = ScalingRule(min_replicas=1, max_replicas=4, sessions_per_replica=2.0)
    plan = flat_plan(2.0, num_targets=4, num_coordinators=1, max_batch_seqs=2, max_running=8, max_waiting=64,
                     max_sessions=2, queue_timeout_s=300.0, scaling=rule)  # fmt: skip
    clients = Clients(first_token_s=120.0, inter_token_s=4.0, retries=0)
    run = FleetSimulation(plan, clients, 1).run(arrivals, 86_400.0, [], 600.0)
    tally, ends = run.tally, [*(at_s for at_s, _ in run.sizes[1:]), 86_400.0]
    mean_size = sum((end - at_s) * size for (at_s, size), end in zip(run.sizes, ends, strict=True)) / 86_400
    assert (tally.num_running, sum(tally.failures.values())) == (0, 0)
    assert tally.tokens_of["polite"] >= 0.99 * offered["polite"]
    assert tally.tokens_of["greedy"] >= 0.99 * offered["greedy"]
    assert tally.num_good >= 0.95 * len(arrivals)
    assert mean_size <= 3.3


def test_a_zone_lost_at_a_thousand_targets_costs_no_stream_and_little_time() -> None:
    """Coordinators with subsets of 64 targets; the zone is away for longer than the registry remembers it."""
    lost_s, back_s = 5.0, 27.0
    traffic = Rate(per_s=50.0, prompts=Lengths(50), outputs=Lengths(20))
    arrivals = traffic.arrivals(35.0, seed=5)
    loss = Loss(scope=Scope.ZONE, at_s=lost_s, down_s=back_s - lost_s)
    plan = flat_plan(0.5, num_targets=1000, num_coordinators=30, targets_per_node=2, num_zones=3, subset_size=64)
    simulation = FleetSimulation(plan, Clients(), 1)
    before: dict[str, float] = {}

    def note() -> Generator[simpy.Event, Any, None]:
        yield simulation.env.timeout(back_s)
        before.update({target.name: target.busy_s for target in simulation.targets})

    simulation.env.process(note())
    tally = simulation.run(arrivals, 35.0, [loss], 25.0).tally
    assert (tally.num_ended, tally.num_running, sum(tally.failures.values())) == (len(arrivals), 0, 0)
    assert tally.num_tokens == sum(arrival.output_tokens for arrival in arrivals)
    num_in_zone = 50.0 * lost_s / 3
    assert 0.5 * num_in_zone < tally.num_moved < 3 * num_in_zone, "streams of the zone, and few twice"
    # Who was cut off goes on after a node's silence, a client's wait and a step or two.
    assert tally.inter_token.share_above(0.6) < 3 * num_in_zone / tally.num_tokens
    assert tally.inter_token.quantile(1.0) < 5.0 + 2.0 + 3 * 0.5
    assert tally.first_token.quantile(0.99) < 5.0 + 2.0 + 3 * 0.5
    back = [target for target in simulation.targets if target.generation]
    assert len(back) == pytest.approx(333, abs=2)
    assert np.mean([target.busy_s > before[target.name] for target in back]) > 0.2, "the zone is used again"
