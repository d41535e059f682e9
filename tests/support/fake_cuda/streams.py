"""Streams, events and graphs of the device: operations wait in order until somebody waits for them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

Operation = Callable[[], None]
NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"


class UseAfterFree(AssertionError):
    """A graph reads or writes memory that belongs to somebody else by now."""


class Memory:
    """What an allocator has given out: the life of one storage. Tensors over it hold it, operations do not.

    When the last tensor is gone the next one of its stream may get it: it is filled with ones, behind what is in that
    stream by then.
    """

    def __init__(
        self, store: torch.UntypedStorage, stream: Stream, graph: Graph | None, on_free: Callable[[int], None]
    ) -> None:
        """``graph``: of whose pool it is; ``on_free`` is told how many bytes are given back."""
        self.store = store
        self.stream = stream
        self.graph = graph
        self._on_free = on_free

    def __del__(self) -> None:
        self._on_free(self.store.nbytes())
        if self.graph is None:
            self.stream.todo.append(lambda store=self.store: spoil(store))


def spoil(store: torch.UntypedStorage) -> None:
    """Fill with bits that are NaN, or minus one."""
    torch.tensor([], dtype=torch.uint8).set_(store).fill_(0xFF)


class Stream:
    """Runs what is put into it when somebody waits, and not before."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device_index = 0
        self.todo: deque[Operation] = deque()
        self.capturing: Graph | None = None
        self.num_run = 0

    def put(self, operation: Operation) -> None:
        """Behind all that is there, or into the graph that is captured."""
        if self.capturing is None:
            self.todo.append(operation)
        else:
            self.capturing.operations.append(operation)

    @property
    def end(self) -> int:
        """What `num_run` is when all that is there is run."""
        return self.num_run + len(self.todo)

    def run(self, until: int | None = None) -> None:
        """Run all, or up to an `end`."""
        until = self.end if until is None else until
        with torch.inference_mode():
            while self.num_run < until and self.todo:
                operation = self.todo.popleft()
                self.num_run += 1
                operation()

    def synchronize(self) -> None:
        """Wait for all that is there. Raises where it is captured."""
        self.refuse_while_capturing()
        self.run()

    def wait_stream(self, other: Stream) -> None:
        """What comes next comes after what is in the other stream now."""
        end = other.end
        self.put(lambda: other.run(end))

    def wait_event(self, event: Event) -> None:
        """What comes next comes after what the event was recorded behind."""
        self.put(event.run)

    def record_event(self, event: Event | None = None) -> Event:
        """An event behind what is there."""
        event = event or Event()
        event.record(self)
        return event

    def refuse_while_capturing(self) -> None:
        """Raise what CUDA does where something waits in a capture, which is lost."""
        if self.capturing is not None:
            self.capturing.is_lost = True
            raise RuntimeError(NOT_PERMITTED)


class Event:
    """A place in a stream. It is looked at in vain some times before the device comes there."""

    num_looks = 1

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._is_timed = enable_timing
        self._stream: Stream | None = None
        self._end = self._looked = 0

    def record(self, stream: Stream) -> None:
        """Behind what is there now."""
        self._stream, self._end = stream, stream.end

    def query(self) -> bool:
        """Whether all before it is done; never recorded, it is."""
        if self._stream is None or self._stream.num_run >= self._end:
            return True
        self._looked += 1
        if self._looked > self.num_looks:
            self.run()
        return self._looked > self.num_looks

    def run(self) -> None:
        """Have the device come to it."""
        if self._stream is not None:
            self._stream.run(self._end)

    synchronize = run

    def elapsed_time(self, end: Event) -> float:
        """A millisecond. Raises where one has not happened, as CUDA does."""
        for each in (self, end):
            if not each._is_timed or each._stream is None or each._stream.num_run < each._end:
                raise RuntimeError("CUDA error: device not ready")
        return 1.0


class Graph:
    """Operations with the memory that they had when they were captured, whatever has become of it."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.operations: list[Operation] = []
        self.is_lost = False
        self._own: list[tuple[torch.UntypedStorage, weakref.ref[Memory]]] = []
        self._others: dict[int, tuple[weakref.ref[Memory], str]] = {}
        self.current: Callable[[], Stream] = lambda: Stream()

    def takes(self, memory: Memory, name: str) -> None:
        """An operation of it uses this memory."""
        if memory.graph is not self:
            self._others.setdefault(id(memory.store), (weakref.ref(memory), name))

    def owns(self, memory: Memory) -> None:
        """This memory is of its pool."""
        self._own.append((memory.store, weakref.ref(memory)))

    def spoil(self) -> None:
        """What nobody has kept of its pool is anything."""
        for store, memory in self._own:
            if memory() is None:
                spoil(store)

    @property
    def num_bytes(self) -> int:
        """Of its pool."""
        return sum(store.nbytes() for store, _ in self._own)

    def replay(self) -> None:
        """Run all again. Raises ``UseAfterFree``."""
        for memory, name in self._others.values():
            if memory() is None:
                raise UseAfterFree(f"{name} of a captured graph uses memory that was freed after its capture")
        stream = self.current()
        stream.put(self.spoil)
        for operation in self.operations:
            stream.put(operation)
