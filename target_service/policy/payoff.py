"""Whether speculation pays: what a step's tokens took, against what plain decoding would have taken for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.target_service.policy.step_time import StepTimeModel

_WEIGHT = 0.1
_MOST_SURPRISE = 4.0
_QUIET_S = 0.25
"""Drafts whose last proposal came longer ago than this are not at work: they are gone, or have no session of ours."""


@dataclass(frozen=True, slots=True)
class Payoff:
    """Two times for the same tokens, in seconds, summed over the sessions that committed them."""

    decode_s: float
    """What they took, hold-off included."""
    plain_s: float
    """What plain decoding of the same batch would have taken; over decode_s it is the speed-up."""


class PlainSteps:
    """How long a plain step of so many sessions would take with no draft at work.

    The step-time model alone would not do: while every step verifies trees of some size, it has to guess what a step
    without one would take. Plain steps still run, whenever a draft is late; but then that draft is at work, and where
    it shares the target's memory or cores it slows them down. So steps are told apart. *Quiet* ones run while no
    draft works; how much faster they were than the others of their batch size is what the others are corrected by.
    Before any quiet step ran there is no correction. Memory: two numbers per batch size.
    """

    def __init__(self) -> None:
        self._busy_s: dict[int, float] = {}
        self._quiet_s: dict[int, float] = {}
        self._quiet_share = 1.0

    def observe(self, num_sessions: int, turn_s: float, is_quiet: bool) -> None:
        """A plain step of this many sessions took this long; one that stalled counts for little more than others."""
        measured_s = self._quiet_s if is_quiet else self._busy_s
        known_s = measured_s.setdefault(num_sessions, turn_s)
        measured_s[num_sessions] += _WEIGHT * (min(turn_s, _MOST_SURPRISE * known_s) - known_s)
        if is_quiet and num_sessions in self._busy_s:
            share = min(1.0, self._quiet_s[num_sessions] / self._busy_s[num_sessions])
            self._quiet_share += _WEIGHT * (share - self._quiet_share)

    def expected_s(self, num_sessions: int, step_time: StepTimeModel, is_quiet: bool) -> float:
        """Of a plain step in place of one that ran now, in seconds; `is_quiet`: that one ran with no draft at work.

        Contexts grow, so of what was measured for the batch size the kind that runs now is preferred.
        """
        if is_quiet and num_sessions in self._quiet_s:
            return self._quiet_s[num_sessions]
        if num_sessions in self._busy_s:
            return self._busy_s[num_sessions] * self._quiet_share
        return self._quiet_s.get(num_sessions) or step_time.predict(num_sessions) * self._quiet_share


def step_payoff(plain_step_s: float, num_committed: Sequence[int], turn_s: float, held_s: float) -> Payoff:
    """Of one step of decoding.

    Plain decoding would have run one step of one row per session for each token. Every session of the batch waits for
    the longest hold-off in it, so each is charged with that.

    Args:
        plain_step_s: what a plain step of these sessions takes.
        num_committed: tokens that each session of the step committed.
        turn_s: the step with what it takes to merge proposals before it and to send verdicts after it.
        held_s: the longest hold-off of its sessions.
    """
    return Payoff(decode_s=len(num_committed) * (turn_s + held_s), plain_s=sum(num_committed) * plain_step_s)


class PayoffMeter:
    """Measures plain steps as they come along, and holds every step against them."""

    def __init__(self) -> None:
        self._plain_steps = PlainSteps()
        self._last_proposal_at_s = -math.inf

    def proposal_came(self, now_s: float) -> None:
        """A draft is at work."""
        self._last_proposal_at_s = now_s

    def of_step(
        self,
        num_committed: Sequence[int],
        turn_s: float,
        held_s: float,
        *,
        is_plain: bool,
        drafts_may_work: bool,
        began_at_s: float,
        step_time: StepTimeModel,
    ) -> Payoff:
        """The payoff of a step of decoding, which is measured, too, if it was plain.

        Args:
            num_committed, turn_s, held_s: as in `step_payoff`.
            is_plain: the step verified nothing.
            drafts_may_work: some session has a use for a draft.
            began_at_s: when the step was due, by the clock of `proposal_came`.
            step_time: predicts plain steps of a size that none was seen of.
        """
        is_quiet = began_at_s - self._last_proposal_at_s > _QUIET_S or not drafts_may_work
        if is_plain:
            self._plain_steps.observe(len(num_committed), turn_s, is_quiet)
        plain_step_s = self._plain_steps.expected_s(len(num_committed), step_time, is_quiet)
        return step_payoff(plain_step_s, num_committed, turn_s, held_s)
