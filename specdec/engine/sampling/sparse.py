"""Draws for rejection verification: a sparse distribution of each row, and a token drawn from it.

The reported distribution is exactly the one that the token is drawn from: both use the same float32 probabilities
(docs/rejection.md). No operation waits for a device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec.engine.sampling.rejection import DraftSample
from specdec.engine.sampling.scored_ids import read_top, scored


def certain(scores: Tensor) -> Tensor:
    """One-hot distributions [R, V] float32 of the best tokens, ties to the lowest id; NaN where the best score is not
    finite."""
    best = scores.amax(dim=1, keepdim=True)
    columns = torch.arange(scores.shape[1], device=scores.device)
    ids = torch.where(scores == best, columns, scores.shape[1] - 1).amin(dim=1, keepdim=True)
    return torch.where(best.abs() < math.inf, (columns == ids).to(torch.float32), math.nan)


def draw_sparse(probs: Tensor, points: Tensor, num_tokens: int) -> Tensor:
    """Draw a token of each row from its likeliest ones.

    Args:
        probs: [R, V] float32.
        points: [R, 1] float64 random numbers from (0, 1).
        num_tokens: size M of the distributions, at most V.

    Returns:
        [R, 1 + M] scored ids: the token, then the likeliest ids with their probabilities. These are NaN where no token
        can be drawn.
    """
    mass, ids = sparse_distributions(probs, num_tokens)
    cumulated = mass.to(torch.float64).cumsum(dim=1)
    index = (cumulated <= points * cumulated[:, -1:]).sum(dim=1, keepdim=True)
    # The product can round up to the whole sum.
    index = torch.minimum(index, (mass > 0.0).sum(dim=1, keepdim=True) - 1).clamp(min=0)
    drawn = (torch.cat([each.gather(1, index), each], dim=1) for each in (mass, ids))
    return scored(*drawn)


def read_sparse(out: Tensor) -> list[DraftSample | None]:
    """Samples of ``draw_sparse``'s result on the host; None: no token can be drawn."""
    size = out.shape[1]
    ids, probs = read_top(out)
    samples: list[DraftSample | None] = []
    for at in range(0, len(ids), size):
        mass = [prob for prob in probs[at + 1 : at + size] if prob > 0.0]  # NaN is not above 0
        samples.append(DraftSample(ids[at], tuple(ids[at + 1 : at + 1 + len(mass)]), tuple(mass)) if mass else None)
    return samples


def sparse_distributions(probs: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of rows, best first, ties by ascending id: probabilities [R, M] float32 and ids int64.

    M is `num_tokens`, at most V. Only rows with cut tokens are renormalised. Does not wait for a device. Rows of NaN
    stay NaN.

    Args:
        probs: [R, V] float32.
        num_tokens: at least 1.
    """
    best, ids = probs.topk(min(num_tokens, probs.shape[1]), dim=1)
    if num_tokens < probs.shape[1]:
        scaled = (best.to(torch.float64) / best.to(torch.float64).sum(dim=1, keepdim=True)).to(torch.float32)
        was_cut = (probs > 0.0).sum(dim=1, keepdim=True) > num_tokens
        best = torch.where(was_cut, scaled, best)
    ids, order = ids.sort(dim=1)
    best, order = best.gather(1, order).sort(dim=1, descending=True, stable=True)
    return best, ids.gather(1, order)
