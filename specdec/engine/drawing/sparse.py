"""Draws for rejection verification in a captured graph: a sparse distribution of each row, and a token drawn from it.

The reported distribution is exactly the one that the token is drawn from: both use the same float32 probabilities
(docs/rejection.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec.engine.sampling.rejection import DraftSample
from specdec.engine.sampling.sampler import sparse_distributions


def sparse_rows(temperatures: npt.NDArray[Any], numbers: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Rows' parameters for ``launch_sparse``, ``[R, 3]`` int32: random numbers from (0, 1) as float64 bits, and
    temperatures as float32 bits (0: greedy)."""
    words = np.empty((len(temperatures), 3), np.int32)
    words[:, :2] = numbers.astype(np.float64).view(np.int32).reshape(-1, 2)
    words[:, 2] = temperatures.astype(np.float32).view(np.int32)
    return words


def launch_sparse(scores: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Draw a token of each row from its likeliest ones. No operation waits for data.

    Args:
        scores: ``[R, V]`` float32, result of ``launch_cuts``; for greedy rows their logits.
        rows: result of ``sparse_rows``, on the same device.
        out: ``[R, 2, 1 + num_sparse]`` int32, is filled: the token, then the ids; a zero, which is not written, then
            the ids' probabilities as bits. They are NaN where no token can be drawn.
    """
    num_sparse, device = out.shape[2] - 1, scores.device
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
    tokens = ids.gather(1, index.clamp(min=0))
    out[:, 0] = torch.cat([tokens, ids], dim=1)
    out[:, 1, 1:] = mass.view(torch.int32)


def read_sparse(out: torch.Tensor) -> list[DraftSample | None]:
    """Samples of ``launch_sparse``'s ``out``, ``[R, 2, 1 + num_sparse]`` on the host; None: no token can be drawn."""
    ids, mass = out[:, 0].tolist(), out[:, 1, 1:].contiguous().view(torch.float32).tolist()
    samples: list[DraftSample | None] = []
    for (token, *of_row), probs in zip(ids, mass, strict=True):
        size = sum(prob > 0.0 for prob in probs)  # probabilities fall, and NaN is not above 0
        samples.append(DraftSample(token, tuple(of_row[:size]), tuple(probs[:size])) if size else None)
    return samples
