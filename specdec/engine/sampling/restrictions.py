"""Tokens that a request or a constraint forbids: all but the allowed ones, and those that would complete a bad word.

Like all processors these are row-invariant and keep NaN and plus infinity, so that later checks find them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def masked_logits(logits: Tensor, masks: Mapping[int, npt.NDArray[np.uint32]]) -> Tensor:
    """Logits with minus infinity at tokens that a constraint forbids.

    Ids from 32 W on are forbidden. A row without an allowed token has no token to sample.

    Args:
        logits: [R, V] float32, not changed; returned itself without masks.
        masks: by row, [W] uint32 with one bit per token id.

    Cost: a copy of the logits, and two passes over the rows with a mask.
    """
    if not masks:
        return logits
    device = logits.device
    rows = torch.tensor(list(masks)).to(device, non_blocking=True)
    words = torch.from_numpy(np.stack(list(masks.values())).view(np.int32)).to(device, non_blocking=True)  # [M, W]
    bits = (words.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=device)) & 1  # [M, W, 32]
    num_known = min(32 * words.shape[1], logits.shape[1])
    forbidden = torch.ones((len(masks), logits.shape[1]), dtype=torch.bool, device=device)
    forbidden[:, :num_known] = bits.flatten(1)[:, :num_known] == 0
    masked = logits.clone(memory_format=torch.contiguous_format)
    masked[rows] = masked[rows].masked_fill_(forbidden, -math.inf)
    return masked


def keep_allowed_(logits: Tensor, allowed: Sequence[tuple[int, array[int]]]) -> None:
    """Forbid, in place, all tokens of some rows except the given ones.

    Args:
        logits: [R, V] float32.
        allowed: rows, each with the int64 ids that it keeps; ids outside V are ignored.
    """
    for row, token_ids in allowed:
        ids = np.frombuffer(token_ids, dtype=np.int64)
        kept = torch.from_numpy(ids[(ids >= 0) & (ids < logits.shape[1])]).to(logits.device, non_blocking=True)
        values = logits[row, kept]
        logits[row] = torch.where(logits[row] < math.inf, -math.inf, logits[row])
        logits[row, kept] = values


def ban_(logits: Tensor, banned: Sequence[tuple[int, Collection[int]]]) -> None:
    """Forbid, in place, some tokens of some rows; not if no other token is left, as a choice must continue.

    Args:
        logits: [R, V] float32.
        banned: rows, each with the ids that it loses; ids outside V are ignored.
    """
    for row, token_ids in banned:
        ids = torch.tensor([i for i in sorted(token_ids) if i < logits.shape[1]], dtype=torch.int64)
        ids = ids.to(logits.device, non_blocking=True)
        values = logits[row, ids]
        banned_values = torch.where(values < math.inf, -math.inf, values)
        logits[row, ids] = banned_values
        is_nothing_left = (logits[row] == -math.inf).all()  # stays a tensor, to avoid waiting for a GPU
        logits[row, ids] = torch.where(is_nothing_left, values, banned_values)
