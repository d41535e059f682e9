"""A target and its draft, step by step, with the target's own pacing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from specdec.plan.simulation.curve import measure_curve
from specdec.plan.simulation.pair import Pair, PairSettings, Speculation


@dataclass(frozen=True)
class Line:
    """A step's time as a line over its rows."""

    base_s: float
    row_s: float

    def seconds(self, num_sequences: int, num_rows: int) -> float:
        return self.base_s + self.row_s * num_rows

    def prompt_seconds(self, num_rows: int, num_sequences: int) -> float:
        return self.row_s * num_rows + (0.0 if num_sequences else self.base_s)


GOOD = PairSettings(target=Line(0.02, 0.0001), draft=Line(0.0008, 0.00001), acceptance=[0.85])


def tokens_per_s(settings: PairSettings, speculation: Speculation, num_sessions: int = 2) -> float:
    pair = Pair(settings, speculation, num_sessions, output_tokens=200, seed=1)
    tally = pair.run(4.0, 1e9, 240 // num_sessions)
    return sum(tally.tokens) / tally.elapsed_s


def test_a_good_draft_gives_what_its_acceptance_allows() -> None:
    """A step accepts at most eight nodes, each with 0.85 if those before it were: 5.1 tokens, and fewer
    where steps begin without a proposal.
    """
    plain = tokens_per_s(GOOD, Speculation.OFF)
    assert plain == pytest.approx(2 / 0.0202, rel=0.01)
    for speculation in (Speculation.ON, Speculation.ADAPTIVE):
        assert 2.8 < tokens_per_s(GOOD, speculation) / plain < 5.2


def test_a_worthless_draft_costs_little_with_the_gate_and_its_rows_without() -> None:
    dear = dataclasses.replace(GOOD, target=Line(0.02, 0.004), acceptance=[0.02])
    plain = tokens_per_s(dear, Speculation.OFF)
    assert tokens_per_s(dear, Speculation.ADAPTIVE) > 0.93 * plain


def test_a_slow_or_distant_draft_gains_less() -> None:
    near = tokens_per_s(GOOD, Speculation.ADAPTIVE)
    far = tokens_per_s(dataclasses.replace(GOOD, delay_s=0.03), Speculation.ADAPTIVE)
    crowded = tokens_per_s(dataclasses.replace(GOOD, targets_per_draft=400), Speculation.ADAPTIVE)
    lossy = tokens_per_s(dataclasses.replace(GOOD, loss=0.05), Speculation.ADAPTIVE)
    plain = tokens_per_s(GOOD, Speculation.OFF)
    assert far < 0.9 * near
    assert crowded < 0.9 * near
    assert lossy < 0.9 * near
    assert min(far, crowded, lossy) > 0.93 * plain


def test_a_draft_in_the_target_takes_the_targets_time() -> None:
    together = dataclasses.replace(GOOD, is_together=True)
    dear = dataclasses.replace(together, draft=Line(0.01, 0.0001))
    plain = tokens_per_s(GOOD, Speculation.OFF)
    assert 2.0 * plain < tokens_per_s(together, Speculation.ADAPTIVE) < 5.2 * plain
    assert 0.9 * plain < tokens_per_s(dear, Speculation.ADAPTIVE) < 1.6 * plain


def test_a_drafts_own_prompts_and_the_services_on_its_core_take_its_time() -> None:
    short = tokens_per_s(GOOD, Speculation.ADAPTIVE)
    slow_prompts = dataclasses.replace(GOOD, draft=Line(0.0008, 0.0002))
    of_rows = tokens_per_s(slow_prompts, Speculation.ADAPTIVE)
    of_prompts = tokens_per_s(dataclasses.replace(slow_prompts, prompt_tokens=8000), Speculation.ADAPTIVE)
    busy = tokens_per_s(dataclasses.replace(GOOD, verdict_s=0.01), Speculation.ADAPTIVE)
    assert of_prompts < 0.95 * of_rows
    assert busy < 0.9 * short


def test_a_draft_in_the_target_computes_prompts_in_the_targets_time() -> None:
    together = dataclasses.replace(GOOD, is_together=True, draft=Line(0.0008, 0.0001))
    long = dataclasses.replace(together, prompt_tokens=20_000)
    assert tokens_per_s(long, Speculation.ON) < 0.9 * tokens_per_s(together, Speculation.ON)


def test_equal_seeds_give_equal_pairs() -> None:
    def figures(seed: int) -> tuple[list[float], list[int]]:
        tally = Pair(GOOD, Speculation.ADAPTIVE, 3, 50, seed).run(1.0, 1e9, 40)
        return tally.turns_s, tally.tokens

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


def test_a_curve_has_the_measured_points_and_lies_between_them() -> None:
    curve = measure_curve(GOOD, Speculation.OFF, 100, 4)
    assert [point.num_sessions for point in curve.points] == [1, 2, 4]
    assert curve.mean(3, lambda point: point.mean_turn_s) == pytest.approx(0.0203)
    assert curve.most_sessions == 4
