"""A day of a plan whose targets are scaled by the chart's rule: its settings are tried, the best is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.plan.estimate import gap_p99, prompt_s
from specdec.plan.found import Found
from specdec.plan.inputs.traffic import Traffic
from specdec.plan.search import least_targets
from specdec.plan.simulation.autoscaler import ScalingRule
from specdec.plan.simulation.flow import FlowFleet, FlowPlan, FlowRun
from specdec.plan.simulation.tally import Interval
from specdec.plan.trial import Trials

DAY_S = 86_400
_AIMS = (0.5, 0.65, 0.8)
"""Aims that are tried: sessions per target over those up to which it holds the objective between tokens."""
_STABLE_S = (600.0, 1800.0)
"""`scaleDownStabilizationSeconds` that are tried."""
_GOOD = 0.99
"""Share of a day's requests that must come while both objectives hold."""
_MOST_TURNS = 8
"""Turns of the number of targets in a day, beyond which the rule hunts: traffic itself turns twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """A rule, and what a day with it is like."""

    rule: ScalingRule
    good: Interval
    served: Interval
    targets: Interval
    """Targets on average, those that start or drain included."""
    turns: Interval
    """Times that the number of targets turned from more to fewer or back."""
    price: float
    """Dollars per hour of targets and their drafts, on average."""

    @property
    def holds(self) -> bool:
        """Whether the objectives hold for nearly all requests, without hunting."""
        return self.good.mean >= _GOOD and self.turns.mean <= _MOST_TURNS


def days(
    found: Found,
    trials: Trials,
    traffic: Traffic,
    seeds: Sequence[int],
    tell: Callable[[str], None] = lambda what: None,
) -> list[Day]:
    """Days of a plan with each setting of the rule: first those that hold, by price, then the others.

    `traffic`: of a day; the plan is for its peak.
    """
    kind, placement = found.kind, found.kind.placement
    most = found.deployment.num_targets
    load = max((each for each in range(1, kind.curve.most_sessions + 1) if holds_at(found, trials, each)), default=1)
    tried = []
    for aim in _AIMS:
        for stable_s in _STABLE_S:
            tell(f"a day with {aim:.0%} of {load} sessions for each target, {stable_s:g} s until it shrinks")
            rule = ScalingRule(
                min_replicas=min(most, least_targets(trials.scopes)),
                max_replicas=most,
                sessions_per_replica=max(1.0, float(math.floor(aim * load))),
                scale_down_stabilization_s=stable_s,
            )
            plan = FlowPlan(
                curve=kind.curve,
                prompt_s=prompt_s(kind, traffic.mean_tokens[0], load),
                output_tokens=traffic.mean_tokens[1],
                rule=rule,
                places=float(kind.settings().max_sessions),
                kv_sessions=placement.kv_tokens / sum(traffic.mean_tokens),
                first_token_s=trials.objectives.first_token_s,
                most_load=load,
            )
            tried.append(_day(rule, [FlowFleet(plan).run(traffic, DAY_S, seed) for seed in seeds], placement.price))
    return sorted(tried, key=lambda day: (not day.holds, day.price if day.holds else -day.good.mean))


def holds_at(found: Found, trials: Trials, load: int) -> bool:
    """Whether a target with `load` sessions holds the objective between tokens."""
    return gap_p99(found.kind.curve, load) <= trials.objectives.inter_token_s


def _day(rule: ScalingRule, runs: Sequence[FlowRun], price: float) -> Day:
    targets = Interval.of([run.mean_targets for run in runs])
    return Day(
        rule=rule,
        good=Interval.of([run.good_share for run in runs]),
        served=Interval.of([run.served_share for run in runs]),
        targets=targets,
        turns=Interval.of([float(run.turns()) for run in runs]),
        price=targets.mean * price,
    )
