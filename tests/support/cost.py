"""Cost as a count of lines or calls, the same on every machine and under every load, or as what a process took."""

import gc
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any


def lines_run(call: Callable[[], object]) -> int:
    """Lines of Python that `call` runs in this thread, each pass of a loop counted; C code does not count."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before, was_enabled = sys.gettrace(), gc.isenabled()
    gc.disable()  # a collection would run the finalizers and callbacks of others
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if was_enabled:
            gc.enable()
    return count


@contextmanager
def counting_calls() -> Iterator[Counter[str]]:
    """Count this thread's calls of Python and C functions, as `total()`, until the end of the context."""
    calls: Counter[str] = Counter()

    def profile(_frame: FrameType, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            calls[event] += 1

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


@dataclass(slots=True)
class Allocated:
    """What Python allocates, in all threads."""

    peak_bytes: int = 0
    """Known at the end of the context."""


@contextmanager
def counting_allocated() -> Iterator[Allocated]:
    """Count the bytes that are allocated at once from now on, at their highest, until the end of the context."""
    allocated = Allocated()
    tracemalloc.start()
    try:
        yield allocated
    finally:
        _, allocated.peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()


class Spent:
    """What this thread and this process take from now on."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        self._before = _resident("VmRSS")
        self._loop_s, self._cpu_s = time.thread_time(), time.process_time()

    def until_now(self) -> tuple[float, float, int]:
        """Seconds of this thread and of the process, and bytes at the peak."""
        spent = time.thread_time() - self._loop_s, time.process_time() - self._cpu_s
        return *spent, _resident("VmHWM") - self._before


def _resident(name: str) -> int:
    """A figure of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
