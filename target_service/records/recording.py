"""Metrics of steps, which are written when owners are told of what the step decided."""

from __future__ import annotations

from specdec.target_service.policy.payoff import Payoff, PayoffMeter
from specdec.target_service.policy.step_time import StepTimeModel
from specdec.target_service.records.metrics import TargetRecorder
from specdec.target_service.records.step_record import StepRecord


class StepRecording:
    """What a step says is learnt at once; what it adds to metrics waits until `write`, which costs most of it."""

    def __init__(self, recorder: TargetRecorder) -> None:
        self.payoff = PayoffMeter()
        self._recorder = recorder
        self._waiting: tuple[StepRecord, Payoff | None] | None = None

    def observe(self, step: StepRecord, step_time: StepTimeModel) -> None:
        """A step is over, and so is its turn. `step_time` predicts plain steps of a size that none was seen of."""
        self.write()
        payoff = None
        # A step that carries prefill says nothing of speculation: plain decoding would have carried it, too.
        if step.is_decode:
            payoff = self.payoff.of_step(
                step.num_committed,
                step.turn_s,
                step.held_s,
                is_plain=step.is_plain,
                drafts_may_work=step.drafts_may_work,
                began_at_s=step.due_at_s,
                step_time=step_time,
            )
        self._waiting = step, payoff

    def write(self) -> None:
        """Write what waits, if anything does."""
        if self._waiting is not None:
            (step, payoff), self._waiting = self._waiting, None
            self._recorder.step(step)
            self._recorder.turn(step.turn_s - step.elapsed_s, payoff)
