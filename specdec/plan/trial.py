"""Trials of a deployment: fleets in simulated time, and whether they hold the objectives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from specdec.coordinator.tenants.quotas import Allowance, QuotaRate
from specdec.plan.deployment import Deployment
from specdec.plan.inputs.traffic import Traffic
from specdec.plan.kind import Kind
from specdec.plan.simulation.coordinator import CoordinatorSettings
from specdec.plan.simulation.faults import Event, Loss, Rollout, Scope
from specdec.plan.simulation.fleet import Clients, FleetPlan, FleetRun, FleetSimulation
from specdec.plan.simulation.tally import Interval

_LEAST_S, _MOST_S = 15.0, 900.0
"""Shortest and longest measured traffic of a trial, in simulated seconds."""
_REQUESTS, _ROUGH_REQUESTS, _LEAST_REQUESTS = 1500, 500, 100
"""Requests of a trial, about: of the result, of the search for it, and at least, however long that takes."""
_MOST_REQUESTS, _MOST_ROUGH_REQUESTS = 6000, 2000
"""Requests of both above which a trial lasts as long as lives on full targets take, not as the objectives allow."""
_WARM_UP = 0.2
"""Traffic before a loss, an update or the measured traffic, over the latter."""
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
_DRAIN_S = 60.0
"""Seconds that a target drains (the chart's `target.drainSeconds`), and that its successor takes to serve."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a deployment must hold, in seconds at the 99th percentile."""

    first_token_s: float
    inter_token_s: float

    def held_by(self, run: FleetRun) -> bool:
        """Whether a run held both, and served its requests."""
        return not self.missed_by(Figures.of([run]))

    def missed_by(self, figures: Figures) -> str:
        """The first objective that is not held, in words: its interval's worse end counts; empty: all are held."""
        for name, found, wanted_s in self._times(figures):
            if found.high > wanted_s:
                return f"{name} {found.text(1e3)} ms"
        return "" if figures.served.low >= _SERVED else f"{figures.served.mean:.1%} served"

    def crossed_by(self, figures: Figures) -> bool:
        """Whether a mean holds whose interval does not, so that more runs may tell; a mean that misses is believed."""
        held = [(found.mean <= wanted_s, found.high <= wanted_s) for _, found, wanted_s in self._times(figures)]
        held.append((figures.served.mean >= _SERVED, figures.served.low >= _SERVED))
        return all(by_mean for by_mean, _ in held) and not all(by_end for _, by_end in held)

    def _times(self, figures: Figures) -> Sequence[tuple[str, Interval, float]]:
        return (
            ("TTFT p99", figures.first_token_p99, self.first_token_s),
            ("ITL p99", figures.inter_token_p99, self.inter_token_s),
        )


class State(StrEnum):
    """What a fleet may be in besides a loss."""

    UNDISTURBED = "undisturbed"
    UPDATE = "rolling update"
    """Targets, and drafts meanwhile, are replaced in place, one after the other, as the chart does."""


Situation = Scope | State


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
        situation: Situation = State.UNDISTURBED,
        factor: float = 1.0,
        *,
        is_rough: bool = False,
    ) -> tuple[FleetRun, float]:
        """Simulate a fleet, or a slice of it; returns the run, and the fleet over the slice.

        A loss is measured from when it is noticed, an update from its beginning. `factor`: the traffic over what was
        asked; `is_rough`: with fewer requests.
        """
        self.num_runs += 1
        simulated = min(num_targets, MOST_SIMULATED)
        share = simulated / num_targets
        traffic = self.traffic.scaled(share * factor)
        seconds = self._seconds(kind, traffic, is_rough=is_rough)
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
            targets_per_node=_per_node(simulated, math.ceil(share * kind.placement.per_node), self.num_zones),
            num_zones=self.num_zones,
            drafts=kind.pool(simulated, self.num_zones, may_lose=bool(self.scopes)),
        )
        wanted = self.objectives
        clients = Clients(first_token_s=wanted.first_token_s, inter_token_s=wanted.inter_token_s)
        from_s, events = _WARM_UP * seconds, list[Event]()
        if situation is State.UPDATE:
            part_s = min(_DRAIN_S, from_s)
            events.append(Rollout(at_s=from_s, drain_s=part_s, start_s=part_s))
        elif isinstance(situation, Scope):
            loss = Loss(scope=situation, at_s=from_s, down_s=_RESTART_S + 2 * seconds)
            events.append(loss)
            from_s = loss.noticed_s
        end_s = from_s + seconds
        simulation = FleetSimulation(plan, clients, seed)
        return simulation.run(traffic.arrivals(end_s, seed), end_s, events, from_s=from_s), 1 / share

    def _seconds(self, kind: Kind, traffic: Traffic, *, is_rough: bool) -> float:
        output = traffic.mean_tokens[1]
        request_s = self.objectives.first_token_s + output * self.objectives.inter_token_s
        num, most = (_ROUGH_REQUESTS, _MOST_ROUGH_REQUESTS) if is_rough else (_REQUESTS, _MOST_REQUESTS)
        seconds = max(_LIVES * request_s, num / traffic.per_s)
        if seconds * traffic.per_s > most:
            full, curve = kind.curve.most_sessions, kind.curve
            token_s = curve.mean(full, lambda p: p.mean_turn_s) / curve.mean(full, lambda p: p.mean_tokens)
            seconds = min(seconds, max(most / traffic.per_s, _LIVES * output * token_s))
        seconds = min(_MOST_S, max(_LEAST_S, seconds))
        return max(seconds, _LEAST_REQUESTS / traffic.per_s)

    def holds(self, kind: Kind, num_targets: int, seed: int) -> bool:
        """Whether a number of targets holds the objectives undisturbed, and with each loss, by rough trials."""
        situations: list[Situation] = [State.UNDISTURBED, *self.scopes_of(kind)]
        for situation in reversed(situations):
            run, _ = self.run(kind, num_targets, seed, situation, is_rough=True)
            if not self.objectives.held_by(run):
                return False
        return True

    def situations(self, kind: Kind, num_targets: int) -> Sequence[Situation]:
        """All in which the objectives must hold: with a loss to bear also an update, which takes a replica away."""
        if not self.scopes:
            return [State.UNDISTURBED]
        return [State.UNDISTURBED, *self.scopes_of(kind), *([State.UPDATE] if num_targets > 1 else [])]

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


def _per_node(num_targets: int, most: int, num_zones: int) -> int:
    """Targets of a node: the chart spreads them over zones and nodes, and so over two nodes at least."""
    in_zone = math.ceil(num_targets / num_zones)
    num_nodes = max(2 if num_zones == 1 else 1, math.ceil(in_zone / most))
    return max(1, math.ceil(in_zone / num_nodes))
