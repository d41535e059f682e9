"""The chart's rules for the number of targets: KEDA's triggers and the HorizontalPodAutoscaler's behaviour."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from specdec.plan.simulation.target import SimulatedTarget

POLL_S = 15.0
"""Seconds between two looks (`pollingInterval`)."""
DOWN_STEP_S = 120.0
"""Seconds in which one pod at most is removed (`scaleDown.policies`)."""
_TOLERANCE = 0.1
"""Share by which the mean may differ from its aim without a change; Kubernetes' default."""
_UP_PODS, _UP_FACTOR, _UP_PERIOD_S = 4, 2, 15.0
"""Kubernetes' default for more pods: in 15 s four, or as many as there are, whichever is more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRule:
    """`target.autoscaling` of the chart, and what a start takes. Times in seconds."""

    min_replicas: int = 1
    max_replicas: int = 4
    sessions_per_replica: float = 32.0
    kv_use_percent: float = 80.0
    scale_down_stabilization_s: float = 600.0
    start_s: float = 120.0
    """From the decision until a new target serves: node, image, weights."""
    drain_s: float = 60.0


@dataclass(slots=True)
class Autoscaler:
    """Starts and drains targets of a fleet, whose targets up to `max_replicas` exist but need not be up."""

    rule: ScalingRule
    env: simpy.Environment
    targets: Sequence[SimulatedTarget]
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """Time and wanted number, at each change."""
    _wanted: int = 0
    _advice: deque[tuple[float, int]] = field(default_factory=deque)
    _removed_s: float = -math.inf
    _added_s: float = -math.inf

    def run(self) -> Generator[simpy.Event, Any, None]:
        """A SimPy process."""
        for target in self.targets[self.rule.min_replicas :]:
            target.end()
        self._wanted = self.rule.min_replicas
        self.sizes.append((0.0, self._wanted))
        while True:
            yield self.env.timeout(POLL_S)
            self._look()

    def advised(self, num_ready: int, num_sessions: int, kv_percents: float) -> int:
        """Pods that the triggers want: the most of them, within the bounds.

        Args:
            num_ready: pods that serve.
            num_sessions: their running and waiting sessions together.
            kv_percents: their used KV blocks in percent, summed.
        """
        wanted = 1
        for total, aim in ((num_sessions, self.rule.sessions_per_replica), (kv_percents, self.rule.kv_use_percent)):
            ratio = total / aim / max(1, num_ready)
            wanted = max(wanted, num_ready if abs(ratio - 1) <= _TOLERANCE else math.ceil(total / aim))
        return min(self.rule.max_replicas, max(self.rule.min_replicas, wanted))

    def _look(self) -> None:
        now_s = float(self.env.now)
        ready = [target for target in self.targets if target.is_up and not target.is_draining]
        kv = sum(100 * target.kv_used / target.settings.kv_tokens for target in ready)
        advised = self.advised(len(ready), sum(target.num_sessions for target in ready), kv)
        self._advice.append((now_s, advised))
        while self._advice[0][0] < now_s - self.rule.scale_down_stabilization_s:
            self._advice.popleft()
        if advised > self._wanted:
            if now_s - self._added_s >= _UP_PERIOD_S:
                most = max(self._wanted + _UP_PODS, self._wanted * _UP_FACTOR)
                self._change(min(advised, most))
                self._added_s = now_s
        elif max(each for _, each in self._advice) < self._wanted and now_s - self._removed_s >= DOWN_STEP_S:
            self._change(self._wanted - 1)
            self._removed_s = now_s

    def _change(self, wanted: int) -> None:
        for number in range(self._wanted, wanted):
            self.env.process(self._start(self.targets[number]))
        for number in range(wanted, self._wanted):
            self.env.process(self._stop(self.targets[number]))
        self._wanted = wanted
        self.sizes.append((float(self.env.now), wanted))

    def _start(self, target: SimulatedTarget) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(self.rule.start_s)
        while target.is_up and target.is_draining:
            yield self.env.timeout(1.0)
        if not target.is_up:
            target.begin()

    def _stop(self, target: SimulatedTarget) -> Generator[simpy.Event, Any, None]:
        if not target.is_up:
            return
        target.drain()
        ends_s = self.env.now + self.rule.drain_s
        while target.num_sessions and self.env.now < ends_s:
            yield self.env.timeout(1.0)
        target.end()
