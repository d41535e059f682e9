"""What the comparison of trained drafters shows."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.training import RECIPES, TrainingOutcome, _names, _steps, kinds_table, losses_table
from specdec.commands.train.acceptance import MeasuredAcceptance
from specdec.commands.train.recipe import KINDS, Recipe
from specdec.commands.train.worth import StepCosts


def outcome(kind: str, loss: str, seed: int, first: float, *, cpu_s: float = 50.0) -> TrainingOutcome:
    recipe = Recipe(kind=kind, loss=loss, seed=seed, num_steps=120)  # type: ignore[arg-type]
    after = [MeasuredAcceptance(each, 900, [first, first / 2], [first + 0.1, first / 2 + 0.1]) for each in (0.0, 1.0)]
    return TrainingOutcome(recipe, Path("folder"), cpu_s, 1000, after)


def test_there_is_a_recipe_of_each_kind() -> None:
    assert {name: recipe.kind for name, recipe in RECIPES.items()} == {kind: kind for kind in KINDS}


def test_a_row_is_the_mean_over_seeds_of_a_loss() -> None:
    runs = [outcome("eagle3", "kl", 0, 0.4), outcome("eagle3", "kl", 1, 0.6), outcome("eagle3", "coupled", 0, 0.8)]
    table = losses_table([*runs, outcome("medusa", "kl", 0, 0.1)], "eagle3", 1.0)
    assert table.columns[1:5] == ["coupled 1", "coupled 2", "ratio test 1", "ratio test 2"]
    assert table.rows[0] == ["kl", "0.500", "0.250", "0.600", "0.350", "1.750", "1.950", "50"]
    assert table.rows[1][:3] == ["coupled", "0.800", "0.400"]
    assert len(table.rows) == 2
    assert table.notes[1] == "Tokens a step of one loss differ between seeds by 0.300 at most."


def test_greedy_tables_have_one_figure_of_each_depth() -> None:
    table = losses_table([outcome("eagle3", "kl", 0, 0.4)], "eagle3", 0.0)
    assert table.columns == ["loss", "1", "2", "tokens a step", "CPU s"]
    assert table.rows == [["kl", "0.400", "0.200", "1.600", "50"]]


def test_kinds_are_compared_at_the_length_that_is_best_for_each() -> None:
    runs = [outcome("eagle3", "kl", 0, 0.8), outcome("draft_model", "kl", 0, 0.2)]
    cheap, dear = StepCosts(4.0, [5.0, 5.0], [1.0, 1.0]), StepCosts(4.0, [5.0, 6.0], [3.0, 6.0])
    table = kinds_table(runs, {"eagle3, kl": cheap, "draft_model, kl": dear})
    assert table.rows[0][:5] == ["eagle3, kl", "1000", "120", "50", "1.00, 1.00"]
    assert table.rows[0][5:8] == ["2.20", "2, 367", "1.47x"]
    assert table.rows[1][5:8] == ["1.30", "1, 150", "0.60x"]


def test_steps_are_of_all_kinds_or_of_one() -> None:
    assert _steps("80,draft_model=400") == {"": 80, "draft_model": 400}
    assert _steps("draft_model=400")[""] == 120
    with pytest.raises(argparse.ArgumentTypeError, match="gpt: not one of"):
        _names(KINDS)("eagle3,gpt")
