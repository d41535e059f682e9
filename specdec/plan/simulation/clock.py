"""An event loop on SimPy's clock, on which coroutines of the services run as they are."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, TypeVarTuple, Unpack

import simpy

_Result = TypeVar("_Result")
_Ts = TypeVarTuple("_Ts")

_A_MOMENT_S = 1e-6
"""Seconds in which cancelled tasks end: they wait for nothing."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """Futures, tasks and timers of asyncio as events of a SimPy environment: no threads, files or signals.

    Callbacks of one time run in the order in which they were scheduled, so equal inputs give equal runs.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self._is_running = False
        super().__init__()
        self.env = env
        self.faults: list[dict[str, Any]] = []
        """Contexts of exceptions that nobody caught."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def time(self) -> float:
        """The simulated time, in seconds."""
        return float(self.env.now)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it `asyncio.get_running_loop` returns this loop."""
        before, was_running = asyncio._get_running_loop(), self._is_running
        asyncio._set_running_loop(self)
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = was_running
            asyncio._set_running_loop(before)

    def run(self, until_s: float) -> None:
        """Let time pass until `until_s`. Raises RuntimeError if a task failed and nobody looked."""
        with self.running():
            self.env.run(until=until_s)
        if self.faults:
            raise RuntimeError(f"a simulated task failed: {self.faults[0]}") from self.faults[0].get("exception")

    def close(self) -> None:
        """Cancel what still runs, so that nothing is left to the garbage collector. The time stands."""
        with self.running():
            for task in list(self._tasks):
                task.cancel()
            self.env.run(until=self.env.now + _A_MOMENT_S)
        super().close()

    def start(self, coroutine: Coroutine[Any, Any, _Result]) -> asyncio.Task[_Result]:
        """Run a coroutine as a task that is kept until it ends; its failure ends the run."""
        task = self.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.faults.append({"message": "a task failed", "exception": error})

    # What asyncio's own classes need of a loop.

    def get_debug(self) -> bool:
        """Debug mode is off."""
        return False

    def is_running(self) -> bool:
        """Whether callbacks may run."""
        return self._is_running

    def call_soon(
        self,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Run a callback at the present time, after what is scheduled for it already."""
        handle = asyncio.Handle(callback, args, self, context)
        self._schedule(0.0, handle)
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run a callback after `delay` seconds."""
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Run a callback at a time, or now if that is past."""
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._schedule(max(0.0, when - self.time()), handle)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        """A future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, _Result] | Coroutine[Any, Any, _Result],
        *,
        name: object = None,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[_Result]:
        """A task of this loop."""
        return asyncio.Task(coro, loop=self, name=None if name is None else str(name), context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what nobody caught; `run` raises it."""
        self.faults.append(context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled handle stays in SimPy's queue and does nothing when its time comes."""

    def _schedule(self, delay_s: float, handle: asyncio.Handle) -> None:
        event = self.env.timeout(delay_s)
        if event.callbacks is not None:
            event.callbacks.append(lambda _: None if handle.cancelled() else handle._run())
