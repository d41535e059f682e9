"""Times of a target's turns, from which its pacing learns."""

from __future__ import annotations

import time
from collections.abc import Collection

from specdec.target_service.pacing.pacing import Pacing
from specdec.target_service.proposals.own_draft import OwnDraft
from specdec.target_service.records.step_record import StepRecord
from specdec.target_service.session import TargetSession

_STARVED_S = 1.0
"""Seconds without a step after which a session counts as waiting for its client."""


class TurnTimes:
    """A turn is the work for one step: the own draft is asked, proposals are merged, the engine runs once, and tokens
    are decided and sent.

    The cost of speculation is measured from the end of one turn to the end of the next, hold-offs and frames included.
    """

    def __init__(self, own_draft: OwnDraft, sessions: Collection[TargetSession]) -> None:
        """`sessions`: a live view of the sessions with a sequence."""
        self.due_at_s = 0.0
        """Time of time.monotonic, in seconds, at which the present turn was due."""
        self.began_s = 0.0
        """Time at which it began, after the draft's work."""
        self._last_end_s: float | None = None
        """End of the last turn with a step; None: no session was ready after it."""
        self._ended: tuple[StepRecord, float, float, float] | None = None
        """A turn that has ended: its step, its seconds, those of computing prompts for the own draft, and its end."""
        self._own_draft = own_draft
        self._sessions = sessions

    def ended(self, step: StepRecord) -> None:
        """Note the end of a turn with a step, for `learn`."""
        now_s = time.monotonic()
        prompt_s = self._own_draft.take_prompt_s()
        if self._last_end_s is None:  # the target was idle: the time counts from the end of the draft's work
            self._last_end_s, prompt_s = self.began_s, 0.0
        turn_s = now_s - self._last_end_s
        self._last_end_s = now_s if any(session.seq.is_ready for session in self._sessions) else None
        self._ended = step, turn_s, prompt_s, now_s

    @property
    def unlearnt(self) -> StepRecord | None:
        """The step of the turn that has ended, if nobody has learnt of it."""
        return None if self._ended is None else self._ended[0]

    def learn(self, pacing: Pacing) -> None:
        """Report the turn that has ended, if one has since the last call."""
        if self._ended is None:
            return
        (step, turn_s, prompt_s, now_s), self._ended = self._ended, None
        if not step.is_decode:
            return
        # The turn's time includes the cost of merging proposals before the pass, and of commits after it.
        pacing.observe_step(step.output.num_tokens, step.turn_s)
        pacing.expectations.observe_rate(sum(step.num_committed), turn_s - prompt_s)
        decoding = [
            session
            for session in self._sessions
            if (told_s := session.times.last_verdict_at_s) is not None and now_s - told_s < _STARVED_S
        ]
        pacing.gate.observe_turn(
            step.gates,
            num_tokens=step.num_committed,
            turn_s=turn_s,
            now_s=now_s,
            prompt_s=prompt_s,
            waiting=[session.gate for session in decoding if session.gate is not None],
            num_nodes=step.num_nodes,
            row_s=pacing.clock.rows.row_s,
            are_free=step.are_free,
        )
