"""Captured steps without a GPU."""

from collections.abc import Callable

import torch

from specdec.engine.cuda.passes import CudaCapture


class Captures(CudaCapture):
    """Captures as a device does: a replay runs the captured step over the same tensors, into the same logits."""

    def __init__(self, bytes_each: int = 0, *, is_alone: bool = True) -> None:
        super().__init__(is_alone=is_alone)
        self.num_captured = self.num_replayed = 0
        self._bytes_each = bytes_each

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """See ``CudaCapture``; the logits are -1 until the first replay."""
        self.num_captured += 1
        self.held_bytes += self._bytes_each
        logits = torch.empty_like(run()).fill_(-1)

        def replay() -> None:
            self.num_replayed += 1
            logits.copy_(run())

        return replay, logits
