"""The chart's rules for the number of targets, in simulated time."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import yaml

from specdec.plan.inputs.traffic import Lengths, Rate
from specdec.plan.simulation import autoscaler
from specdec.plan.simulation.autoscaler import Autoscaler, ScalingRule
from tests.support.plan import flat_plan, simulated

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
    (step,) = re.findall(r"\{type: Pods, value: 1, periodSeconds: (\d+)\}", template)
    assert float(step) == autoscaler.DOWN_STEP_S


def test_the_most_demanding_trigger_decides_within_a_tolerance() -> None:
    scaler = Autoscaler(ScalingRule(max_replicas=20), None, [])  # type: ignore[arg-type]
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
