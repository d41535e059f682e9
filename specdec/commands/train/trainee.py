"""What the loop and the report know of a drafter in training, whatever its kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from specdec.commands.train.recipe import Recipe
from specdec.commands.train.states import TextBatch


@dataclass(slots=True)
class Guesses:
    """What is drafted so many tokens ahead, from all places of all texts."""

    depth: int
    logits: torch.Tensor
    """[B, N, D]: from the place n, the last token whose states are known, of the token at n + 1 + lead + depth."""
    confidence: torch.Tensor | None = None
    """[B, N]: how likely it says that its token is to be taken, from 0 to 1; None: it does not say."""


class Trainee(Protocol):
    """A drafter in training."""

    module: nn.Module
    """Its weights; those that need a gradient are learned."""
    lead: int
    """How many tokens after the last one with states are given: one for heads, none for a draft."""
    target_ids: torch.Tensor | None
    """[D] int64: the target's ids of the tokens that it can name; None: all, in order."""

    def guesses(self, batch: TextBatch, num_depths: int) -> Iterator[Guesses]:
        """Of each depth in turn, over the target's own tokens. In training, only the depths that are learned."""

    def save(self, folder: Path) -> None:
        """Write a checkpoint, in a format of other engines."""


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a drafter in training takes from its target, on the device of the training, in float32."""

    name: str
    """Of its folder or repository, for configs."""
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
    """Of checkpoints."""

    @property
    def hidden_size(self) -> int:
        """Ht."""
        return self.lm_head.shape[1]

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return self.lm_head.device

    def taps(self, recipe: Recipe) -> tuple[int, ...]:
        """The layers that a head reads, by the ids of `specdec.engine.tap`; none of kinds that read final states."""
        if recipe.kind not in ("eagle3", "dspark"):
            return ()
        count = self.num_layers
        return recipe.layer_ids or tuple(sorted({max(1, count // 4), count // 2, count - 1}))
