"""A scaled fleet over hours, as a flow in steps of seconds: all targets have equal numbers of sessions.

Autoscalers act within minutes and traffic changes within hours, so that steps of milliseconds say nothing more. The
rule is the same class as in a fleet that is simulated step by step; the replicas' speed is a `ReplicaCurve`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import simpy

from specdec.plan.inputs.traffic import Rate, Traffic
from specdec.plan.simulation.autoscaler import Autoscaler, ScalingRule
from specdec.plan.simulation.curve import ReplicaCurve

_MOST_DRAWN = 300_000
"""Requests of a run, at most, that are drawn each; of more, the number of each step is."""
_LEAST_STEP_S, _MOST_STEP_S, _STEPS_PER_LIFE = 1.0, 5.0, 8
"""Seconds of a step, and steps of a request that is alone on its target."""


_TINY = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowPlan:
    """A deployment whose number of targets follows a rule."""

    curve: ReplicaCurve
    prompt_s: float
    """Seconds of a target for a request's prompt."""
    output_tokens: float
    """Mean tokens of an output."""
    rule: ScalingRule
    places: float
    """Sessions of a target, at most; requests beyond them wait at the coordinators."""
    kv_sessions: float
    """Sessions whose keys and values fill a target's cache."""
    most_wait_s: float = 30.0
    """Seconds after which a waiting request is refused (`queue_timeout_s`)."""
    first_token_s: float = math.inf
    """Objective of the first token: of the wait and the prompt."""
    most_load: float = math.inf
    """Sessions of a target up to which it holds the objective between tokens."""


@dataclass(slots=True)
class FlowRun:
    """Result of a run."""

    seconds: float
    num_arrived: float = 0.0
    num_refused: float = 0.0
    num_good: float = 0.0
    """Requests that came while both objectives held."""
    target_s: float = 0.0
    """Seconds of all targets, those included that start or drain."""
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """Time and wanted number, at each change."""

    @property
    def good_share(self) -> float:
        """Share of the requests that came while both objectives held; 1.0 without any."""
        return self.num_good / self.num_arrived if self.num_arrived else 1.0

    @property
    def served_share(self) -> float:
        """Share of the requests that were not refused; 1.0 without any."""
        return 1 - self.num_refused / self.num_arrived if self.num_arrived else 1.0

    @property
    def mean_targets(self) -> float:
        """Targets on average."""
        return self.target_s / self.seconds

    def turns(self, since_s: float = 0.0) -> int:
        """Times that the number of targets went up after it had gone down, or down after up: 1 or 2 a day follow the
        day, more is hunting."""
        steps = [size > before for (_, before), (at_s, size) in itertools.pairwise(self.sizes) if at_s >= since_s]
        return sum(is_up != was_up for was_up, is_up in itertools.pairwise(steps))


class _Target:
    """A target of a flow: it has its part of all sessions."""

    def __init__(self, flow: FlowFleet) -> None:
        self._flow = flow
        self.is_up, self.is_draining = True, False

    @property
    def num_sessions(self) -> float:
        return 0.0 if self.is_draining else self._flow.num_each

    def begin(self) -> None:
        self.is_up, self.is_draining = True, False
        self._flow.num_ready += 1

    def drain(self) -> None:
        """Its sessions go on elsewhere, as those that outlast the time for draining do."""
        self.is_draining = True
        self._flow.num_ready -= 1

    def end(self) -> None:
        self._flow.num_ready -= self.is_up and not self.is_draining
        self.is_up = False


class FlowFleet:
    """One run."""

    def __init__(self, plan: FlowPlan) -> None:
        """All targets up to the rule's most exist; it says how many are up."""
        self.plan = plan
        self.num_ready = plan.rule.max_replicas
        self._env = simpy.Environment()
        self._targets = [_Target(self) for _ in range(plan.rule.max_replicas)]
        self._num_running = self._num_waiting = 0.0
        self._tokens_per_s = lru_cache(lambda load: plan.curve.mean(load, lambda point: point.tokens_per_s))

    @property
    def num_each(self) -> float:
        """Sessions of a target."""
        return self._num_running / max(1, self.num_ready)

    def run(self, traffic: Traffic, seconds: int, seed: int) -> FlowRun:
        """Let requests arrive for some time."""
        run = FlowRun(seconds)
        life_s = self.plan.output_tokens / self._rate(1.0)
        step_s = min(_MOST_STEP_S, max(_LEAST_STEP_S, life_s / _STEPS_PER_LIFE))
        scaler = Autoscaler(self.plan.rule, self._env, self._targets, self._observed)
        self._env.process(scaler.run())
        self._env.process(self._flow(arrivals_by_step(traffic, seconds, step_s, seed), step_s, scaler, run))
        self._env.run(until=seconds)
        run.sizes = scaler.sizes
        return run

    def _flow(
        self, numbers: Sequence[float], step_s: float, scaler: Autoscaler, run: FlowRun
    ) -> Generator[simpy.Event, Any, None]:
        plan, begun_per_s = self.plan, 0.0
        for num_new in numbers:
            yield self._env.timeout(step_s)
            num_ready, each = self.num_ready, self.num_each
            # A prompt's rows take the time of steps, so what they leave is for tokens.
            left = max(0.0, 1 - begun_per_s * plan.prompt_s / max(1, num_ready))
            self._num_running -= min(
                self._num_running, step_s * num_ready * self._rate(each) * left / plan.output_tokens
            )
            self._num_waiting += num_new
            room = max(0.0, num_ready * plan.places - self._num_running) / step_s
            # Prompts wait for each other, too: no second begins more of them than it can compute.
            most_per_s = num_ready / plan.prompt_s if plan.prompt_s else math.inf
            begun_per_s = min(self._num_waiting / step_s, room, most_per_s)
            self._num_waiting = max(0.0, self._num_waiting - begun_per_s * step_s)
            self._num_running += begun_per_s * step_s
            wait_s = self._num_waiting / max(begun_per_s, _TINY)
            late = max(0.0, self._num_waiting - plan.most_wait_s * begun_per_s)
            refused = min(self._num_waiting, late * step_s / plan.most_wait_s)
            self._num_waiting -= refused
            is_good = wait_s + plan.prompt_s <= plan.first_token_s and each <= plan.most_load
            run.num_arrived += num_new
            run.num_refused += refused
            run.num_good += max(0.0, num_new - refused) * is_good
            run.target_s += step_s * scaler.wanted

    def _observed(self) -> tuple[float, float]:
        kv_percent = min(100.0, 100 * self.num_each / self.plan.kv_sessions)
        return self._num_waiting + self._num_running, kv_percent * self.num_ready

    def _rate(self, each: float) -> float:
        """Tokens per second of a target with `each` sessions, also between whole numbers of them."""
        low = math.floor(each)
        below = self._tokens_per_s(low) if low else 0.0
        return below + (self._tokens_per_s(low + 1) - below) * (each - low)


def arrivals_by_step(traffic: Traffic, seconds: int, step_s: float, seed: int) -> Sequence[float]:
    """Numbers of the requests that arrive in each step."""
    num_steps = int(seconds / step_s)
    if isinstance(traffic, Rate) and traffic.per_s * (1 + traffic.swing) * seconds > _MOST_DRAWN:
        at_s = (np.arange(num_steps) + 0.5) * step_s
        wanted = traffic.per_s * (1 + traffic.swing * np.sin(2 * np.pi * at_s / traffic.swing_s - np.pi / 2)) * step_s
        rng = np.random.default_rng(seed)
        spread = np.sqrt(wanted / traffic.burstiness)  # of the number of a renewal process with gamma gaps
        found: list[float] = np.maximum(0.0, rng.normal(wanted, spread)).tolist()
        return found
    times_s = np.array([arrival.at_s for arrival in traffic.arrivals(seconds, seed)])
    numbers: list[float] = np.bincount((times_s / step_s).astype(int), minlength=num_steps).astype(float).tolist()
    return numbers[:num_steps]
