"""An event loop whose time passes only when nobody has anything to do, and processes that it can freeze and kill.

What a process runs it runs in a context of its own, which all tasks, timers and callbacks inherit: so the loop knows
whose each of them is.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")
_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
_EPOCH_S = 1_000_000.0
"""Clocks of machines that have been up for long: nothing may rely on a small number."""


_MOST_TURNS = 50_000


class StandStill(Exception):
    """Nobody has anything to do, ever."""


class Frenzy(Exception):
    """Somebody is busy for ever, and no time passes."""


def current_process() -> Process | None:
    """The process that runs now; None: the world around them."""
    return _PROCESS.get()


class Process:
    """One life of a program. Dead ones do nothing any more, not even clean up."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_frozen = False
        self.is_winding_up = False
        """It may clean up, though it is dead."""
        self._loop = loop
        loop.processes.append(self)
        self._context = contextvars.copy_context()
        self._context.run(_PROCESS.set, self)
        self._held: list[asyncio.Handle] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}

    def __repr__(self) -> str:
        return self.name

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """Those that have not ended."""
        self._tasks = {task: None for task in self._tasks if not task.done()}
        return list(self._tasks)

    def start(self, coroutine: Coroutine[Any, Any, _Result], name: str) -> asyncio.Task[_Result]:
        """Run a coroutine in this process."""
        task: asyncio.Task[_Result] = self._context.run(self._loop.create_task, coroutine, name=name)
        return task

    def call(self, function: Callable[..., _Result], *args: Any) -> _Result:
        """Call a function as this process would."""
        return self._context.copy().run(function, *args)

    def freeze(self) -> None:
        """As SIGSTOP: nothing of it runs until `thaw`."""
        self.is_frozen = True

    def thaw(self) -> None:
        """As SIGCONT: what became due meanwhile runs now, in its order."""
        self.is_frozen = False
        held, self._held = self._held, []
        self._loop.run_soon(held)

    def kill(self) -> None:
        """As SIGKILL."""
        self.is_alive = False

    def wind_up(self) -> None:
        """Its world ends: it may clean up."""
        self.is_alive = False
        self.is_winding_up = True
        self.thaw()  # a task whose next step was held back cannot even be cancelled

    def holds(self, handle: asyncio.Handle) -> bool:
        """Whether a callback of its must not run now."""
        is_held = not self.is_winding_up and (self.is_frozen or not self.is_alive)
        if is_held:
            self._held.append(handle)
        return is_held

    def adopt(self, task: asyncio.Task[Any]) -> None:
        """Note a task of its."""
        self._tasks[task] = None


class _Handle(asyncio.Handle):
    __slots__ = ()

    def _run(self) -> None:
        process = self._context.get(_PROCESS)
        if process is None or not process.holds(self):
            super()._run()


class _TimerHandle(asyncio.TimerHandle):
    __slots__ = ()

    def _run(self) -> None:
        process = self._context.get(_PROCESS)
        if process is None or not process.holds(self):
            super()._run()


class _NoSelector(selectors.SelectSelector):
    """Waits for nothing: instead the loop's clock jumps to where the wait would have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.jump: Callable[[float], None] = lambda _: None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StandStill
        self.jump(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Deterministic: it knows no file, no thread and no signal, and runs what is due in the order of its times."""

    def __init__(self) -> None:
        self._now_s = _EPOCH_S
        selector = _NoSelector()
        super().__init__(selector)
        selector.jump = self._jump
        self._clock_resolution = 1e-9
        self.processes: list[Process] = []
        """All lives of all programs."""
        self._num_turns = 0
        """Since time passed last."""
        self.on_turn: Callable[[], None] = lambda: None
        """Called after each turn of the loop."""
        self.faults: list[dict[str, Any]] = []
        """What was raised where nobody caught it, but for dead processes."""
        self.set_task_factory(_make_task)
        self.set_exception_handler(self._on_fault)

    def time(self) -> float:
        """Virtual, monotonic."""
        return self._now_s

    def run_for(self, duration_s: float) -> None:
        """Let time pass."""
        self._num_turns = 0
        self.call_at(self._now_s + duration_s, self.stop, context=contextvars.Context())
        self.run_forever()

    def run_until_idle(self) -> None:
        """Run what is due now, and what follows from it, without letting time pass."""
        while self._ready:
            self.call_soon(self.stop, context=contextvars.Context())
            self.run_forever()

    def run_soon(self, handles: list[asyncio.Handle]) -> None:
        """Run handles that were held back."""
        self._ready.extend(handle for handle in handles if not handle.cancelled())

    def timers(self) -> list[asyncio.TimerHandle]:
        """Those of living processes, the next one first."""
        return sorted(timer for timer in self._scheduled if not timer.cancelled() and _is_of_the_living(timer))

    def skip(self, duration_s: float) -> None:
        """Time that who runs now takes for it."""
        self._now_s += duration_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Threads would run beside virtual time: what they are given is done at once."""
        done: asyncio.Future[Any] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        """As always, but that the handle knows whose it is."""
        timer = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def _call_soon(self, callback: Any, args: Any, context: Any) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        self._num_turns += 1
        if self._num_turns > _MOST_TURNS:
            raise Frenzy([repr(handle) for handle in self._ready])
        self.on_turn()

    def _jump(self, duration_s: float) -> None:
        self._now_s += duration_s
        if duration_s > 0:
            self._num_turns = 0

    def _on_fault(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        culprit = context.get("task") or context.get("future")
        process = culprit.process if isinstance(culprit, _Task) else current_process()
        if process is None or process.is_alive:
            self.faults.append(context)


def _is_of_the_living(timer: asyncio.TimerHandle) -> bool:
    process = timer._context.get(_PROCESS)  # type: ignore[attr-defined]
    return process is None or process.is_alive


class _Task(asyncio.Task[Any]):
    process: Process | None = None


def _make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    task = _Task(coroutine, loop=loop, **options)
    context = options.get("context")
    task.process = context.get(_PROCESS) if context is not None else current_process()
    if task.process is not None:
        task.process.adopt(task)
    return task
