"""Keeps the services of a cluster running: restarts those that end or hang, and reports it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.commands.errors import ClusterFailed
from specdec.commands.up.cluster import Cluster, end_of_log
from specdec.commands.up.service_process import ServiceProcess
from specdec.service.standstill import Standstill
from specdec.wire.backoff import RestartCount, RestartPolicy

_ASK_S = 2.0
"""Seconds between two health checks of a service that answers."""


@dataclass(slots=True)
class _Watched:
    """State of one service. Times are those of time.monotonic()."""

    process: ServiceProcess
    restarts: RestartCount
    is_ready: bool = True
    since_s: float = 0.0
    """Time at which it became ready or, if it is not ready, was started."""
    ended_s: float = 0.0
    restart_s: float | None = None
    """Time of its next start; None while it runs."""
    standstill: Standstill = field(default_factory=Standstill)
    asked_s: float = 0.0
    """Time of the last health check."""
    unready_s: float | None = None
    """Time at which it was first found to answer without serving, such as while its engine restarts."""
    said: str = ""
    """Line of its log that was told last while it did not serve."""


class Supervision:
    """Watches a started cluster. Call `check` repeatedly in the thread that started it."""

    def __init__(self, cluster: Cluster, tell: Callable[[str], None], policy: RestartPolicy | None = None) -> None:
        """Take all services as ready. `tell` is called with a line when one ends, starts or is ready again."""
        self._cluster = cluster
        self._tell = tell
        policy, now_s = policy or RestartPolicy(), time.monotonic()
        services = cluster.services.values()
        self._watched = [_Watched(service, RestartCount(policy), since_s=now_s) for service in services]

    def check(self) -> None:
        """Check every service once; a starting or silent one takes at most a second.

        Raises:
            ClusterFailed: a service cannot be restarted; the message says which and why.
        """
        for watched in self._watched:
            if watched.restart_s is not None:
                self._restart_when_due(watched, watched.restart_s)
            elif not watched.process.is_running:
                self._on_end(watched)
            elif not watched.is_ready:
                self._look_for_ready(watched)
            else:
                self._look_for_standstill(watched)

    def _on_end(self, watched: _Watched) -> None:
        service, restarts, now_s = watched.process, watched.restarts, time.monotonic()
        wait_s = restarts.wait_after_end(now_s - watched.since_s if watched.is_ready else None)
        ended = f"{service.spec.name} {service.describe_end()}"
        if restarts.is_hopeless:
            raise ClusterFailed(
                "\n".join([f"{ended}, {restarts.num_futile} times before it was ready", *end_of_log(service)])
            )
        service.kill()  # Its children would keep its port, cores or memory.
        watched.is_ready, watched.ended_s, watched.restart_s = False, now_s, now_s + wait_s
        watched.unready_s = None
        said = service.last_error_line()
        self._tell(f"{ended}; restart in {wait_s:.3g} s" + (f". Its log: {said}" if said else ""))

    def _restart_when_due(self, watched: _Watched, due_s: float) -> None:
        if time.monotonic() < due_s:
            return
        name, watched.since_s = watched.process.spec.name, time.monotonic()
        try:
            watched.process.start()
        except OSError as error:  # memory, files or process numbers are short
            wait_s = watched.restarts.wait_after_end(None)
            told = f"{name} cannot be started: {error}"
            if watched.restarts.is_hopeless:
                raise ClusterFailed(f"{told}, {watched.restarts.num_futile} times") from error
            watched.restart_s = watched.since_s + wait_s
            self._tell(f"{told}; restart in {wait_s:.3g} s")
            return
        watched.restart_s = None
        self._tell(f"{name} is restarted")

    def _look_for_ready(self, watched: _Watched) -> None:
        service, now_s = watched.process, time.monotonic()
        name = service.spec.name
        if self._cluster.is_healthy(name):
            watched.is_ready, watched.since_s = True, time.monotonic()
            self._tell(f"{name} is ready again, {watched.since_s - watched.ended_s:.1f} s after it ended")
        elif now_s - watched.since_s > self._cluster.timeouts.start_s:
            self._tell(f"{name} did not become ready within {self._cluster.timeouts.start_s:g} s, and is killed")
            service.kill()

    def _look_for_standstill(self, watched: _Watched) -> None:
        service, now_s = watched.process, time.monotonic()
        pause_s = 0.0 if watched.standstill.is_silent else _ASK_S
        if now_s < watched.asked_s + pause_s or service.pid is None:
            return
        watched.asked_s = now_s
        with self._cluster.probe(service.spec) as is_serving:
            serves = is_serving()
        if serves is not None:
            watched.standstill.answered()
            self._tell_whether_it_serves(watched, serves)
            return
        if watched.standstill.is_hung(service.pid, time.monotonic()):
            self._tell(f"{service.spec.name} does not answer for {watched.standstill.silent_s:.1f} s, and is killed")
            watched.standstill.answered()
            service.kill()

    def _tell_whether_it_serves(self, watched: _Watched, serves: bool) -> None:
        """Tell each new fault of a service that runs and does not serve, and once that it serves again."""
        service, now_s = watched.process, time.monotonic()
        if serves:
            if watched.unready_s is not None:
                self._tell(f"{service.spec.name} serves again, after {now_s - watched.unready_s:.0f} s")
                watched.unready_s = None
            return
        if watched.unready_s is None:
            watched.unready_s, watched.said = now_s, ""
        said = service.last_error_line(or_warning=True)
        if said != watched.said:
            watched.said = said
            self._tell(f"{service.spec.name} runs and does not serve. Its log, {service.log_path}: {said}")
