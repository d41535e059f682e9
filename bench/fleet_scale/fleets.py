"""Fleets of a 70B model before, while and after a zone is lost, with all links or subsets: predictions."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import simpy

from specdec.plan.inputs.devices import device_named
from specdec.plan.inputs.models import ModelSizes
from specdec.plan.inputs.step_times import Roofline
from specdec.plan.inputs.traffic import Arrival, Lengths, Rate
from specdec.plan.simulation.coordinator import CoordinatorSettings, SimulatedCoordinator
from specdec.plan.simulation.curve import ReplicaCurve, measure_curve
from specdec.plan.simulation.draft_pool import PoolSettings
from specdec.plan.simulation.faults import Loss, Scope
from specdec.plan.simulation.fleet import Clients, FleetPlan, FleetSimulation
from specdec.plan.simulation.pair import PairSettings, Speculation
from specdec.plan.simulation.tally import TimeCounts
from specdec.plan.simulation.target import TargetSettings

STREAMS = 200
"""Streams of a target with speculation as the deployment has it; 256 is the most."""
MOST_STREAMS = 256
PROMPT, OUTPUT, VARIATION = 500, 1200, 0.5
DRAFTS_PER_TARGET, TARGETS_PER_COORDINATOR = 3, 10
NUM_ZONES = 3
_FEWER = 0.9
"""Share of the drafts above which none counts as lost."""
_OPEN_S = 0.0005
"""Assumed seconds from one opening of a coordinator to the next: 2 ms of a core each, by four processes."""
_WARM_S = 2.0
"""Seconds in which the streams that run at the beginning are opened."""
PHASES = {"calm": (4.0, 7.0), "zone gone": (7.0, 14.0), "zone back": (14.0, 19.0)}
"""Simulated seconds of what is measured. The zone is lost as the second begins, and serves again as the third does."""
TARGET = ModelSizes(name="70B", hidden=8192, intermediate=28672, layers=80, heads=64, kv_heads=8, head_dim=128,
                    vocab=128256, max_len=8192)  # fmt: skip
DRAFT = ModelSizes(name="1B", hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, head_dim=64,
                   vocab=128256, max_len=8192)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figures:
    """What happened in a phase."""

    name: str
    num_streams: int
    first_token_p99_s: float
    inter_token_p99_s: float
    fullest: float
    """Sessions of the fullest target over the mean, at the end."""
    num_moved: int
    """Streams that went on at another target."""
    num_refused: int
    """Calls refused."""
    num_failed: int
    """Requests that failed or were given up."""
    peak: float
    """Most calls in a tenth of a second over their mean before the loss: retries that come together."""


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet to simulate."""

    num_targets: int
    subset_size: int | None
    share: float
    """Load over `STREAMS` streams for each target."""

    @property
    def num_coordinators(self) -> int:
        """Coordinators of the fleet."""
        return max(3, self.num_targets // TARGETS_PER_COORDINATOR)


@dataclass(frozen=True, slots=True)
class Result:
    """A simulated fleet."""

    case: Case
    phases: list[Figures]
    took_s: float
    """Processor time of the simulation."""


class CountedFleet(FleetSimulation):
    """Also notes when calls come."""

    def __init__(self, plan: FleetPlan, clients: Clients, seed: int) -> None:
        super().__init__(plan, clients, seed)
        self.calls_s: list[float] = []

    def _choose(self, request: Arrival) -> SimulatedCoordinator | None:
        self.calls_s.append(float(self.env.now))
        return super()._choose(request)


@dataclass(frozen=True, slots=True)
class Parts:
    """What all fleets are made of."""

    target: TargetSettings
    crowded: ReplicaCurve
    """Of a target while a zone's drafts are gone."""
    per_s: float
    """Requests per second that hold a target at `STREAMS` streams."""

    def curve_at(self, share: float) -> ReplicaCurve:
        """Of a target while a share of the drafts is up."""
        return self.target.curve if share > _FEWER else self.crowded


def parts() -> Parts:
    """Measure the pairs."""
    steps = Roofline(TARGET, device_named("H200"), 4, PROMPT + OUTPUT // 2)
    pair = PairSettings(
        target=steps,
        draft=Roofline(DRAFT, device_named("H100"), 1, PROMPT + OUTPUT // 2),
        acceptance=[0.8, 0.78, 0.76],
        targets_per_draft=1 / DRAFTS_PER_TARGET,
        delay_s=2e-4,
    )
    curve = measure_curve(pair, Speculation.ADAPTIVE, OUTPUT, MOST_STREAMS)
    lost = replace(pair, targets_per_draft=pair.targets_per_draft / (1 - 1 / NUM_ZONES))
    settings = TargetSettings(
        curve=curve,
        plain=measure_curve(pair, Speculation.OFF, OUTPUT, MOST_STREAMS),
        steps=steps,
        kv_tokens=float(steps.kv_tokens),
        max_sessions=MOST_STREAMS,
        max_batch_seqs=MOST_STREAMS,
        max_batch_tokens=2048,
    )
    turn_s = curve.mean(STREAMS, lambda point: point.mean_turn_s)
    tokens = curve.mean(STREAMS, lambda point: point.mean_tokens)
    crowded = measure_curve(lost, Speculation.ADAPTIVE, OUTPUT, MOST_STREAMS)
    return Parts(settings, crowded, STREAMS / (OUTPUT * turn_s / tokens))


def simulate(case: Case, made_of: Parts) -> Result:
    """Run a fleet through all phases."""
    began_s, end_s = time.process_time(), PHASES["zone back"][1]
    plan = FleetPlan(
        num_targets=case.num_targets,
        num_coordinators=case.num_coordinators,
        target=made_of.target,
        coordinator=CoordinatorSettings(
            max_running=round(1.5 * STREAMS * case.num_targets / case.num_coordinators),
            max_waiting=10_000,
            shed_after_s=2.0,
            open_s=_OPEN_S,
        ),
        targets_per_node=2,
        num_zones=NUM_ZONES,
        drafts=PoolSettings(DRAFTS_PER_TARGET * case.num_targets, 8, NUM_ZONES, made_of.curve_at),
        subset_size=case.subset_size,
    )
    traffic = Rate(
        per_s=case.share * made_of.per_s * case.num_targets,
        prompts=Lengths(PROMPT, VARIATION),
        outputs=Lengths(OUTPUT, VARIATION),
    )
    arrivals = [*running(round(case.share * STREAMS * case.num_targets)), *traffic.arrivals(end_s, 1)]
    simulation = CountedFleet(plan, Clients(), 1)
    found: list[Figures] = []
    simulation.env.process(_watch(simulation, found))
    (lost_s, _), (back_s, _) = PHASES["zone gone"], PHASES["zone back"]
    loss = Loss(scope=Scope.ZONE, at_s=lost_s, down_s=back_s - lost_s)
    simulation.run(sorted(arrivals, key=lambda arrival: arrival.at_s), end_s, [loss])
    return Result(case, found, time.process_time() - began_s)


def running(num: int) -> list[Arrival]:
    """Streams that are under way at the beginning: of a random moment, so long ones are more likely."""
    rng = np.random.default_rng(2)
    lengths = Lengths(OUTPUT, VARIATION).draw(rng, 4 * num)
    chosen = rng.choice(lengths, num, p=lengths / lengths.sum())
    left = np.maximum(1, np.ceil(chosen * rng.random(num))).astype(int)
    times_s = rng.uniform(0, _WARM_S, num)
    return [Arrival(float(at), 1, int(tokens)) for at, tokens in zip(times_s, left, strict=True)]


def _watch(simulation: CountedFleet, found: list[Figures]) -> Generator[simpy.Event, Any, None]:
    env, tally = simulation.env, simulation.tally
    mean_calls = 0.0
    env.process(_tell(simulation, len(simulation.targets)))
    for name, (begin_s, end_s) in PHASES.items():
        yield env.timeout(max(0.0, begin_s - env.now))
        tally.first_token, tally.inter_token = TimeCounts(), TimeCounts()
        simulation.calls_s.clear()
        before = _counts(simulation)
        yield env.timeout(end_s - env.now)
        calls, _ = np.histogram(simulation.calls_s, round((end_s - begin_s) * 10), (begin_s, end_s))
        mean_calls = mean_calls or float(calls.mean())
        sessions = [target.num_sessions for target in simulation.targets if target.is_up]
        moved, refused, failed = (after - earlier for after, earlier in zip(_counts(simulation), before, strict=True))
        found.append(
            Figures(
                name=name,
                num_streams=sum(sessions),
                first_token_p99_s=tally.first_token.quantile(0.99),
                inter_token_p99_s=tally.inter_token.quantile(0.99),
                fullest=max(sessions) * len(sessions) / max(1, sum(sessions)),
                num_moved=moved,
                num_refused=refused,
                num_failed=failed,
                peak=float(calls.max()) / max(1.0, mean_calls),
            )
        )


def _tell(simulation: CountedFleet, num_targets: int) -> Generator[simpy.Event, Any, None]:
    while True:
        yield simulation.env.timeout(1.0)
        took_s, tally = time.process_time(), simulation.tally
        told = f"{num_targets} targets: {simulation.env.now:.0f} s simulated, {took_s:.0f} s of processor"
        print(f"{told}, {tally.num_arrived:,} requests, {tally.num_running:,} run", file=sys.stderr, flush=True)


def _counts(simulation: CountedFleet) -> tuple[int, int, int]:
    tally = simulation.tally
    return tally.num_moved, tally.num_refused_calls, sum(tally.failures.values()) + sum(tally.refusals.values())
