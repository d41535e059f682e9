"""The chart's rules for the number of targets: KEDA's triggers and the HorizontalPodAutoscaler's behaviour."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import simpy

POLL_S = 15.0
"""Seconds between two looks (`pollingInterval`)."""
DOWN_STEP_S, DOWN_PODS, DOWN_PERCENT = 120.0, 1, 5
"""Seconds in which a pod, or this part of them if that is more, is removed at most (`scaleDown.policies`)."""
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
    scale_down_stabilization_s: float = 1800.0
    start_s: float = 120.0
    """From the decision until a new target serves: node, image, weights."""
    drain_s: float = 60.0


class Scaled(Protocol):
    """A target as an autoscaler starts and ends it."""

    is_up: bool
    is_draining: bool

    @property
    def num_sessions(self) -> float:
        """Sessions that it holds."""

    def begin(self) -> None:
        """It serves."""

    def drain(self) -> None:
        """It takes no more sessions."""

    def end(self) -> None:
        """It ends at once."""


@dataclass(slots=True)
class Autoscaler:
    """Starts and drains targets of a fleet, whose targets up to `max_replicas` exist but need not be up."""

    rule: ScalingRule
    env: simpy.Environment
    targets: Sequence[Scaled]
    observe: Callable[[], tuple[float, float]]
    """Returns what the triggers ask Prometheus for: running and waiting sessions of the targets that serve, with the
    requests that wait at the coordinators, and their used KV blocks in percent, summed."""
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """Time and wanted number, at each change."""
    wanted: int = 0
    """Pods that the deployment has, those included that start."""
    _advice: deque[tuple[float, int]] = field(default_factory=deque)
    _removed_s: float = -math.inf
    _added_s: float = -math.inf

    def run(self) -> Generator[simpy.Event, Any, None]:
        """A SimPy process."""
        for target in self.targets[self.rule.min_replicas :]:
            target.end()
        self.wanted = self.rule.min_replicas
        self.sizes.append((0.0, self.wanted))
        while True:
            yield self.env.timeout(POLL_S)
            self._look()

    def advised(self, num_pods: int, num_sessions: float, kv_percents: float) -> int:
        """Pods that the triggers want: the most of them, within the bounds.

        Args:
            num_pods: pods that there are, those included that start, as the autoscaler counts for a mean per pod.
            num_sessions: running and waiting sessions of all together, and requests that wait for one.
            kv_percents: their used KV blocks in percent, summed.
        """
        wanted = 1
        for total, aim in ((num_sessions, self.rule.sessions_per_replica), (kv_percents, self.rule.kv_use_percent)):
            ratio = total / aim / max(1, num_pods)
            wanted = max(wanted, num_pods if abs(ratio - 1) <= _TOLERANCE else math.ceil(total / aim))
        return min(self.rule.max_replicas, max(self.rule.min_replicas, wanted))

    def _look(self) -> None:
        now_s = float(self.env.now)
        advised = self.advised(self.wanted, *self.observe())
        self._advice.append((now_s, advised))
        while self._advice[0][0] < now_s - self.rule.scale_down_stabilization_s:
            self._advice.popleft()
        if advised > self.wanted:
            if now_s - self._added_s >= _UP_PERIOD_S:
                most = max(self.wanted + _UP_PODS, self.wanted * _UP_FACTOR)
                self._change(min(advised, most))
                self._added_s = now_s
        elif (most := max(each for _, each in self._advice)) < self.wanted and now_s - self._removed_s >= DOWN_STEP_S:
            least = min(self.wanted - DOWN_PODS, int(self.wanted * (1 - DOWN_PERCENT / 100)))
            self._change(max(most, least))
            self._removed_s = now_s

    def _change(self, wanted: int) -> None:
        for number in range(self.wanted, wanted):
            self.env.process(self._start(number))
        for number in range(wanted, self.wanted):
            self.env.process(self._stop(self.targets[number]))
        self.wanted = wanted
        self.sizes.append((float(self.env.now), wanted))

    def _start(self, number: int) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(self.rule.start_s)
        target = self.targets[number]
        while target.is_up and target.is_draining:
            yield self.env.timeout(1.0)
        if not target.is_up and number < self.wanted:  # else it was given up before it served
            target.begin()

    def _stop(self, target: Scaled) -> Generator[simpy.Event, Any, None]:
        if not target.is_up:
            return
        target.drain()
        ends_s = self.env.now + self.rule.drain_s
        while target.num_sessions and self.env.now < ends_s:
            yield self.env.timeout(1.0)
        target.end()
