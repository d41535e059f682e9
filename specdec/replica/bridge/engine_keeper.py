"""Keep a replica's engine running: one that ends after it was ready is replaced, with a new instance id."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable

import structlog

from specdec.replica.bridge.engine_process import EngineProcess
from specdec.service.listening import StartupFailed
from specdec.telemetry import RelayMetrics
from specdec.v1 import common_pb2
from specdec.wire.backoff import RestartPolicy

_WINDOW_S = 600.0
"""Seconds in which restarts are counted."""
_KILLED_S = 10.0
"""Seconds that the kernel may take to end a killed process."""
_POLICY = RestartPolicy()
_log = structlog.get_logger(__name__)


class EngineKeeper:
    """The engine of a replica, over several processes.

    After its first start, an engine that ends is replaced, after 0.25 s, then 0.5 s, and so on up to 10 s; at most
    `max_restarts` times within ten minutes, without the time that loading takes.
    """

    def __init__(
        self,
        make: Callable[[], EngineProcess],
        *,
        load_timeout_s: float,
        max_restarts: int,
        metrics: RelayMetrics,
        on_ready: Callable[[bool], Awaitable[None]],
        on_exit: Callable[[int], None],
    ) -> None:
        """Start nothing yet.

        Args:
            make: makes a process, not started.
            load_timeout_s: time until a process must be ready.
            max_restarts: restarts allowed after the first start.
            metrics: counts restarts.
            on_ready: called with False when the engine has ended, and with True when the next one is ready; only after
                `start` has returned.
            on_exit: called with the id of each process that has ended.
        """
        self.engine = make()
        """The latest process."""
        self._make = make
        self._load_timeout_s = load_timeout_s
        self._max_restarts = max_restarts
        self._metrics = metrics
        self._on_ready = on_ready
        self._on_exit = on_exit
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._keeping: asyncio.Task[None] | None = None
        self._last_end = common_pb2.EngineEnd()
        self._restarts: deque[float] = deque()
        self._loading_s = 0.0

    @property
    def last_end(self) -> common_pb2.EngineEnd:
        """The last end of an engine that had been ready; empty if there was none."""
        engine = self.engine
        return self._last_end if engine.how_ended is None or engine.info is None else engine.how_ended

    async def start(self) -> common_pb2.GetReplicaInfoResponse:
        """Start the first engine; returns its info once it is ready. Raises StartupFailed."""
        info = await self._launch()
        self._keeping = asyncio.create_task(self._keep(), name="engine-keeper")
        self._keeping.add_done_callback(self._on_keeping_done)
        return info

    async def wait_failed(self) -> str:
        """Wait until no engine will be started any more; returns the reason."""
        return await asyncio.shield(self._failed)

    async def drain(self, timeout_s: float) -> bool:
        """EngineProcess.drain. An engine that ends from now on is not replaced."""
        self._leave()
        return await self.engine.drain(timeout_s)

    async def stop(self, grace_s: float) -> None:
        """Stop the engine, for good."""
        self._leave()
        await self.engine.stop(grace_s)

    def _leave(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()

    async def _launch(self) -> common_pb2.GetReplicaInfoResponse:
        began_s = time.monotonic()
        try:
            self.engine.start()
            return await asyncio.wait_for(self.engine.wait_ready(), self._load_timeout_s)
        except TimeoutError as error:
            message = f"load_timeout_s: the model was not ready after {self._load_timeout_s} s"
            raise StartupFailed(message) from error
        except (RuntimeError, OSError) as error:  # the machine may be out of memory or process ids
            raise StartupFailed(str(error)) from error
        finally:
            self._loading_s += time.monotonic() - began_s

    async def _keep(self) -> None:
        while not self._failed.done():
            reason = await self.engine.wait_ended()
            await self._on_ready(False)
            await self._replace(reason)

    async def _replace(self, reason: str) -> None:
        """Start engines until one is ready, or the restarts are used up."""
        ended = self.engine
        while True:
            if ended.pid is not None:  # else it never started
                try:
                    await asyncio.wait_for(ended.wait_exited(), _KILLED_S)
                except TimeoutError:
                    self._give_up(f"the engine process {ended.pid} cannot be killed: {reason}")
                    return
                self._on_exit(ended.pid)
            if not self._may_restart():
                times = len(self._restarts) + 1
                self._give_up(reason if times == 1 else f"{reason}; the engine ended {times} times in ten minutes")
                return
            self._metrics.engine_restarts.labels(str(ended.end_cause)).inc()
            wait_s = _POLICY.backoff.wait_s(len(self._restarts))
            _log.warning(
                "engine_restarts",
                reason=reason,
                cause=str(ended.end_cause),
                number=len(self._restarts),
                most=self._max_restarts,
                wait_s=wait_s,
            )
            await asyncio.sleep(wait_s)
            self._last_end = self.last_end
            self.engine = ended = self._make()
            await self._on_ready(False)
            try:
                await self._launch()
            except StartupFailed as error:
                reason = str(error)
                with contextlib.suppress(TimeoutError):  # the loop above handles a process that cannot be killed
                    await asyncio.wait_for(ended.stop(0.0), _KILLED_S)
                continue
            _log.info("engine_ready_again", pid=ended.pid, instance_id=ended.instance_id)
            await self._on_ready(True)
            return

    def _may_restart(self) -> bool:
        """Count one more restart; False if it is not allowed."""
        now_s = time.monotonic() - self._loading_s
        while self._restarts and self._restarts[0] <= now_s - _WINDOW_S:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts:
            return False
        self._restarts.append(now_s)
        return True

    def _give_up(self, reason: str) -> None:
        if not self._failed.done():
            self._failed.set_result(reason)

    def _on_keeping_done(self, task: asyncio.Task[None]) -> None:
        """The service must not look healthy after the keeper has failed."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("engine_keeper_failed", exc_info=error)
            self._give_up(f"the engine keeper failed: {error!r}")
