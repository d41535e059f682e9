"""Several coordinator processes behind one port: `python -m specdec.coordinator --num-processes 4 --redis-url ...`.

A coordinator is one event loop, so one process uses one core. The kernel spreads *connections* over the processes
that listen on a shared port (SO_REUSEPORT). The supervisor serves no calls itself:

start        the first process starts alone, so a bad setting is reported once, and ends the supervisor
run          a process that ends is started again, after a growing wait; it listens again only when it is ready
observe      one /metrics page for all; a process's counts outlive it. `health_port` reports SERVING while any
             process serves: the kernel gives connections only to those that listen
stop         SIGTERM lets all drain; a second one ends them at once
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

import structlog
from prometheus_client import CollectorRegistry
from pydantic import SecretStr

from specdec import __version__
from specdec.config import CoordinatorSettings
from specdec.coordinator.child_process import CoordinatorProcess, reserved_port
from specdec.coordinator.service import held_bytes
from specdec.coordinator.servicer import SERVICE_NAME
from specdec.service.listening import StartupFailed
from specdec.service.metrics_endpoint import metrics_endpoint
from specdec.service.readiness import Readiness, plaintext_health
from specdec.service.server import install_signals
from specdec.telemetry import SupervisorMetrics, enable_multiprocess_metrics, metrics_folder
from specdec.wire.backoff import RestartCount, RestartPolicy
from specdec.wire.tls_files import TlsFilesBroken

_METRICS_NAME = "supervisor"
_MAX_HOST_CHARS = 40
"""Characters of the host's name in an owner id, which is part of every session's id; a random part keeps it unique."""
_STOP_MARGIN_S = 15.0
"""Seconds beyond a process's own limits for its end before it is killed."""
_log = structlog.get_logger(__name__)


class Supervisor:
    """Keeps `num_processes` coordinator processes running. One `run` per object."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._settings = settings
        self._processes: list[CoordinatorProcess] = []
        self._readiness = Readiness((SERVICE_NAME,))
        self._stopping = asyncio.Event()
        self._aborting = asyncio.Event()
        self._has_served = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal. Returns the exit code: 1 if the first process does not start, or one ends badly."""
        settings = self._settings
        try:
            async with contextlib.AsyncExitStack() as stack:
                metrics_dir = stack.enter_context(metrics_folder())
                enable_multiprocess_metrics(metrics_dir, _METRICS_NAME)
                registry = CollectorRegistry()
                metrics = SupervisorMetrics(registry)
                port = stack.enter_context(reserved_port(settings.host, settings.port))
                metrics_port = stack.enter_context(metrics_endpoint(settings, registry))
                health_port = await stack.enter_async_context(plaintext_health(settings, self._readiness))
                install_signals(self._stopping, self._aborting)
                _log.info(
                    "listening", host=settings.host, port=port, metrics_port=metrics_port, health_port=health_port,
                    num_processes=settings.num_processes, tls=settings.serves_tls, version=__version__,
                )  # fmt: skip
                self._processes = [
                    CoordinatorProcess(index, of_process, metrics_dir, self._update_health)
                    for index, of_process in enumerate(process_settings(settings, port))
                ]
                return await self._run_processes(metrics)
        except (StartupFailed, TlsFilesBroken) as error:
            _log.error("startup_failed", reason=str(error))
            return 1

    async def _run_processes(self, metrics: SupervisorMetrics) -> int:
        stop = asyncio.create_task(self._stopping.wait())
        has_served = asyncio.create_task(self._has_served.wait())
        first, *others = self._processes
        keepers = [asyncio.create_task(self._keep(first, metrics))]
        try:
            await asyncio.wait({keepers[0], stop, has_served}, return_when=asyncio.FIRST_COMPLETED)
            if has_served.done() and not stop.done():
                _log.info("ready")
                keepers += [asyncio.create_task(self._keep(process, metrics)) for process in others]
                await asyncio.wait({stop, *keepers}, return_when=asyncio.FIRST_COMPLETED)
            return await self._stop(keepers)
        finally:
            for task in (stop, has_served):
                task.cancel()

    async def _keep(self, process: CoordinatorProcess, metrics: SupervisorMetrics) -> int:
        """Start a process again and again until it is told to end; returns its last exit code."""
        restarts = RestartCount(RestartPolicy())
        while True:
            started_s = time.monotonic()
            exit_code = await process.live()
            if process.told_to_end:
                return exit_code
            if not self._has_served.is_set():
                _log.error("failed", reason="the first process did not start", exit_code=exit_code)
                return exit_code
            wait_s = restarts.wait_after_end(time.monotonic() - started_s)
            metrics.process_restarts.inc()
            _log.warning("process_ended", process=process.index, exit_code=exit_code, restart_in_s=wait_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)
                return 0

    async def _stop(self, keepers: Sequence[asyncio.Task[int]]) -> int:
        await self._readiness.shut_down()
        ended = asyncio.gather(*keepers)
        abort = asyncio.create_task(self._aborting.wait())
        settings = self._settings
        _log.info("draining", drain_s=settings.drain_s)
        self._terminate()
        timeout_s = settings.drain_s + settings.stop_grace_s + _STOP_MARGIN_S
        stages: set[asyncio.Future[Any]] = {ended, abort}
        await asyncio.wait(stages, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            self._terminate()
            await asyncio.wait({ended}, timeout=_STOP_MARGIN_S)
        if not ended.done():
            _log.error("processes_killed")
            for process in self._processes:
                process.kill()
        abort.cancel()
        # A process that has yet to set its signal handlers is ended by the signal itself.
        exit_code = 0 if all(code in (0, -signal.SIGTERM) for code in await ended) else 1
        _log.info("stopping", exit_code=exit_code)
        return exit_code

    def _terminate(self) -> None:
        for process in self._processes:
            process.terminate()

    async def _update_health(self) -> None:
        is_serving = any(process.is_serving for process in self._processes)
        if is_serving:
            self._has_served.set()
        await self._readiness.set_serving(is_serving)


def process_settings(settings: CoordinatorSettings, port: int) -> list[CoordinatorSettings]:
    """Settings of each process: the shared port, one resume secret, and a name of its own.

    A process keeps its name over restarts, so replicas free the sessions of its former life as soon as it is back.
    """
    name = settings.owner_id or f"{socket.gethostname()[:_MAX_HOST_CHARS]}-{secrets.token_hex(4)}"
    common = {
        "port": port,
        "metrics_port": None,
        "health_port": None,
        "num_processes": 1,
        "max_held_prompt_bytes": settings.max_held_prompt_bytes or held_bytes(settings.num_processes),
        "resume_secret": settings.resume_secret or SecretStr(secrets.token_hex(32)),
    }
    return [
        settings.model_copy(update={**common, "owner_id": f"{name}-{index}"}) for index in range(settings.num_processes)
    ]
