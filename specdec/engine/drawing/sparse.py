"""Draws for rejection verification in a captured graph: a sparse distribution of each row, and a token drawn from it.

The reported distribution is exactly the one that the token is drawn from: both use the same float32 probabilities
(docs/rejection.md).
"""

from __future__ import annotations

import torch

from specdec.engine.cuda.sampling import read_top, scored
from specdec.engine.sampling.rejection import DraftSample
from specdec.engine.sampling.sampler import sparse_distributions


def launch_sparse(scores: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Draw a token of each row from its likeliest ones. No operation waits for data.

    Args:
        scores: ``[R, V]`` float32, result of ``launch_cuts``; for greedy rows their logits.
        rows: ``[R, 3]`` int32 on the same device: random numbers from (0, 1) as float64 bits, and temperatures as
            float32 bits (0: greedy).
        out: ``[R, 1 + num_sparse]`` scored ids, is filled: the token, then the likeliest ids with their probabilities.
            These are NaN where no token can be drawn.
    """
    num_sparse, device = out.shape[1] - 1, scores.device
    probs = torch.softmax(scores.to(torch.float64), dim=1).to(torch.float32)
    mass, ids = sparse_distributions(probs, num_sparse)
    best = scores.amax(dim=1, keepdim=True)
    columns = torch.arange(scores.shape[1], device=device)
    greedy_ids = torch.where(scores == best, columns, scores.shape[1] - 1).amin(dim=1, keepdim=True)
    is_greedy = rows[:, 2:].contiguous().view(torch.float32) == 0.0
    certain = torch.zeros_like(mass)
    certain[:, :1] = torch.where(best.abs() < torch.inf, 1.0, torch.nan)
    mass = torch.where(is_greedy, certain, mass)
    ids = torch.where(is_greedy, torch.cat([greedy_ids, ids[:, 1:]], dim=1), ids)
    cumulated = mass.to(torch.float64).cumsum(dim=1)
    # Always a copy: a contiguous view may begin at an address that is not aligned for float64.
    numbers = rows[:, :2].clone(memory_format=torch.contiguous_format).view(torch.float64)
    points = numbers * cumulated[:, -1:]
    # The product can round up to the whole sum.
    index = torch.minimum((cumulated <= points).sum(dim=1, keepdim=True), (mass > 0.0).sum(dim=1, keepdim=True) - 1)
    index = index.clamp(min=0)
    out[:, :1] = scored(mass.gather(1, index), ids.gather(1, index))
    out[:, 1:] = scored(mass, ids)


def read_sparse(out: torch.Tensor) -> list[DraftSample | None]:
    """Samples of ``launch_sparse``'s ``out`` on the host; None: no token can be drawn."""
    size = out.shape[1]
    ids, probs = read_top(out)
    samples: list[DraftSample | None] = []
    for at in range(0, len(ids), size):
        mass = [prob for prob in probs[at + 1 : at + size] if prob > 0.0]  # NaN is not above 0
        samples.append(DraftSample(ids[at], tuple(ids[at + 1 : at + 1 + len(mass)]), tuple(mass)) if mass else None)
    return samples
