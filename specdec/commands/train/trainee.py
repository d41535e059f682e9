"""Interface of a drafter in training, for the loop and the report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from specdec.commands.train.recipe import Recipe
from specdec.commands.train.recorded.states import TextBatch


class DraftRows(Protocol):
    """Drafts at chosen places."""

    def __call__(
        self, texts: torch.Tensor, places: torch.Tensor, columns: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits [R, C] and estimated probabilities of acceptance [R], or None if the drafter has none.

        `texts` and `places`: [R] int64; `columns`: [C] of the drafter's vocabulary; None: all D.
        """


@dataclass(frozen=True, slots=True)
class Guesses:
    """Drafts at one depth."""

    depth: int
    num_places: int
    """Places of each text that have a draft, from the first on. A place n is the last token with known states."""
    at: DraftRows
    """Drafts of the token at n + 1 + lead + depth."""


class Trainee(Protocol):
    """A drafter in training."""

    module: nn.Module
    """Its weights; those that need a gradient are learned."""
    lead: int
    """Number of known tokens after the last one with states: one for heads, none for a draft."""
    target_ids: torch.Tensor | None
    """[D] int64: the target's ids of the tokens that it can propose; None: all, in order."""

    def guesses(self, batch: TextBatch, num_depths: int) -> Iterator[Guesses]:
        """Of each depth in turn, over the target's own tokens. In training, only the depths that are learned."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint in a format of other engines."""


def chosen_rows(weight: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    """Rows of a head's weight [D, H]."""
    return weight if columns is None else weight.index_select(0, columns)


@dataclass(frozen=True, slots=True)
class TargetParts:
    """Weights and sizes of the target, on the training's device, in float32."""

    name: str
    """Name of its folder or repository, for configs."""
    directory: Path
    architecture: str
    lm_head: torch.Tensor
    """[V, Ht]."""
    embedding: torch.Tensor
    """[V, Ht]."""
    vocab_size: int
    num_layers: int
    num_positions: int
    rms_norm_eps: float
    rope_theta: float
    dtype: torch.dtype
    """Data type of checkpoints."""

    @property
    def hidden_size(self) -> int:
        """Ht."""
        return self.lm_head.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the training."""
        return self.lm_head.device

    def taps(self, recipe: Recipe) -> tuple[int, ...]:
        """The layers that a head reads, by the ids of `specdec.engine.tap`; none if it reads final states."""
        if recipe.kind not in ("eagle3", "dspark"):
            return ()
        count = self.num_layers
        return recipe.layer_ids or tuple(sorted({max(1, count // 4), count // 2, count - 1}))
