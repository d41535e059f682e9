"""Passes whose kernels wait in a device's stream, and captures of what is put there again and again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

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


class CudaCapture:
    """Captures CUDA graphs, which share their memory: what one has computed is gone when another is replayed.

    It is a ``specdec.engine.cuda.buckets.Capture``.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None  # one for all: libraries keep a workspace for each that they have seen
        self._held_bytes = 0

    def held_bytes(self) -> int:
        """See ``Capture``."""
        return self._held_bytes

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """See ``Capture``. After two runs in which kernels are compiled and libraries set up."""
        outer = torch.cuda.current_stream()
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(outer)
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        outer.wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # as the capture does: what those runs leave behind would hide what it takes
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may ask the device for something meanwhile, as NCCL's does.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                logits = run()
        except BaseException:
            # torch leaves a capture that fails as the current stream, and its allocator in it: never again would that
            # give memory back.
            torch.cuda.set_stream(outer)
            with contextlib.suppress(RuntimeError):  # it had come to the end
                torch._C._cuda_endAllocateToPool(outer.device_index, self._pool)
            raise
        self._held_bytes += max(0, torch.cuda.memory_reserved() - before)
        return graph.replay, logits
