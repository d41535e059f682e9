"""Predicted beside measured figures, and whether they agree."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.calibration.inputs import Inputs, measure_engines, measure_services
from bench.calibration.predicted import Simulator
from bench.calibration.real import SETUPS, RealRun, deployed, real_runs
from bench.plan import BenchPlan
from specdec.commands.measuring.progress import Progress
from specdec.commands.measuring.report import Report
from specdec.commands.measuring.tables import Table

FIGURES = ("tokens/s", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms")
BOUNDS = (0.10, 0.20, 0.20, 0.20, 0.20)
"""Wanted agreement."""
_UNITS = (1.0, 1e3, 1e3, 1e3, 1e3)


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of one run."""

    setup: str
    load: str
    speculation: str
    figure: str
    predicted: float
    measured: float
    bound: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured if self.measured else 1.0

    @property
    def is_within(self) -> bool:
        """Whether they agree as well as is wanted."""
        return abs(self.ratio - 1) <= self.bound


def run(plan: BenchPlan, report: Report, progress: Progress) -> None:
    """Measure the inputs, run every setup at every load, predict, and compare."""
    progress.part("calibration")
    measured = measure_engines(plan, progress)
    inputs, runs = None, list[RealRun]()
    for setup in SETUPS:
        with deployed(setup, plan, progress) as cluster:
            inputs = inputs or measure_services(cluster, plan, measured, progress)
            runs += real_runs(setup, cluster.address, plan, inputs, progress)
    assert inputs is not None
    progress.tell("predictions")
    found = compare(inputs, runs, plan.max_tokens)
    kept = {
        "inputs": dataclasses.asdict(inputs),
        "max_tokens": plan.max_tokens,
        "runs": [dataclasses.asdict(one) for one in runs],
    }
    report.add("calibration", kept, tables_of(found, plan.label))


def again(kept: Mapping[str, Any], title: str) -> list[Table]:
    """Tables of a saved result, predicted again."""
    runs = [RealRun(**one) for one in kept["runs"]]
    return tables_of(compare(Inputs.of_json(kept["inputs"]), runs, kept["max_tokens"]), title)


def compare(inputs: Inputs, runs: Sequence[RealRun], max_tokens: int) -> list[Compared]:
    """Each run's figures beside the simulator's."""
    simulator, setups = Simulator(inputs, max_tokens), {setup.name: setup for setup in SETUPS}
    found = []
    for one in runs:
        predicted = simulator.figures(setups[one.setup], one)
        found += [
            Compared(one.setup, one.load, one.speculation, name, unit * ours, unit * theirs, bound)
            for name, unit, bound, ours, theirs in zip(FIGURES, _UNITS, BOUNDS, predicted, one.figures, strict=True)
        ]
    return found


def tables_of(found: Sequence[Compared], title: str) -> list[Table]:
    """All figures, and how many of each kind agree."""
    every = Table(
        f"Predicted and measured, {title}",
        ("deployment", "load", "speculation", "figure", "predicted", "measured", "ratio", "within"),
    )
    for one in found:
        every.add(
            one.setup, one.load, one.speculation, one.figure, one.predicted, one.measured, one.ratio, one.is_within
        )
    parts = Table(
        f"Agreement, {title}", ("deployment", "speculation", "figure", "within", "median ratio", "from", "to")
    )
    for key in dict.fromkeys((one.setup, one.speculation, one.figure) for one in found):
        own = [one for one in found if (one.setup, one.speculation, one.figure) == key]
        ratios = [one.ratio for one in own]
        within = f"{sum(one.is_within for one in own)} of {len(own)}"
        parts.add(*key, within, statistics.median(ratios), min(ratios), max(ratios))
    num = sum(one.is_within for one in found)
    parts.notes.append(
        f"{num} of {len(found)} predictions are within 10 % (tokens/s) or 20 % (times) of what was measured."
    )
    return [every, parts]
