"""The comparison of predictions with real runs, on runs that are made up."""

from __future__ import annotations

import dataclasses
import json

import pytest

from bench.calibration.comparison import FIGURES, Compared, again, compare, tables_of
from bench.calibration.inputs import Inputs
from bench.calibration.predicted import Simulator
from bench.calibration.real import SETUPS, RealRun
from specdec.commands.measuring.summary import percentiles
from specdec.commands.tune.prediction import OutsideSteps
from specdec.plan.simulation.tally import TimeCounts

INPUTS = Inputs(
    target_ms={1: {1: 8.0, 8: 12.0}, 8: {1: 14.0, 8: 40.0}},
    draft_ms={1: {1: 0.5}, 8: {1: 0.8}},
    target_prompt_ms={32: 20.0, 128: 60.0},
    draft_prompt_ms={32: 2.0, 128: 6.0},
    acceptance=[0.8, 0.75],
    outside=OutsideSteps(plain_ms={1: 0.5, 8: 1.5}, verifying_ms={1: 0.8}, drafting_ms={1: 0.1, 8: 0.2}),
    way_s=0.003,
    open_s=0.001,
    verdict_s=0.0001,
)


def real(load: str, parts: list[list[tuple[float, int, int]]], figures: list[float], speculation: str) -> RealRun:
    return RealRun(setup=SETUPS[0].name, load=load, speculation=speculation, parts=parts, figures=figures)


def test_runs_as_the_simulator_predicts_them_agree_and_others_do_not() -> None:
    run = real("1 at once", [[(0.0, 64, 30)]], [0.0] * 5, "off")
    figures = Simulator(INPUTS, 30).figures(SETUPS[0], run)
    step_s, prompt_s = (8 + 0.5) / 1e3, (20 + 40 * 32 / 96 + 0.5) / 1e3
    assert figures[3:] == pytest.approx([step_s, step_s], rel=0.02)
    assert figures[1:3] == pytest.approx([prompt_s + INPUTS.way_s] * 2, rel=0.02)
    assert figures[0] == pytest.approx(30 / (prompt_s + 29 * step_s + INPUTS.way_s), rel=0.02)
    same = compare(INPUTS, [dataclasses.replace(run, figures=figures)], 30)
    assert all(one.is_within and one.ratio == pytest.approx(1.0) for one in same)
    slower = compare(INPUTS, [dataclasses.replace(run, figures=[1.3 * each for each in figures])], 30)
    assert not any(one.is_within for one in slower)


def test_a_saved_result_is_predicted_again_with_equal_tables() -> None:
    run = real("1 at once", [[(0.0, 16, 20)], [(0.0, 20, 20)]], [100.0, 0.02, 0.02, 0.008, 0.009], "adaptive")
    kept = {"inputs": dataclasses.asdict(INPUTS), "max_tokens": 20, "runs": [dataclasses.asdict(run)]}
    first = tables_of(compare(INPUTS, [run], 20), "t")
    assert [table.rows for table in again(json.loads(json.dumps(kept)), "t")] == [table.rows for table in first]
    assert [row[3] for row in first[0].rows] == list(FIGURES)


def test_each_figure_has_its_bound() -> None:
    def within(ratio: float, bound: float) -> bool:
        return Compared("s", "l", "off", "f", ratio, 1.0, bound).is_within

    assert within(1.09, 0.1) and within(0.91, 0.1) and within(1.19, 0.2)
    assert not within(1.11, 0.1) and not within(0.89, 0.1) and not within(0.79, 0.2)


@pytest.mark.parametrize("num", [1, 2, 3, 10, 100])
def test_predicted_and_measured_quantiles_are_counted_alike(num: int) -> None:
    times_s = [0.01 * (1 + each) for each in range(num)]
    counts = TimeCounts()
    for time_s in times_s:
        counts.add_one(time_s)
    measured = percentiles(times_s)
    for part, share in (("p50", 0.5), ("p99", 0.99)):
        assert counts.quantile(share) == pytest.approx(measured[part], rel=0.012)
