"""Whether a number of targets holds the objectives, by the figures that a plan shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec.plan.kind import Kind
from specdec.plan.simulation.fleet import FleetRun
from specdec.plan.trial import Figures, Situation, State, Trials

MOST_RUNS = 8
"""Runs of a situation, at most, where its interval crosses an objective."""


@dataclass(slots=True)
class Proofs:
    """Figures by kind, number of targets and situation, each simulated once.

    A situation holds if the worse end of each interval is within its objective. Runs cost less than GPUs, so more are
    made before a number of targets is given up for an interval that crosses an objective.
    """

    trials: Trials
    seeds: Sequence[int]
    tell: Callable[[str], None] = lambda what: None
    _figures: dict[tuple[str, int, Situation], Figures] = field(default_factory=dict)
    _hardest: Situation = State.UNDISTURBED
    """What was missed last: it is looked at first."""

    def figures(self, kind: Kind, num_targets: int, situation: Situation = State.UNDISTURBED) -> Figures:
        """Figures of runs with each seed."""
        key = (kind.placement.label, num_targets, situation)
        if key not in self._figures:
            self._figures[key] = self._measured(kind, num_targets, situation)
        return self._figures[key]

    def missed(self, kind: Kind, num_targets: int) -> str:
        """What is missed, and in which situation; empty: all holds."""
        situations = self.trials.situations(kind, num_targets)
        for situation in sorted(situations, key=lambda each: each is not self._hardest):
            if missed := self.missed_in(situation, kind, num_targets):
                self._hardest = situation
                gone = "" if isinstance(situation, State) else " gone"
                return f"{num_targets} targets, {situation}{gone}: {missed}"
        return ""

    def missed_in(self, situation: Situation, kind: Kind, num_targets: int) -> str:
        """What is missed in a situation; empty: it holds."""
        return self.trials.objectives.missed_by(self.figures(kind, num_targets, situation))

    def _measured(self, kind: Kind, num_targets: int, situation: Situation) -> Figures:
        runs, seeds = list[FleetRun](), list(self.seeds)
        while True:
            seed, num = seeds[len(runs)], len(runs) + 1
            self.tell(f"{kind.placement.label}, {num_targets} targets, {situation}: run {num} of {len(seeds)}")
            run, scale = self.trials.run(kind, num_targets, seed, situation)
            runs.append(run)
            if num < len(seeds):
                continue
            figures = Figures.of(runs, scale)
            if num >= MOST_RUNS or not self.trials.objectives.crossed_by(figures):
                return figures
            seeds.append(max(seeds) + 1)
