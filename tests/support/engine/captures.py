"""Captured steps without a GPU."""

from collections.abc import Callable

import torch


class Captures:
    """Captures as a device does: what was captured is run again over the same tensors, into the same logits."""

    def __init__(self) -> None:
        self.num_captured = self.num_replayed = 0

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """See ``specdec.engine.cuda.buckets.Capture``; logits are NaN until the first replay."""
        self.num_captured += 1
        logits = torch.full_like(run(), torch.nan)

        def replay() -> None:
            self.num_replayed += 1
            logits.copy_(run())

        return replay, logits
