"""Passes enqueued in a CUDA stream, captures of repeated passes as CUDA graphs, and one cache of these."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch

from specdec.engine.errors import is_out_of_memory
from specdec.engine.runner import ResultT

_MOST_GRAPHS = 96
"""Captured graphs of one model, its drafts' rounds and heads included."""
_MOST_AHEAD_S = 20.0
"""Seconds of captures before the first request."""
CAPTURE_BYTES = 512 << 20
"""Bytes that captured graphs hold above which none is captured."""
_MOST_FAILURES = 3
"""Failed captures after which a store tries none."""
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
    """Captures CUDA graphs, which share their memory: a replay overwrites the results of other graphs."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None  # one for all captures: libraries keep a workspace per stream
        self._held_bytes = 0

    def held_bytes(self) -> int:
        """Bytes of memory that captured passes hold."""
        return self._held_bytes

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


class GraphCache:
    """All captured graphs over one pool of memory: at most 96, the least recently used one is dropped first."""

    def __init__(self, capture: CudaCapture, *, is_alone: bool = True) -> None:
        """`is_alone`: no other rank captures. Ranks must capture the same passes, as a capture takes part in their
        collectives: no limit holds, and a failed capture raises."""
        self.capture = capture
        self.is_alone = is_alone
        self.ahead_s = 0.0
        """Seconds of captures before the first request."""
        self._graphs: OrderedDict[tuple[object, object], Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graphs)

    def has_memory(self) -> bool:
        """Whether one more graph may be captured."""
        return not self.is_alone or self.capture.held_bytes() <= CAPTURE_BYTES

    def has_room(self, more_s: float) -> bool:
        """Whether more may be captured before the first request, after ``more_s`` seconds beside ``ahead_s``."""
        return self.has_memory() and (not self.is_alone or self.ahead_s + more_s <= _MOST_AHEAD_S)

    def find(self, owner: object, key: object) -> Any:
        """An owner's graph; None: it is not there."""
        graph = self._graphs.get((owner, key))
        if graph is not None:
            self._graphs.move_to_end((owner, key))
        return graph

    def keep(self, owner: object, key: object, graph: object) -> None:
        """Add a graph."""
        self._graphs[owner, key] = graph
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)

    def halve(self) -> None:
        """Drop the half that was used longest ago, for its memory."""
        for _ in range(-(-len(self._graphs) // 2)):
            self._graphs.popitem(last=False)

    def drop(self, owner: object) -> None:
        """Drop an owner's graphs."""
        for key in [key for key in list(self._graphs) if key[0] is owner]:
            del self._graphs[key]

    def count(self, owner: object) -> int:
        """Number of an owner's graphs."""
        return sum(each is owner for each, _ in self._graphs)


class GraphStore(Generic[KeyT, GraphT]):
    """One owner's graphs in a cache, which drops them when the store is gone. A subclass says how they are captured.

    `get` returns None, so that kernels are launched one by one, where a capture fails, after three such failures,
    while the cache has no memory for another graph, and while no graph may be replayed.
    """

    def __init__(self, graphs: GraphCache, subject: str, may_replay: Callable[[], bool] = lambda: True) -> None:
        """`subject`: name of the graphs in logs; `may_replay`: called by each `get`."""
        self.graphs = graphs
        """The cache, which other stores share."""
        self._owner = object()  # not the store: the cache would keep it, and the weights of an exchanged head with it
        self._subject = subject
        self._may_replay = may_replay
        self._num_failures = 0
        weakref.finalize(self, _drop, weakref.ref(graphs), self._owner).atexit = False

    @abstractmethod
    def captured(self, key: KeyT) -> GraphT:
        """Capture a graph, which must not refer to the store."""

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs."""
        return self.graphs.count(self._owner)

    @property
    def has_failed(self) -> bool:
        """Whether no graph is captured or replayed any more."""
        return self._num_failures >= _MOST_FAILURES

    def get(self, key: KeyT) -> GraphT | None:
        """The graph of a key, captured now if it is missing; None: see the class."""
        if self.has_failed or not self._may_replay():
            return None
        graph: GraphT | None = self.graphs.find(self._owner, key)
        if graph is not None or not self.graphs.has_memory():
            return graph
        try:
            graph = self.captured(key)
        except RuntimeError as error:
            if not self.graphs.is_alone:
                raise
            self._num_failures += 1
            _logger.exception(f"{self._subject} could not be captured; its kernels are launched one by one")
            if is_out_of_memory(error):
                self.graphs.halve()
            if self.has_failed:
                self.stop()
            return None
        self.graphs.keep(self._owner, key, graph)
        return graph

    def capture_ahead(self, keys: Iterable[KeyT], clock: Callable[[], float] = time.monotonic) -> None:
        """Capture graphs before the first request until one fails, or the cache has no room."""
        began_s, cache = clock(), self.graphs
        is_complete = all(cache.has_room(clock() - began_s) and self.get(key) is not None for key in keys)
        elapsed_s = clock() - began_s
        cache.ahead_s += elapsed_s
        figures = {"num": self.num_graphs, "seconds": round(elapsed_s, 3), "complete": is_complete}
        _logger.info("graphs_captured", extra={"subject": self._subject, **figures})

    def stop(self) -> None:
        """Replay nothing from now on, and drop all graphs."""
        self._num_failures = _MOST_FAILURES
        self.graphs.drop(self._owner)


def _drop(cache: weakref.ref[GraphCache], owner: object) -> None:
    if (found := cache()) is not None:
        found.drop(owner)
