"""Masks forbidden tokens in logits, before bias, penalties, temperature, cuts and noise."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def masked_logits(logits: Tensor, masks: Mapping[int, npt.NDArray[np.uint32]]) -> Tensor:
    """Logits with minus infinity at forbidden tokens.

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
