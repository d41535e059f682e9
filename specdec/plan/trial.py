"""Trials of a deployment: fleets in simulated time, and whether they hold the objectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specdec.coordinator.tenants.quotas import Allowance, QuotaRate
from specdec.plan.deployment import BATCH_TOKENS, MOST_BATCH, Deployment, Placement, num_drafts
from specdec.plan.inputs.traffic import Traffic
from specdec.plan.simulation.coordinator import CoordinatorSettings
from specdec.plan.simulation.curve import ReplicaCurve
from specdec.plan.simulation.draft_pool import PoolSettings
from specdec.plan.simulation.faults import Event, Loss, Rollout, Scope
from specdec.plan.simulation.fleet import Clients, FleetPlan, FleetRun, FleetSimulation
from specdec.plan.simulation.tally import Interval
from specdec.plan.simulation.target import TargetSettings

_LEAST_S, _MOST_S = 15.0, 900.0
"""Shortest and longest traffic of a trial, in simulated seconds."""
_REQUESTS, _ROUGH_REQUESTS = 1500, 500
"""Requests of a trial, about: of the result, and of the search for it."""
MOST_SIMULATED = 32
"""Targets that a trial simulates: a larger fleet is judged by such a slice of it, with its share of the traffic."""
_PLACES = 1.25
"""Places of all coordinators over what the targets hold: requests wait at the coordinators."""
_LIVES = 3
"""Lives of a request that a trial lasts at least, where each is as slow as the objectives allow."""
_SERVED = 0.995
"""Share of the requests that must end well."""
_RESTART_S = 120.0
"""Seconds until a lost part serves again: longer than a trial looks, so that it must do without."""

_DRAFT_PARTS = 12
"""Parts in which the share of drafts that are up is rounded down: each takes a curve."""
_DRAIN_S = 60.0
"""Seconds that a target drains (the chart's `target.drainSeconds`), and that its successor takes to serve."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a deployment must hold, in seconds at the 99th percentile."""

    first_token_s: float
    inter_token_s: float

    def held_by(self, run: FleetRun) -> bool:
        """Whether a run held both, and served its requests."""
        tally = run.tally
        return (
            tally.served_share >= _SERVED
            and tally.first_token.quantile(0.99) <= self.first_token_s
            and tally.inter_token.quantile(0.99) <= self.inter_token_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A placement with its curves."""

    placement: Placement
    curve: ReplicaCurve
    plain: ReplicaCurve
    crowded: Callable[[float], ReplicaCurve] | None = None
    """Curve while this share of the drafts is up; None: targets have no drafts on other devices."""

    def curve_at(self, share: float) -> ReplicaCurve:
        """What a target does while a share of the drafts, above 0, is up."""
        if self.crowded is None or share >= 1:
            return self.curve
        return self.crowded(max(1, math.floor(share * _DRAFT_PARTS)) / _DRAFT_PARTS)

    def pool(self, num_targets: int, num_zones: int, *, may_lose: bool) -> PoolSettings | None:
        """The drafts of a number of targets; None: they have none on other devices."""
        device = self.placement.draft_device
        if device is None:
            return None
        num = num_drafts(self.placement, num_targets, may_lose=may_lose)
        per_node = min(device.per_node, math.ceil(num / max(2, num_zones)))  # the chart spreads pods over nodes
        return PoolSettings(num, per_node, num_zones, self.curve_at)

    def settings(self) -> TargetSettings:
        """Settings of a target of this kind."""
        return TargetSettings(
            curve=self.curve,
            plain=self.plain,
            steps=self.placement.steps,
            kv_tokens=self.placement.kv_tokens,
            max_batch_seqs=min(MOST_BATCH, self.curve.most_sessions),
            max_batch_tokens=BATCH_TOKENS["gpu" if self.placement.device.flops else "cpu"],
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of runs with other seeds, each with its confidence interval. Times in seconds."""

    first_token_p50: Interval
    first_token_p99: Interval
    inter_token_p50: Interval
    inter_token_p99: Interval
    served: Interval
    tokens_per_s: Interval
    goodput: Interval
    """Requests per second within both objectives."""
    busy: Interval
    kv_share: Interval
    sessions: Interval
    tenants: Mapping[str, tuple[Interval, Interval]]
    """Output tokens per second, and refused requests per second, by tenant."""

    @classmethod
    def of(cls, runs: Sequence[FleetRun], scale: float = 1.0) -> Figures:
        """`scale`: the fleet over its simulated slice."""

        def over(values: Sequence[float]) -> Interval:
            return Interval.of(values)

        return cls(
            first_token_p50=over([run.tally.first_token.quantile(0.5) for run in runs]),
            first_token_p99=over([run.tally.first_token.quantile(0.99) for run in runs]),
            inter_token_p50=over([run.tally.inter_token.quantile(0.5) for run in runs]),
            inter_token_p99=over([run.tally.inter_token.quantile(0.99) for run in runs]),
            served=over([run.tally.served_share for run in runs]),
            tokens_per_s=over([scale * run.tally.num_tokens / run.seconds for run in runs]),
            goodput=over([scale * run.tally.num_good / run.seconds for run in runs]),
            busy=over([run.busy for run in runs]),
            kv_share=over([run.kv_share for run in runs]),
            sessions=over([scale * run.mean_sessions for run in runs]),
            tenants={
                tenant: (
                    over([scale * run.tally.tokens_of[tenant] / run.seconds for run in runs]),
                    over([scale * run.tally.refused_of[tenant] / run.seconds for run in runs]),
                )
                for tenant in sorted({name for run in runs for name in run.tally.tokens_of | run.tally.refused_of})
            },
        )


@dataclass(slots=True)
class Trials:
    """Runs fleets of one traffic."""

    traffic: Traffic
    objectives: Objectives
    num_zones: int
    scopes: Sequence[Scope]
    """Losses that a deployment must bear, each alone; those of targets include those of drafts."""
    hop_s: float = 0.0005
    loss: float = 0.0
    allowances: Mapping[str, Allowance] = field(default_factory=dict)
    """Quotas and weights by tenant."""
    num_runs: int = field(default=0)
    """Fleets simulated so far."""

    def run(
        self,
        kind: Kind,
        num_targets: int,
        seed: int,
        scope: Scope | None = None,
        factor: float = 1.0,
        *,
        is_rough: bool = False,
        is_rolled: bool = False,
    ) -> tuple[FleetRun, float]:
        """Simulate a fleet, or a slice of it; returns the run, and the fleet over the slice.

        `factor`: the traffic over what was asked; `is_rough`: with fewer requests; `is_rolled`: meanwhile targets are
        replaced one after the other.
        """
        self.num_runs += 1
        simulated = min(num_targets, MOST_SIMULATED)
        share = simulated / num_targets
        traffic = self.traffic.scaled(share * factor)
        request_s = self.objectives.first_token_s + traffic.mean_tokens[1] * self.objectives.inter_token_s
        seconds = min(
            _MOST_S, max(_LEAST_S, _LIVES * request_s, (_ROUGH_REQUESTS if is_rough else _REQUESTS) / traffic.per_s)
        )
        most = simulated * kind.settings().max_sessions
        num_coordinators = 2 if simulated > 1 else 1
        plan = FleetPlan(
            num_targets=simulated,
            num_coordinators=num_coordinators,
            target=kind.settings(),
            coordinator=CoordinatorSettings(
                max_running=max(1, round(_PLACES * most / num_coordinators)),
                max_waiting=max(256, most),
                hop_s=self.hop_s,
                loss=self.loss,
                allowances=self.allowances if share == 1 else _shares(self.allowances, share),
            ),
            targets_per_node=kind.placement.per_node,
            num_zones=self.num_zones,
            drafts=kind.pool(simulated, self.num_zones, may_lose=bool(self.scopes)),
        )
        wanted = self.objectives
        clients = Clients(first_token_s=wanted.first_token_s, inter_token_s=wanted.inter_token_s)
        events: list[Event] = []
        if scope is not None:
            events.append(Loss(scope=scope, at_s=seconds / 5, down_s=_RESTART_S + seconds))
        if is_rolled:
            part_s = min(_DRAIN_S, seconds / 5)
            events.append(Rollout(at_s=part_s, drain_s=part_s, start_s=part_s))
        simulation = FleetSimulation(plan, clients, seed)
        return simulation.run(traffic.arrivals(seconds, seed), seconds, events), 1 / share

    def holds(self, kind: Kind, num_targets: int, seed: int) -> bool:
        """Whether a number of targets holds the objectives undisturbed, and with each loss."""
        for scope in (None, *self.scopes_of(kind)):
            run, _ = self.run(kind, num_targets, seed, scope, is_rough=True)
            if not self.objectives.held_by(run):
                return False
        return True

    def scopes_of(self, kind: Kind) -> Sequence[Scope]:
        """The losses that a kind can have."""
        if kind.placement.draft_device is None:
            return self.scopes
        also = {Scope.REPLICA: Scope.DRAFT, Scope.NODE: Scope.DRAFT_NODE}
        return [each for scope in self.scopes for each in (scope, also.get(scope)) if each is not None]

    def deployment(self, kind: Kind, num_targets: int, figures: Figures) -> Deployment:
        """The services that a number of targets needs."""
        each = max(1, round(figures.sessions.mean / num_targets))
        return Deployment(
            placement=kind.placement,
            num_targets=num_targets,
            num_zones=self.num_zones,
            sessions=figures.sessions.mean,
            turn_s=kind.curve.mean(each, lambda point: point.mean_turn_s),
            tokens_per_s=figures.tokens_per_s.mean,
            spare=1 if self.scopes else 0,
        )


def _shares(allowances: Mapping[str, Allowance], share: float) -> dict[str, Allowance]:
    """What a slice of a fleet has of the quotas."""
    return {
        tenant: allowance
        if allowance.quota is None
        else replace(
            allowance,
            quota=QuotaRate(allowance.quota.tokens_per_s * share, max(1.0, allowance.quota.burst_tokens * share)),
        )
        for tenant, allowance in allowances.items()
    }
