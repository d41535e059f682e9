"""The columns of a drafter's vocabulary over which a training step normalises its probabilities.

A step needs the logits of the tokens that its rows' teachers name; all others only together, as the logarithm of the
sum of their exponentials. That sum is estimated from a sample of columns, each of which stands for as many as were left
out; with few columns none is left out, and the loss is that of the whole vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Candidates:
    """The columns of one step."""

    columns: torch.Tensor | None
    """[C] int64; None: all D, in order."""
    places: torch.Tensor
    """[D] int64: the place of a column among them, meaningless for others."""
    weights: torch.Tensor
    """[C]: logarithm of the number of columns for which each stands, apart from rows that name it."""
    has_rest: bool
    """Whether rows name fewer than all D columns."""

    def kept_logits(self, logits: torch.Tensor, named: torch.Tensor) -> torch.Tensor:
        """Logits [R, M + 1] of the columns that each row names [R, M], and of all others together.

        `logits` [R, C] are those of the candidates. Where rows name all columns, there is no last one: [R, D].
        """
        kept = self.places[named]
        if not self.has_rest:
            return logits.gather(-1, kept)
        found: torch.Tensor = _KeptLogits.apply(logits, kept, self.weights)
        return found


def draw_candidates(named: torch.Tensor, size: int, num_sampled: int, generator: torch.Generator) -> Candidates:
    """Candidates of a step whose rows name columns [R, M] of `size`: those, and `num_sampled` of the others."""
    device = named.device
    is_named = torch.zeros(size, dtype=torch.bool, device=device)
    is_named[named.flatten()] = True
    others = (~is_named).nonzero()[:, 0]
    has_rest = named.shape[-1] < size
    if len(others) <= num_sampled:
        return Candidates(None, torch.arange(size, device=device), torch.zeros(size, device=device), has_rest)
    drawn = others[torch.randperm(len(others), generator=generator)[:num_sampled].to(device)]
    columns = torch.cat([is_named.nonzero()[:, 0], drawn])
    places = torch.zeros(size, dtype=torch.int64, device=device)
    places[columns] = torch.arange(len(columns), device=device)
    weights = torch.zeros(len(columns), device=device)
    weights[-num_sampled:] = math.log(len(others) / num_sampled)
    return Candidates(columns, places, weights, has_rest)


class _KeptLogits(torch.autograd.Function):
    """Gathers columns and reduces the others, in one pass each way and without copies for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, kept: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        others = (logits + weights).scatter_(-1, kept, -torch.inf)
        rest = others.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logits, kept, weights, rest)
        return torch.cat([logits.gather(-1, kept).to(rest.dtype), rest], dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, kept, weights, rest = ctx.saved_tensors
        (grad,) = grads
        share = (logits + weights).sub_(rest).exp_().mul_(grad[:, -1:])
        share.scatter_(-1, kept, grad[:, :-1].to(share.dtype))
        return share.to(logits.dtype), None, None
