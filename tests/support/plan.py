"""Fleets with steps of one length, for tests of the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec.plan.inputs.traffic import Arrival
from specdec.plan.simulation.coordinator import CoordinatorSettings
from specdec.plan.simulation.curve import LoadPoint, ReplicaCurve
from specdec.plan.simulation.fleet import Clients, FleetPlan, FleetRun, FleetSimulation
from specdec.plan.simulation.target import TargetSettings


@dataclass(frozen=True)
class Flat:
    """Steps of one length, whatever they hold."""

    step_s: float

    def seconds(self, num_sequences: int, num_rows: int) -> float:
        return self.step_s

    def prompt_seconds(self, num_rows: int, num_sequences: int) -> float:
        return 0.0 if num_sequences else self.step_s


def flat_curve(step_s: float, most_sessions: int = 64, tokens: int = 1) -> ReplicaCurve:
    """Turns of one length, each with `tokens` for each session."""
    shares = np.zeros(tokens - 1)
    turns = np.full(65, step_s)
    return ReplicaCurve(
        [LoadPoint(num, turns, shares, step_s, float(tokens), 0.0, 0.0) for num in sorted({1, most_sessions})]
    )


def flat_plan(step_s: float = 0.02, num_targets: int = 2, **changes: Any) -> FleetPlan:
    """Targets with steps of one length. `changes`: of the plan, its target's or its coordinators' settings."""
    of_target = {name: changes.pop(name) for name in list(changes) if name in TargetSettings.__slots__}
    of_coordinator = {name: changes.pop(name) for name in list(changes) if name in CoordinatorSettings.__slots__}
    curve = of_target.pop("curve", flat_curve(step_s))
    target = {"plain": flat_curve(step_s), "steps": Flat(step_s), "kv_tokens": 1e6, **of_target}
    return FleetPlan(
        num_targets=num_targets,
        num_coordinators=changes.pop("num_coordinators", 2),
        target=TargetSettings(curve=curve, **target),
        coordinator=CoordinatorSettings(**of_coordinator),
        **changes,
    )


def simulated(plan: FleetPlan, arrivals: list[Arrival], seconds: float, *args: Any, seed: int = 1) -> FleetRun:
    """A run of a plan; `args`: events and the tail, as of `FleetSimulation.run`."""
    return FleetSimulation(plan, Clients(), seed).run(arrivals, seconds, *args)
