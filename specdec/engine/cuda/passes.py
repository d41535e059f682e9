"""Passes enqueued in a CUDA stream, captures of repeated passes as CUDA graphs, and a store of these."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch

_MOST_GRAPHS = 96
"""Captured graphs that one store keeps."""
_logger = logging.getLogger(__name__)

KeyT = TypeVar("KeyT")
GraphT = TypeVar("GraphT")


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

    def gap_s(self) -> float | None:
        """See ``LaunchedPass``."""
        if self._end_before is None or not self._begin.query():
            return None
        return float(self._end_before.elapsed_time(self._begin)) / 1e3


class CudaCapture:
    """Captures CUDA graphs, which share their memory: a replay overwrites the results of other graphs.

    It is a ``specdec.engine.cuda.buckets.Capture``.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None  # one for all captures: libraries keep a workspace per stream
        self._held_bytes = 0

    def held_bytes(self) -> int:
        """See ``Capture``."""
        return self._held_bytes

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """See ``Capture``. Two runs before the capture compile kernels and initialize libraries."""
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
        torch.cuda.empty_cache()  # as the capture does: memory left by those runs would hide what it takes
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as NCCL's, may call CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                logits = run()
        except BaseException:
            # After a failed capture torch leaves the capture's stream current and its allocator in capture mode, in
            # which it never frees memory.
            torch.cuda.set_stream(outer)
            with contextlib.suppress(RuntimeError):  # the capture had already ended
                torch._C._cuda_endAllocateToPool(outer.device_index, self._pool)
            raise
        self._held_bytes += max(0, torch.cuda.memory_reserved() - before)
        return graph.replay, logits


class GraphStore(Generic[KeyT, GraphT]):
    """Captured graphs by key, at most 96; the least recently used one is dropped first.

    After a failed capture, or while no graph may be replayed, `get` returns None: kernels are launched one by one.
    """

    def __init__(self, subject: str, may_replay: Callable[[], bool] = lambda: True) -> None:
        """`subject`: name of the graphs in logs; `may_replay`: called by each `get`."""
        self.has_failed = False
        self._subject = subject
        self._may_replay = may_replay
        self._graphs: OrderedDict[KeyT, GraphT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, key: KeyT, capture: Callable[[KeyT], GraphT]) -> GraphT | None:
        """The graph of a key, captured now if it is missing; None: it cannot be captured, or may not be replayed."""
        if self.has_failed or not self._may_replay():
            return None
        graph = self._graphs.get(key)
        if graph is None:
            try:
                graph = capture(key)
            except RuntimeError:
                _logger.exception(f"{self._subject} could not be captured; its kernels are launched one by one")
                self.has_failed = True
                return None
            self._graphs[key] = graph
            if len(self._graphs) > _MOST_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return graph

    def prepare(
        self,
        keys: Iterable[KeyT],
        capture: Callable[[KeyT], GraphT],
        has_room: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> float:
        """Capture graphs until one fails or `has_room` refuses the seconds so far; returns the seconds it took."""
        began_s = clock()
        is_complete = all(has_room(clock() - began_s) and self.get(key, capture) is not None for key in keys)
        elapsed_s = clock() - began_s
        figures = {"subject": self._subject, "num": len(self), "seconds": round(elapsed_s, 3), "complete": is_complete}
        _logger.info("graphs_captured", extra=figures)
        return elapsed_s

    def clear(self) -> None:
        """Drop all graphs."""
        self._graphs.clear()
