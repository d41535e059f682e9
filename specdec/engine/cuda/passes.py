"""Passes whose kernels wait in a device's stream, captures of passes that are run again and again, and their store."""

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


class GraphStore(Generic[KeyT, GraphT]):
    """Captured graphs by key. The least recently used one is dropped where there are too many.

    After a capture that fails, or while none may be replayed, no graph is found: kernels are launched one by one.
    """

    def __init__(self, subject: str, may_replay: Callable[[], bool] = lambda: True) -> None:
        """`subject` names in logs what is captured; `may_replay` is asked each time."""
        self.has_failed = False
        self._subject = subject
        self._may_replay = may_replay
        self._graphs: OrderedDict[KeyT, GraphT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, key: KeyT, capture: Callable[[KeyT], GraphT]) -> GraphT | None:
        """The graph of a key, captured now where it is missing; None where it cannot be captured."""
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
