"""Training of Medusa heads: each drafts one depth from the last state only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specdec.commands.train.checkpoint import write_checkpoint
from specdec.commands.train.recipe import Recipe
from specdec.commands.train.recorded.states import TextBatch
from specdec.commands.train.trainee import DraftRows, Guesses, TargetParts, chosen_rows
from specdec.drafting.heads.methods.medusa import MedusaModel


def _drafts(head: Any, finals: torch.Tensor) -> DraftRows:
    """Drafts of one head from the target's final states [B, N, Ht]."""
    *blocks, last = head

    def at(texts: torch.Tensor, places: torch.Tensor, columns: torch.Tensor | None = None) -> tuple[torch.Tensor, None]:
        rows = finals[texts, places]
        for block in blocks:
            rows = block(rows)
        return functional.linear(rows, chosen_rows(last.weight, columns)), None

    return at


class MedusaTrainee:
    """`Trainee` for Medusa heads, which start as copies of the target's own head."""

    lead = 1

    def __init__(self, recipe: Recipe, target: TargetParts, target_ids: torch.Tensor | None) -> None:
        """Weights come from torch's random state."""
        self.target_ids = target_ids
        self._recipe, self._target = recipe, target
        rows = target.lm_head if target_ids is None else target.lm_head[target_ids]
        model = MedusaModel(recipe.num_depths, recipe.num_layers, target.hidden_size, len(rows))
        with torch.no_grad():
            heads: list[Any] = list(model)
            for head in heads:
                head[-1].weight.copy_(rows)
                for block in list(head)[:-1]:
                    block.linear.weight.mul_(0.1)
                    block.linear.bias.zero_()
        self.module: nn.Module = model.to(target.device)

    def guesses(self, batch: TextBatch, num_depths: int) -> Iterator[Guesses]:
        """See `Trainee`; depths end with the heads."""
        heads: Any = self.module
        length = batch.token_ids.shape[1]
        for depth, head in enumerate(list(heads)[:num_depths]):
            if depth + 1 < length:
                yield Guesses(depth, length - 1 - depth, _drafts(head, batch.finals))

    def save(self, folder: Path) -> None:
        """Save the heads in the authors' format, or in vLLM's former one if they propose fewer tokens."""
        recipe, tensors = self._recipe, dict(self.module.state_dict())
        config: dict[str, Any] = {
            "medusa_num_heads": recipe.num_depths,
            "medusa_num_layers": recipe.num_layers,
            "base_model_name_or_path": self._target.name,
            "hidden_size": self._target.hidden_size,
            "vocab_size": self._target.vocab_size,
            "model_type": "medusa",
        }
        if self.target_ids is not None:
            tensors = {_former_name(name, recipe.num_layers): value for name, value in tensors.items()}
            tensors["token_map"] = self.target_ids
            config |= {
                "architectures": ["MedusaModel"],
                "num_heads": recipe.num_depths,
                "num_hidden_layers": recipe.num_layers,
                "truncated_vocab_size": len(self.target_ids),
                "medusa_fc_bias": True,
                "original_lm_head": False,
            }
        write_checkpoint(folder, config, tensors, self._target.dtype, recipe)


def _former_name(name: str, num_layers: int) -> str:
    head, layer, *rest = name.split(".")
    return f"lm_heads.{head}.weight" if int(layer) == num_layers else f"blocks.{head}.layers.{layer}.{rest[-1]}"
