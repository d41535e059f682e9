"""Passes whose kernels wait in a device's stream."""

from __future__ import annotations

from collections.abc import Callable

import torch


class EnqueuedPass:
    """A pass that was launched and that nobody has waited for (``specdec.engine.runner.LaunchedPass``).

    Whatever is launched on its logits comes behind it in the stream. Cost: two events.
    """

    def __init__(
        self, run: Callable[[], torch.Tensor], device: torch.device, end_before: torch.cuda.Event | None
    ) -> None:
        """Launch a pass on the present stream; ``end_before``: of the pass before it, if there was any."""
        stream = torch.cuda.current_stream(device)
        self.end: torch.cuda.Event = torch.cuda.Event(enable_timing=True)
        self._begin: torch.cuda.Event = torch.cuda.Event(enable_timing=True)
        self._end_before = end_before
        self._begin.record(stream)
        self._logits = run()
        self.end.record(stream)

    def is_done(self) -> bool:
        """Whether the device has come to the pass's end. Does not wait."""
        return bool(self.end.query())

    def logits(self) -> torch.Tensor:
        """Of the pass, on the device, which may be at work on them."""
        return self._logits

    def gap_s(self) -> float | None:
        """See ``LaunchedPass``."""
        if self._end_before is None or not self._begin.query():
            return None
        return float(self._end_before.elapsed_time(self._begin)) / 1e3
