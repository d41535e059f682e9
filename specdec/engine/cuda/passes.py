"""Passes enqueued in a CUDA stream, and captures of repeated passes as CUDA graphs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from specdec.engine.runner import ResultT

_MOST_AHEAD_S = 20.0
"""Seconds of captures before the first request."""
CAPTURE_BYTES = 512 << 20
"""Bytes that captured graphs hold above which none is captured."""


class EnqueuedPass:
    """A pass that was launched without waiting for it (``specdec.engine.runner.LaunchedPass``).

    Kernels launched later on its logits run after it in the stream. Cost: two events.
    """

    def __init__(
        self, run: Callable[[], torch.Tensor], device: torch.device, end_before: torch.cuda.Event | None
    ) -> None:
        """Launch a pass on the current stream; ``end_before``: end of the pass before it, None: there was none."""
        stream = torch.cuda.current_stream(device)
        self.end: torch.cuda.Event = torch.cuda.Event(enable_timing=True)
        self._begin: torch.cuda.Event = torch.cuda.Event(enable_timing=True)
        self._end_before = end_before
        self._begin.record(stream)
        self._logits = run()
        self.end.record(stream)

    def is_done(self) -> bool:
        """Whether the device has finished the pass. Does not wait."""
        return bool(self.end.query())

    def logits(self) -> torch.Tensor:
        """Logits of the pass, on the device, which may still compute them."""
        return self._logits

    def behind(self, work: Callable[[torch.Tensor], ResultT]) -> Callable[[], ResultT]:
        """See ``LaunchedPass``."""
        found = work(self._logits)
        self.end.record(torch.cuda.current_stream(self._logits.device))
        return lambda: found

    def gap_s(self) -> float | None:
        """See ``LaunchedPass``."""
        if self._end_before is None or not self._begin.query():
            return None
        return float(self._end_before.elapsed_time(self._begin)) / 1e3


class CudaCapture:
    """Captures CUDA graphs, which share their memory: a replay overwrites the results of others."""

    def __init__(self, *, is_alone: bool = True) -> None:
        """`is_alone`: no other rank captures. Ranks must capture the same passes, as a capture takes part in their
        collectives: no limit holds, and a failed capture raises."""
        self.is_alone = is_alone
        self.ahead_s = 0.0
        """Seconds of captures before the first request."""
        self.stores: weakref.WeakSet[Any] = weakref.WeakSet()
        """Who has captured graphs, each a ``BucketedPasses``."""
        self._pool: Any = None
        self._stream: Any = None  # one for all captures: libraries keep a workspace per stream
        self.held_bytes = 0
        """Bytes of memory that captured passes hold."""

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs."""
        return sum(store.num_graphs for store in self.stores)

    def has_memory(self) -> bool:
        """Whether one more graph may be captured."""
        if not self.num_graphs:  # torch has freed their memory, and refuses a pool whose graphs are gone
            self._pool, self.held_bytes = None, 0
        return not self.is_alone or self.held_bytes <= CAPTURE_BYTES

    def has_room(self, more_s: float) -> bool:
        """Whether more may be captured before the first request, after ``more_s`` seconds beside ``ahead_s``."""
        return self.has_memory() and (not self.is_alone or self.ahead_s + more_s <= _MOST_AHEAD_S)

    def drop(self) -> None:
        """Drop all graphs, for their memory, which torch frees only with the last of them."""
        for store in self.stores:
            store.drop()

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Capture a function of no arguments; returns a function that replays it, and the tensor that a replay fills.

        The caller must keep the tensors that the function uses: the replay does not hold them. Two runs before the
        capture compile kernels and initialize libraries.
        """
        outer = torch.cuda.current_stream()
        stream = self._stream = self._stream or torch.cuda.Stream()
        stream.wait_stream(outer)
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        outer.wait_stream(stream)
        pool = self._pool = self._pool or torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # as the capture does: memory left by those runs would hide what it takes
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as NCCL's, may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                logits = run()
        except BaseException:
            # After a failed capture torch leaves the capture's stream current and its allocator in capture mode, in
            # which it never frees memory. Nothing ends that mode of its allocator of host memory, for this pool.
            torch.cuda.set_stream(outer)
            self._pool = None
            with contextlib.suppress(RuntimeError):  # the capture had already ended
                torch._C._cuda_endAllocateToPool(outer.device_index, pool)
                torch._C._cuda_releasePool(outer.device_index, pool)
            raise
        self.held_bytes += max(0, torch.cuda.memory_reserved() - before)
        return graph.replay, logits
