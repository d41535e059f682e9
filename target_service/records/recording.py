"""Metrics of steps, which are written when owners are told of what the step decided."""

from __future__ import annotations

from specdec.target_service.policy.step_clock import StepClock
from specdec.target_service.records.metrics import TargetRecorder
from specdec.target_service.records.step_record import Payoff, StepRecord


class StepRecording:
    """What a step adds to metrics waits until `write`, which costs most of it."""

    def __init__(self, recorder: TargetRecorder) -> None:
        self._recorder = recorder
        self._waiting: tuple[StepRecord, Payoff | None] | None = None

    def observe(self, step: StepRecord, clock: StepClock) -> None:
        """A step is over, and so is its turn. `clock` knows what a plain one takes."""
        self.write()
        self._waiting = step, step.payoff(clock.expected_plain_s(len(step.num_committed)))

    def write(self) -> None:
        """Write what waits, if anything does."""
        if self._waiting is not None:
            (step, payoff), self._waiting = self._waiting, None
            self._recorder.step(step)
            self._recorder.turn(step.turn_s - step.elapsed_s, payoff)
