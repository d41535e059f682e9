"""Predictions and advice of `specdec tune`, from measurements that are made up."""

from __future__ import annotations

import dataclasses
import random

import pytest

from specdec.commands.tune.advice import Advice, LoadPoint, advise, why_not
from specdec.commands.tune.measured import Agreement, StepTimes, agreement_share, rounds
from specdec.commands.tune.pages import curves, plots_of, results, tables_of
from specdec.commands.tune.prediction import (
    Measurements,
    OutsideSteps,
    SettingsChoice,
    best_length,
    expected_speedup,
    pick,
    predict,
)


def target_times(one_row_ms: float = 10.0, per_row_ms: float = 0.1) -> StepTimes:
    return StepTimes({
        count: {rows: one_row_ms + per_row_ms * (count * rows - 1) for rows in (1, 4, 16)} for count in (1, 8)
    })  # fmt: skip


def agreeing(share: float, num_tokens: int = 600, second: float = 0.0) -> Agreement:
    """Tokens that are right with this probability, each on its own; of the others `second` are the runner-up."""
    rng = random.Random(5)
    ranks = [0 if rng.random() < share else 1 if rng.random() < second else -1 for _ in range(num_tokens)]
    return Agreement(tuple(ranks), (share,) * num_tokens)


def measurements(share: float = 0.8, draft_ms: float = 1.0, **changed: object) -> Measurements:
    made = Measurements(
        target=target_times(),
        draft=StepTimes({1: {1: draft_ms}, 8: {1: draft_ms}}),
        outputs={0.0: [agreeing(share)]},
    )
    return dataclasses.replace(made, **changed)  # type: ignore[arg-type]


def test_times_lie_on_lines_between_and_beyond_what_was_measured() -> None:
    times = StepTimes({1: {1: 2.0, 3: 4.0}, 4: {1: 5.0, 3: 13.0}})
    assert times.of(1, 2) == 3.0
    assert times.of(1, 5) == 6.0
    assert times.of(4, 1) == 5.0
    assert times.of(2, 3) == 7.0
    assert StepTimes({2: {1: 1.5}}).of(7, 9) == 1.5


@pytest.mark.parametrize("mode", ["coupled", "rejection"])
@pytest.mark.parametrize("draft_tokens", [1, 4, 8])
def test_tokens_of_a_round_are_the_closed_form_where_every_token_is_alike(mode: str, draft_tokens: int) -> None:
    share = 0.7
    found = rounds([agreeing(share, 4000)], mode, draft_tokens)
    assert found.tokens == pytest.approx((1 - share ** (draft_tokens + 1)) / (1 - share), rel=0.06)
    for depth, survival in enumerate(found.survival, 1):
        assert survival == pytest.approx(share**depth, abs=0.05)


def test_rounds_count_runs_as_they_come_and_not_their_mean() -> None:
    half = Agreement((0,) * 500 + (-1,) * 500, (1.0,) * 500 + (0.0,) * 500)
    assert agreement_share([half], "coupled") == 0.5
    assert rounds([half], "coupled", 9).tokens == pytest.approx(1000 / 550)
    assert rounds([half], "rejection", 9).tokens == pytest.approx(1000 / 550)


def test_a_runner_up_adds_a_token_to_the_round_that_it_ends() -> None:
    output = Agreement((0, 1, 0, 0, 1, 0) * 100, (0.0,) * 600)
    assert rounds([output], "coupled", 4, num_siblings=0).tokens == pytest.approx(600 / 200, rel=0.01)
    assert rounds([output], "coupled", 4, num_siblings=1).tokens == pytest.approx(600 / 200, rel=0.01)
    always = Agreement((1,) * 600, (0.0,) * 600)
    assert rounds([always], "coupled", 4, num_siblings=0).tokens == 1.0
    assert rounds([always], "coupled", 4, num_siblings=1).tokens == 2.0


def test_no_output_is_no_round() -> None:
    assert rounds([], "coupled", 3).tokens == 1.0
    assert agreement_share([], "coupled") == 0.0


def test_speed_ups_are_the_formulas() -> None:
    made = measurements(share=1.0, draft_ms=2.0)
    found = predict(made, SettingsChoice(draft_tokens=4), 0.0, 1)
    c, v = 0.2, (10.0 + 0.1 * 4) / 10.0
    assert (found.draft_ratio, found.verify_ratio) == (pytest.approx(c), pytest.approx(v))
    assert found.serial == pytest.approx(found.tokens_per_round / (4 * c + v))
    assert found.hidden == pytest.approx(found.tokens_per_round / max(v, 4 * c))
    assert found.expected == pytest.approx(found.hidden)  # every verdict is foreseen


def test_nothing_is_hidden_where_both_take_turns_and_little_where_verdicts_surprise() -> None:
    turns = predict(measurements(is_parallel=False), SettingsChoice(draft_tokens=4), 0.0, 1)
    assert turns.expected == turns.serial < turns.hidden
    both = predict(measurements(), SettingsChoice(draft_tokens=4), 0.0, 1)
    assert both.serial < both.expected < both.hidden


def test_what_lies_outside_of_steps_is_paid_once_per_round() -> None:
    without = predict(measurements(), SettingsChoice(draft_tokens=4), 0.0, 1)
    outside = OutsideSteps(plain_ms={1: 1000.0}, verifying_ms={1: 1000.0})
    slow = predict(measurements(outside=outside), SettingsChoice(draft_tokens=4), 0.0, 1)
    assert slow.expected == pytest.approx(without.tokens_per_round, rel=0.02)


def test_what_speculation_adds_outside_of_steps_makes_it_slower() -> None:
    choice, turns = SettingsChoice(draft_tokens=4), {"is_parallel": False}
    found = [
        predict(measurements(outside=outside, **turns), choice, 0.0, 1).expected
        for outside in (
            OutsideSteps(),
            OutsideSteps(verifying_ms={1: 1.0}),
            OutsideSteps(verifying_ms={1: 1.0}, drafting_ms={1: 0.5}),
        )
    ]
    assert found == sorted(found, reverse=True) and len(set(found)) == 3


def test_a_good_cheap_draft_drafts_far_and_a_poor_one_does_not() -> None:
    good = pick(measurements(share=0.95, draft_ms=0.1), (1,), ("coupled", "rejection"))
    poor = pick(measurements(share=0.4, draft_ms=2.0), (1,), ("coupled", "rejection"))
    assert good.draft_tokens > 6 > 3 > poor.draft_tokens
    assert good.mode == poor.mode == "coupled"


def test_runners_up_are_proposed_where_they_are_often_right() -> None:
    made = measurements(outputs={0.0: [agreeing(0.5, second=0.9)]})
    assert pick(made, (1,), ("coupled",)).num_siblings >= 1
    assert pick(measurements(), (1,), ("coupled",)).num_siblings == 0


def test_rejection_is_picked_where_it_gains_more_than_a_tenth_only() -> None:
    output = agreeing(0.5)
    much = measurements(outputs={1.0: [dataclasses.replace(output, overlaps=(0.9,) * len(output.ranks))]})
    little = measurements(outputs={1.0: [dataclasses.replace(output, overlaps=(0.52,) * len(output.ranks))]})
    assert pick(much, (1,), ("coupled", "rejection")).mode == "rejection"
    assert pick(little, (1,), ("coupled", "rejection")).mode == "coupled"
    assert pick(much, (1,), ("rejection",)).mode == "rejection"
    assert pick(much, (1,), ("coupled",)).mode == "coupled"


def judged(made: Measurements, loads: tuple[int, ...] = (1,), **verified: float) -> Advice:
    choice = pick(made, loads, ("coupled",))
    return advise(made, choice, loads, {(0.0, int(load[1:])): ratio for load, ratio in verified.items()})


def test_a_pair_that_pays_is_said_to_with_both_numbers() -> None:
    found = judged(measurements(), l1=1.7)
    assert found.speculate
    assert found.reasons[0].startswith("Speculation pays: 1.70 times plain decoding, measured; predicted ")


@pytest.mark.parametrize(
    ("made", "loads", "verified", "cause"),
    [
        (measurements(draft_ms=20.0), (1,), {}, "draft too slow: its step takes 20 ms, 2.00 of a target step of 10"),
        (measurements(share=0.05, draft_ms=2.0), (1,), {}, "acceptance too low: "),
        (
            measurements(target=StepTimes({1: {1: 10.0, 16: 10.5}, 8: {1: 10.0, 16: 80.0}})),
            (1, 8), {"l8": 0.7}, "batch too large",
        ),
        (measurements(), (1,), {"l1": 0.8}, "step too short: a target step takes 10 ms"),
        (measurements(target=target_times(per_row_ms=9.9)), (1,), {}, "verifying costs too much"),
    ],
)  # fmt: skip
def test_why_not_has_the_cause_and_its_numbers(
    made: Measurements, loads: tuple[int, ...], verified: dict[str, float], cause: str
) -> None:
    found = judged(made, loads, **verified)
    assert any(cause in reason for reason in found.reasons), found.reasons
    if len(loads) == 1:
        assert not found.speculate


def test_what_was_measured_counts_for_more_than_what_was_predicted() -> None:
    assert judged(measurements()).speculate
    assert not judged(measurements(), l1=0.9).speculate


def test_loads_that_lose_more_than_others_win_are_not_speculated_for() -> None:
    assert judged(measurements(), (1, 8), l1=1.5, l8=0.9).speculate
    assert not judged(measurements(), (1, 8), l1=1.1, l8=0.5).speculate


def test_reasons_are_never_empty() -> None:
    made = measurements()
    point = LoadPoint(temperature=0.0, load=1, predicted=0.99)
    assert why_not(made, SettingsChoice(draft_tokens=1), point)


def test_pages_show_the_curve_by_length_and_load() -> None:
    made = measurements(outputs={0.0: [agreeing(0.8)], 1.0: [agreeing(0.5)]})
    choice = pick(made, (1, 8), ("coupled",))
    advice = advise(made, choice, (1, 8), {(0.0, 1): 1.5})
    by_length = curves(made, choice, (1, 8))[0.0][1]
    assert by_length[choice.draft_tokens - 1] == pytest.approx(predict(made, choice, 0.0, 1).expected)
    assert expected_speedup(made, choice, 0.0, 1) >= max(by_length[: choice.draft_tokens])
    assert all(table.rows for table in tables_of(made, advice))
    assert set(plots_of(made, advice, "n")) == {"draft-length-0", "draft-length-1", "load", "acceptance"}
    assert results(made, advice)["choice"]["mode"] == "coupled"


def test_a_long_limit_is_not_used_up_where_that_does_not_pay() -> None:
    made = measurements(share=0.9, target=StepTimes({1: {1: 10.0, 16: 10.5}, 8: {1: 10.0, 2: 11.0, 16: 90.0}}))
    limit = pick(made, (1, 8), ("coupled",))
    assert limit.draft_tokens > 4
    assert best_length(made, limit, 0.0, 8).draft_tokens < best_length(made, limit, 0.0, 1).draft_tokens
    fixed = dataclasses.replace(limit, mode="rejection", num_siblings=0, max_heads=1)
    assert best_length(made, fixed, 0.0, 8) == fixed


def test_a_short_step_is_told_with_what_passes_between_processes() -> None:
    made = measurements()
    found = advise(made, SettingsChoice(draft_tokens=2), (1,), {(0.0, 1): 0.8}, {(0.0, 1): (2.5, 1.25)})
    assert any("(2.5 ms a step, plain 1.25) cost more than a proposal saves" in one for one in found.reasons)
    assert not found.speculate
