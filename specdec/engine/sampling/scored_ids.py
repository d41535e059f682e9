"""Tokens with scores, in one number each.

A *scored id* is an int64 that orders tokens by score, then by falling id: the score's bits, made to rise with it, above
the id's distance from the largest id.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LARGEST_ID = 0x7FFFFFFF


def scored(scores: Tensor, ids: Tensor) -> Tensor:
    """Scored ids of float32 scores, which are not negative, and int64 ids of one shape."""
    return (scores.view(torch.int32).to(torch.int64) << 32) | (LARGEST_ID - ids)


def ids_of(scored_ids: Tensor) -> Tensor:
    """The int64 ids of scored ids."""
    return LARGEST_ID - (scored_ids & 0xFFFFFFFF)


def read_top(out: Tensor) -> tuple[list[int], list[float]]:
    """Token ids and scores, row by row, of scored ids ``[..., n]`` on the host; NaN: the row's best is minus
    infinity."""
    bits = (out.numpy() >> 32).astype(np.int32)
    scores = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(np.float32)
    ids = np.where(scores == -np.inf, 0, ids_of(out).numpy())
    scores[scores[..., 0] == -np.inf] = np.nan
    return ids.reshape(-1).tolist(), scores.reshape(-1).tolist()
