"""The simulator's figures for the requests of real runs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from bench.calibration.inputs import Inputs
from bench.calibration.real import MOST_AT_ONCE, RealRun, Setup
from specdec.plan.inputs.traffic import Arrival
from specdec.plan.simulation.coordinator import CoordinatorSettings
from specdec.plan.simulation.curve import ReplicaCurve, measure_curve
from specdec.plan.simulation.fleet import Clients, FleetPlan, FleetSimulation
from specdec.plan.simulation.pair import PairSettings, Speculation
from specdec.plan.simulation.tally import TimeCounts
from specdec.plan.simulation.target import TargetSettings

SEEDS = (1, 2, 3)
_LINK_S = 0.0004
"""Between target and draft of one machine, one way, as `bench.round` finds it."""
_TAIL_S = 300.0
_KV_TOKENS = 1e6


@dataclass(slots=True)
class Simulator:
    """Predicts runs of one pair; curves are kept."""

    inputs: Inputs
    max_tokens: int
    _curves: dict[tuple[str, Speculation], ReplicaCurve] = field(default_factory=dict)

    def figures(self, setup: Setup, run: RealRun) -> list[float]:
        """The figures of `RealRun.figures`, over all parts and seeds."""
        speculation = Speculation(run.speculation)
        prompt = statistics.fmean(tokens for part in run.parts for _, tokens, _ in part)
        plan = FleetPlan(
            num_targets=setup.num_targets,
            num_coordinators=1,
            target=TargetSettings(
                curve=self._curve(setup, speculation, prompt),
                plain=self._curve(setup, Speculation.OFF, prompt),
                steps=self.inputs.target,
                kv_tokens=_KV_TOKENS,
            ),
            coordinator=CoordinatorSettings(hop_s=0.0, open_s=self.inputs.open_s),
            targets_per_core=setup.num_targets,
        )
        # Of the way of a request for one token, `open_s` is the coordinator's.
        clients = Clients(way_s=max(0.0, self.inputs.way_s - self.inputs.open_s) / 2)
        first, between = TimeCounts(), TimeCounts()
        num_tokens, took_s = 0, 0.0
        for part in run.parts:
            arrivals = [Arrival(*request) for request in part]
            for seed in SEEDS:
                tally = FleetSimulation(plan, clients, seed).run(arrivals, arrivals[-1].at_s + 1.0, [], _TAIL_S).tally
                first.merge(tally.first_token)
                between.merge(tally.inter_token)
                num_tokens += tally.num_tokens
                took_s += tally.last_end_s
        times_s = [times.quantile(share) for times in (first, between) for share in (0.5, 0.99)]
        return [num_tokens / max(took_s, 1e-9), *times_s]

    def _curve(self, setup: Setup, speculation: Speculation, prompt: float) -> ReplicaCurve:
        key = (setup.name, speculation)
        if key not in self._curves:
            pair = PairSettings(
                target=self.inputs.target,
                draft=self.inputs.draft,
                acceptance=self.inputs.acceptance,
                targets_per_draft=setup.num_targets,
                delay_s=_LINK_S + setup.delay_s,
                prompt_tokens=prompt,
                verdict_s=self.inputs.verdict_s,
            )
            self._curves[key] = measure_curve(pair, speculation, self.max_tokens, MOST_AT_ONCE)
        return self._curves[key]
