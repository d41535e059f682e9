"""Tokens that a request rules out: all but the allowed ones, those that would complete a bad word, and those that
a constraint forbids.

Like all processors these are row-invariant, and leave NaN and plus infinity as they are, so that they are found out.
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
    """Logits in which what is not allowed is minus infinity, so that it has no probability in whatever follows.

    Ids at and past 32 W are not allowed. A row without any allowed token has nothing to draw from.

    Args:
        logits: [R, V] float32, left as it is, and returned where there is no mask.
        masks: by row, [W] uint32 with a bit per token id.

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
    """Rule out, in place, all tokens of some rows but these.

    Args:
        logits: [R, V] float32.
        allowed: rows, each with the ids that it keeps, as 64-bit integers; those outside V count for nothing.
    """
    for row, token_ids in allowed:
        ids = np.frombuffer(token_ids, dtype=np.int64)
        kept = torch.from_numpy(ids[(ids >= 0) & (ids < logits.shape[1])]).to(logits.device, non_blocking=True)
        values = logits[row, kept]
        logits[row] = torch.where(logits[row] < math.inf, -math.inf, logits[row])
        logits[row, kept] = values


def ban_(logits: Tensor, banned: Sequence[tuple[int, Collection[int]]]) -> None:
    """Rule out, in place, some tokens of some rows, but not where nothing else is left: a choice has to go on.

    Args:
        logits: [R, V] float32.
        banned: rows, each with the ids that it loses; those outside V count for nothing.
    """
    for row, token_ids in banned:
        ids = torch.tensor([i for i in sorted(token_ids) if i < logits.shape[1]], dtype=torch.int64)
        ids = ids.to(logits.device, non_blocking=True)
        values = logits[row, ids]
        banned_values = torch.where(values < math.inf, -math.inf, values)
        logits[row, ids] = banned_values
        is_nothing_left = (logits[row] == -math.inf).all()  # not asked for: a GPU would be waited for
        logits[row, ids] = torch.where(is_nothing_left, values, banned_values)
