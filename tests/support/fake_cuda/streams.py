"""Streams, events and graphs of the fake device: queued operations run in order when something waits for them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

Operation = Callable[[], None]
NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"


class UseAfterFree(AssertionError):
    """A graph uses memory that was freed after its capture."""


class Memory:
    """One allocation and its life: tensors over it keep it, operations do not.

    When its last tensor is gone, the stream's next allocation may reuse it. Its bits are therefore set to ones, after
    the operations in the stream.
    """

    def __init__(
        self, store: torch.UntypedStorage, stream: Stream, graph: Graph | None, on_free: Callable[[int], None]
    ) -> None:
        """``graph``: the graph whose pool it belongs to; ``on_free`` gets the number of freed bytes."""
        self.store = store
        self.stream = stream
        self.graph = graph
        self._on_free = on_free
        self.is_of_inference = torch.is_inference_mode_enabled()

    def __del__(self) -> None:
        self._on_free(self.store.nbytes())
        if self.graph is None:
            self.stream.todo.append(lambda store=self.store: spoil(store))


def spoil(store: torch.UntypedStorage) -> None:
    """Set all bits to ones, which are NaN as floats and -1 as integers."""
    torch.tensor([], dtype=torch.uint8).set_(store).fill_(0xFF)


class Stream:
    """Runs its operations only when something waits for them."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device_index = 0
        self.todo: deque[Operation] = deque()
        self.capturing: Graph | None = None
        self.num_run = 0

    def put(self, operation: Operation) -> None:
        """Queue an operation, or add it to the graph under capture."""
        if self.capturing is None:
            self.todo.append(operation)
        else:
            self.capturing.operations.append(operation)

    @property
    def end(self) -> int:
        """Value of `num_run` after all queued operations."""
        return self.num_run + len(self.todo)

    def run(self, until: int | None = None) -> None:
        """Run all queued operations, or those up to an `end`."""
        until = self.end if until is None else until
        with torch.inference_mode():
            while self.num_run < until and self.todo:
                operation = self.todo.popleft()
                self.num_run += 1
                operation()

    def synchronize(self) -> None:
        """Run all queued operations. Raises RuntimeError during a capture."""
        self.refuse_while_capturing()
        self.run()

    def wait_stream(self, other: Stream) -> None:
        """Order later operations after the other stream's present ones."""
        end = other.end
        self.put(lambda: other.run(end))

    def wait_event(self, event: Event) -> None:
        """Order later operations after the event."""
        self.put(event.run)

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event after the queued operations."""
        event = event or Event()
        event.record(self)
        return event

    def refuse_while_capturing(self) -> None:
        """Raise CUDA's error for a wait during a capture, and mark the capture as lost."""
        if self.capturing is not None:
            self.capturing.is_lost = True
            raise RuntimeError(NOT_PERMITTED)


class Event:
    """A place in a stream; the first `num_looks` queries find that the device has not reached it."""

    num_looks = 1

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._is_timed = enable_timing
        self._stream: Stream | None = None
        self._end = self._looked = 0

    def record(self, stream: Stream) -> None:
        """Record the event after the stream's queued operations."""
        self._stream, self._end = stream, stream.end

    def query(self) -> bool:
        """Whether the operations before it have run; true for an event that was not recorded."""
        if self._stream is None or self._stream.num_run >= self._end:
            return True
        self._looked += 1
        if self._looked > self.num_looks:
            self.run()
        return self._looked > self.num_looks

    def run(self) -> None:
        """Run the operations before it."""
        if self._stream is not None:
            self._stream.run(self._end)

    def synchronize(self) -> None:
        """Wait for the operations before it."""
        self.run()

    def elapsed_time(self, end: Event) -> float:
        """One millisecond. Raises CUDA's error where an event has not happened."""
        for each in (self, end):
            if not each._is_timed or each._stream is None or each._stream.num_run < each._end:
                raise RuntimeError("CUDA error: device not ready")
        return 1.0


class Graph:
    """Captured operations over the memory of their capture, which may have been freed since."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.operations: list[Operation] = []
        self.is_lost = False
        self._own: list[tuple[torch.UntypedStorage, weakref.ref[Memory]]] = []
        self._others: dict[int, tuple[weakref.ref[Memory], str]] = {}
        self.current: Callable[[], Stream] = lambda: Stream()

    def takes(self, memory: Memory, name: str) -> None:
        """Record that an operation of the graph uses this memory."""
        if memory.graph is not self:
            self._others.setdefault(id(memory.store), (weakref.ref(memory), name))

    def owns(self, memory: Memory) -> None:
        """Record that this memory belongs to the graph's pool."""
        self._own.append((memory.store, weakref.ref(memory)))

    def spoil(self) -> None:
        """Fill the pool's freed memory with invalid content."""
        for store, memory in self._own:
            if memory() is None:
                spoil(store)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pool."""
        return sum(store.nbytes() for store, _ in self._own)

    def replay(self) -> None:
        """Queue all operations again. Raises ``UseAfterFree``."""
        for memory, name in self._others.values():
            if memory() is None:
                raise UseAfterFree(f"{name} of a captured graph uses memory that was freed after its capture")
        stream = self.current()
        stream.put(self.spoil)
        for operation in self.operations:
            stream.put(operation)
