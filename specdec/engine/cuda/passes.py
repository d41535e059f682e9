"""Passes whose kernels wait in a device's stream."""

from __future__ import annotations

import torch


class EnqueuedPass:
    """A pass that was launched and that nobody has waited for (``specdec.engine.runner.LaunchedPass``).

    Whatever is launched on its logits comes behind it in the stream. Cost: one event.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        """Of a pass that was launched last on the present stream."""
        self._logits = logits
        self._end = torch.cuda.Event()
        self._end.record(torch.cuda.current_stream(logits.device))

    def is_done(self) -> bool:
        """Whether the device has come to the pass's end. Does not wait."""
        return bool(self._end.query())

    def logits(self) -> torch.Tensor:
        """Of the pass, on the device, which may be at work on them."""
        return self._logits
