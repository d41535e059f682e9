"""The chart's rules for the number of targets, in simulated time."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import simpy
import yaml

from specdec.plan.inputs.traffic import Arrival, Lengths, Rate
from specdec.plan.simulation import autoscaler
from specdec.plan.simulation.autoscaler import Autoscaler, ScalingRule
from specdec.plan.simulation.curve import LoadPoint, ReplicaCurve
from specdec.plan.simulation.fleet import Clients, FleetSimulation
from specdec.plan.simulation.flow import FlowFleet, FlowPlan, FlowRun
from tests.support.plan import flat_curve, flat_plan, simulated

CHART = Path(__file__).parents[3] / "helm" / "specdec"


def test_the_rules_are_the_charts() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())["target"]["autoscaling"]
    rule = ScalingRule()
    assert (rule.min_replicas, rule.max_replicas) == (values["minReplicas"], values["maxReplicas"])
    assert rule.sessions_per_replica == values["sessionsPerReplica"]
    assert rule.kv_use_percent == values["kvUsePercent"]
    assert rule.scale_down_stabilization_s == values["scaleDownStabilizationSeconds"]
    template = (CHART / "templates" / "scaledobjects.yaml").read_text()
    assert f"pollingInterval: {autoscaler.POLL_S:.0f}" in template
    steps = re.findall(r"\{type: (Pods|Percent), value: (\d+), periodSeconds: (\d+)\}", template)
    assert [(kind, int(value)) for kind, value, _ in steps] == [
        ("Pods", autoscaler.DOWN_PODS),
        ("Percent", autoscaler.DOWN_PERCENT),
    ]
    assert {float(period_s) for *_, period_s in steps} == {autoscaler.DOWN_STEP_S}


def test_the_most_demanding_trigger_decides_within_a_tolerance() -> None:
    scaler = Autoscaler(ScalingRule(max_replicas=20), simpy.Environment(), [], lambda: (0.0, 0.0))
    assert scaler.advised(4, 128, 100.0) == 4
    assert scaler.advised(4, 139, 100.0) == 4, "a tenth more changes nothing"
    assert scaler.advised(4, 160, 100.0) == 5
    assert scaler.advised(4, 10, 400.0) == 5
    assert scaler.advised(4, 0, 0.0) == 1
    assert scaler.advised(4, 10_000, 0.0) == 20


def test_targets_come_with_the_load_and_go_one_by_one_after_it() -> None:
    rule = ScalingRule(max_replicas=6, scale_down_stabilization_s=300.0, start_s=60.0)
    peak = Rate(per_s=16.0, prompts=Lengths(10), outputs=Lengths(40))
    calm = Rate(per_s=0.2, prompts=Lengths(10), outputs=Lengths(40))
    arrivals = list(peak.arrivals(300.0, 1))
    arrivals += [type(a)(a.at_s + 300.0, a.prompt_tokens, a.output_tokens) for a in calm.arrivals(1500.0, 2)]
    plan = flat_plan(0.2, num_targets=6, scaling=rule, max_running=1000, max_waiting=10_000)
    run = simulated(plan, arrivals, 1800.0, [], 100.0)
    sizes = [size for _, size in run.sizes]
    assert sizes[0] == 1
    assert max(sizes) == 6
    assert sizes[-1] < 3
    downs = [at for (at, size), (_, before) in zip(run.sizes[1:], run.sizes, strict=False) if size < before]
    assert all(later - earlier >= 120.0 for earlier, later in itertools.pairwise(downs))
    assert min(at for at, size in run.sizes if at > 100.0 and size < 5) >= 300.0 + 300.0 - 15.0
    assert run.tally.num_running == 0
    assert set(run.tally.failures) <= {"NO_TARGET"}, "one target cannot take the first minute's requests"
    assert run.tally.num_ended > 0.95 * len(arrivals)


def test_a_target_that_is_given_up_before_it_serves_never_does() -> None:
    rule = ScalingRule(max_replicas=3, scale_down_stabilization_s=15.0, start_s=300.0)
    burst = [Arrival(1.0 + number / 100, 10, 200) for number in range(90)]
    plan = flat_plan(0.1, num_targets=3, scaling=rule, max_running=1000, max_waiting=10_000)
    simulation = FleetSimulation(plan, Clients(), 1)
    run = simulation.run(burst, 900.0, [], 0.0)
    assert [size for _, size in run.sizes] == [1, 3, 2, 1], "more were ordered, and given up before they served"
    assert [target.is_up for target in simulation.targets] == [True, False, False]
    assert not any(target.busy_s for target in simulation.targets[1:])


def test_requests_that_wait_at_coordinators_bring_targets() -> None:
    """The coordinator lets fewer sessions run than the rule wants on one target."""
    rule = ScalingRule(max_replicas=4, start_s=30.0)
    traffic = Rate(per_s=6.0, prompts=Lengths(10), outputs=Lengths(40))
    plan = flat_plan(0.2, num_targets=4, num_coordinators=1, scaling=rule, max_running=24, max_waiting=10_000)
    run = simulated(plan, traffic.arrivals(300.0, 1), 300.0, [], 200.0)
    assert max(size for _, size in run.sizes) > 1


def day(rule: ScalingRule, per_s: float, *, swing: float = 0.6, hours: float = 48.0) -> FlowRun:
    """Two days of traffic; steps become longer with the sessions, as those of a GPU do."""
    loads = [1, 8, 16, 32, 64]
    points = [
        LoadPoint(load, np.full(65, 0.03 + 0.001 * load), np.empty(0), 0.03 + 0.001 * load, 1.0, 0.0, 0.0)
        for load in loads
    ]
    plan = FlowPlan(
        curve=ReplicaCurve(points),
        prompt_s=0.02,
        output_tokens=300.0,
        rule=rule,
        places=64.0,
        kv_sessions=200.0,
        first_token_s=2.0,
        most_load=48.0,
    )
    traffic = Rate(per_s=per_s, prompts=Lengths(500), outputs=Lengths(300), burstiness=0.5, swing=swing)
    return FlowFleet(plan).run(traffic, round(hours * 3600), 1)


def test_a_flow_agrees_with_the_fleet_that_is_simulated_step_by_step() -> None:
    rule = ScalingRule(max_replicas=6, scale_down_stabilization_s=300.0, start_s=60.0, sessions_per_replica=16.0)
    traffic = Rate(per_s=1.2, prompts=Lengths(10), outputs=Lengths(200), swing=0.7, swing_s=2400.0)
    curve, seconds = flat_curve(0.2), 2400
    plan = flat_plan(0.2, num_targets=6, scaling=rule, max_running=1000, max_waiting=10_000, max_sessions=64)
    steps = simulated(plan, traffic.arrivals(seconds, 1), seconds)
    ends = [*(at_s for at_s, _ in steps.sizes[1:]), seconds]
    whole = sum(size * (end_s - at_s) for (at_s, size), end_s in zip(steps.sizes, ends, strict=True))
    flow = FlowPlan(curve=curve, prompt_s=0.0, output_tokens=200.0, rule=rule, places=64.0, kv_sessions=1e6)
    run = FlowFleet(flow).run(traffic, seconds, 1)
    assert run.mean_targets == pytest.approx(whole / seconds, rel=0.1)
    assert max(size for _, size in run.sizes) == pytest.approx(max(size for _, size in steps.sizes), abs=1)
    assert run.served_share == steps.tally.served_share == 1.0


def test_a_thousand_targets_follow_a_day_both_ways() -> None:
    """With one pod in two minutes alone, as the rule was, a fleet never becomes smaller than half of its peak."""
    rule = ScalingRule(min_replicas=50, max_replicas=1000, sessions_per_replica=32.0)
    run = day(rule, 1_000.0)
    second = [size for at_s, size in run.sizes if at_s > 86_400]
    assert max(second) > 3 * min(second)
    assert run.good_share > 0.999
    assert run.turns(86_400) <= 4
    assert run.mean_targets < 0.7 * max(second)


def test_a_small_fleet_under_steady_load_hunts_less_than_once_in_half_an_hour() -> None:
    """Sessions become slower on fewer targets, so that one too few is seen only once it is gone."""

    def worst(rule: ScalingRule) -> int:
        return max(day(rule, 1.2 + 0.2 * number, swing=0.0, hours=6.0).turns(3600) for number in range(4))

    assert worst(ScalingRule(max_replicas=8)) <= 2 * 5 * 3600 / 1800
    assert worst(ScalingRule(max_replicas=8, scale_down_stabilization_s=600.0)) > 25, "as the chart's default was"
