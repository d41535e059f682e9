"""Files of a run: the checkpoint, and the state from which an interrupted run continues."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from specdec.commands.train.recipe import Recipe, TrainingRefused

RECIPE_KEY = "specdec_training"
"""Key of the recipe in a config.json, which other engines ignore."""


def write_checkpoint(
    folder: Path, config: dict[str, Any], tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, recipe: Recipe
) -> None:
    """Write config.json, with the recipe, and model.safetensors; floating-point tensors become `dtype`."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: (value.to(dtype) if value.is_floating_point() else value).detach().cpu().contiguous()
        for name, value in tensors.items()
    }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # as config.json; else others could not serve it
    written = {**config, "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    add_recipe(folder, recipe)


def add_recipe(folder: Path, recipe: Recipe) -> None:
    """Write the recipe into a folder's config.json."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text(encoding="utf-8")), RECIPE_KEY: recipe.as_json()}
    config[RECIPE_KEY]["initial_draft"] = recipe.initial_draft and Path(recipe.initial_draft).name
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def save_state(file: Path, step: int, module: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Write the state of a run atomically."""
    part = file.with_suffix(".part")
    learned = {name: value for name, value in module.named_parameters() if value.requires_grad}
    torch.save(
        {
            "step": step,
            "learned": {name: value.detach() for name, value in learned.items()},
            "optimizer": optimizer.state_dict(),
            "recipe": recipe.as_json(),
        },
        part,
    )
    os.replace(part, file)


def load_state(file: Path, module: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> int:
    """Load the state of `save_state`; return the number of finished steps, 0 without a file.

    Raises TrainingRefused if the file has another recipe.
    """
    if not file.is_file():
        return 0
    state = torch.load(file, map_location="cpu", weights_only=True)
    if state["recipe"] != recipe.as_json():
        changed = sorted(name for name, value in recipe.as_json().items() if state["recipe"].get(name) != value)
        raise TrainingRefused(f"{file.parent} holds a run with other {', '.join(changed)}: name another folder")
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in state["learned"].items():
            parameters[name].copy_(value)
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
