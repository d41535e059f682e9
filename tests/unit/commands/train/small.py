"""Runs that are as small as they get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from specdec.commands.train.job import Loaded, Trained, run
from specdec.commands.train.recipe import Recipe
from specdec.commands.train.recorded.texts import Text
from specdec.commands.train.trainee import Guesses

NUM_STEPS = 30
RECIPE = Recipe(
    kind="eagle3",
    num_steps=NUM_STEPS,
    batch_sequences=4,
    learning_rate=0.01,
    num_depths=2,
    hidden_size=32,
    intermediate_size=24,
    layer_ids=(1, 2, 3),
    markov_rank=8,
)


def recipe_of(kind: str, **changes: Any) -> Recipe:
    """`RECIPE` for another kind, with changes."""
    layer_ids = RECIPE.layer_ids if kind in ("eagle3", "dspark") else ()
    return dataclasses.replace(RECIPE, kind=kind, layer_ids=layer_ids, **changes)  # type: ignore[arg-type]


def quiet(*_: object) -> None:
    """Nobody is told."""


def trained(
    loaded: Loaded, texts: list[Text], recipe: Recipe, folder: Path, on_step: Callable[[int, float], None] = quiet
) -> Trained:
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    return run(loaded, texts, recipe, folder / "out", work, quiet, on_step)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "out" / "model.safetensors")


def all_logits(guesses: Guesses, text: int) -> torch.Tensor:
    """Logits [N, D] of one text's drafts at one depth."""
    places = torch.arange(guesses.num_places)
    return guesses.at(torch.full_like(places, text), places)[0]
