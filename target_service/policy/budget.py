"""The exploration budget: time that trials may cost before they have paid.

Each kind of sessions has an account. Its income is the time that speculation saves, and a small share of all time. Its
expense is the time that steps take beyond plain decoding of the same tokens. Trial waits have a purse with the same
share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from specdec.target_service.policy.means import Mean

SHARE = 0.014
"""Share of all time that probes, references, misjudgements and trial waits may cost."""
TRIAL_STEPS = 13
"""Length of a trial: steps of a probe, consecutive waits for one depth, calls of a drafter before it is judged."""
TRY_EVERY = 16
"""Decisions per exploratory one, which tries the option that seems worse: no bad record lasts."""
WORTHWHILE = 1.15
"""Factor over plain decoding above which a session begins to speculate, or a step to wait: measured gains are noisy,
and some costs are not measured."""
_LEAST_S = 0.04
"""Seconds that an account may be above or below zero, or one plain step if that is longer."""
_SAVINGS = 2
"""Factor on the upper limit for time that speculation itself has saved."""
_FIRST_RESPITE_S = 0.25
"""Seconds before a negative account is reset to zero: a stalled step or a lucky plain measurement may have emptied it
by mistake. The time doubles with each reset, until resets lend no more than `SHARE`; a full account restores it."""


@dataclass(slots=True)
class Account:
    """The account of one kind of sessions, in seconds of decoding."""

    balance_s: float = 0.0
    invested_s: float = 0.0
    """Seconds of prompts computed for drafts that income has not paid back yet. They suspend no session: the time is
    spent."""
    prompt_s: Mean | None = None
    """Seconds of one prompt; None: unknown."""
    num_failed: int = 0
    """Trials that gained less than they cost."""
    num_silent: int = 0
    """Steps with speculating sessions since one of them had a proposal."""
    silent_at_s: float = -math.inf
    """Monotonic time of the last of these steps."""
    probe_after_s: float = -math.inf
    """Monotonic time before which no session of the kind is probed."""
    _respite_s: float = _FIRST_RESPITE_S
    _due_s: float = math.inf

    @property
    def is_solvent(self) -> bool:
        """Whether the balance is zero or above."""
        return self.balance_s >= 0

    def may_probe(self, now_s: float) -> bool:
        """Whether sessions may be probed."""
        return self.is_solvent and now_s >= self.probe_after_s

    def may_invest(self, num_beginning: int) -> bool:
        """Whether the draft may compute one more prompt besides the `num_beginning` prompts under way."""
        if not num_beginning:
            return self.balance_s >= self.invested_s
        return self.prompt_s is not None and self.balance_s >= self.invested_s + num_beginning * self.prompt_s.value

    def invest(self, seconds: float) -> None:
        """Book `seconds` of a prompt, or of a part of one."""
        self.invested_s += seconds

    def observe_prompt(self, seconds: float) -> None:
        """Learn that a whole prompt took `seconds`."""
        self.prompt_s = self.prompt_s or Mean()
        self.prompt_s.observe(seconds)

    def enter(self, time_s: float, saved_s: float, plain_s: float) -> None:
        """Book a session's step.

        Args:
            time_s: seconds that the session decoded.
            saved_s: seconds saved; negative: lost.
            plain_s: seconds of a plain step.
        """
        most_s = _most_s(plain_s)
        self.balance_s += min(0.0, saved_s)
        earned_s = SHARE * time_s + max(0.0, saved_s)
        paid_s = min(self.invested_s, max(0.0, earned_s + min(0.0, self.balance_s)))  # debts come first
        self.invested_s -= paid_s
        limit_s = _SAVINGS * most_s if saved_s > 0 else most_s
        if self.balance_s < limit_s:
            self.balance_s = min(limit_s, self.balance_s + earned_s - paid_s)

    def has_fallen(self, plain_s: float, now_s: float) -> bool:
        """Whether the balance has just fallen below its floor; it is raised to the floor again.

        A balance below zero starts the respite.
        """
        most_s = _most_s(plain_s)
        if self.balance_s >= 0:
            self._due_s = math.inf
            if self.balance_s >= most_s:
                self._respite_s = _FIRST_RESPITE_S
        elif self._due_s == math.inf:
            self._due_s = now_s + self._respite_s
            self._respite_s = min(2 * self._respite_s, most_s / SHARE)
        if self.balance_s >= -most_s:
            return False
        self.balance_s = -most_s
        return True

    def heard(self) -> None:
        """Note that a session of the kind had a proposal in time."""
        self.num_silent, self.probe_after_s = 0, -math.inf

    def delay_probes(self, plain_s: float, now_s: float) -> None:
        """Probe no other session for a while, as the draft was never in time: the cost of a trial is not measured, and
        is taken for all that the account may lend.
        """
        self.probe_after_s = now_s + _most_s(plain_s) / SHARE

    def is_due(self, now_s: float) -> bool:
        """Whether the balance is negative and its respite is over, so that `make_even` may reset it."""
        return self.balance_s < 0 and now_s >= self._due_s

    def make_even(self) -> None:
        """Set the balance to zero."""
        self.balance_s, self._due_s = 0.0, math.inf


@dataclass(slots=True)
class WaitPurse:
    """Pays trial waits: for silent drafts, or for a depth that did not pay.

    A draft that is slower than the target's steps sends only stale proposals until a step waits for it: without trial
    waits it never catches up.
    """

    most_s: float
    """Seconds that the purse holds at first and at most, unless a longer wait is asked for."""
    _saved_s: float = field(init=False)
    _seen_s: float | None = field(default=None, init=False)
    _granted_s: float = field(default=0.0, init=False)
    """Seconds paid for the sessions planned at the present moment."""

    def __post_init__(self) -> None:
        self._saved_s = self.most_s

    def grants(self, wait_s: float, now_s: float) -> bool:
        """Whether a session may wait `wait_s` from `now_s` on; sessions with the same `now_s` wait together and pay
        once."""
        if self._seen_s != now_s:
            if self._seen_s is not None:
                earned_s = SHARE * max(0.0, now_s - self._seen_s)
                self._saved_s = min(max(self.most_s, wait_s), self._saved_s + earned_s)
            self._seen_s, self._granted_s = now_s, 0.0
        more_s = wait_s - self._granted_s
        if more_s > self._saved_s:
            return False
        if more_s > 0:
            self._saved_s -= more_s
            self._granted_s = wait_s
        return True


def _most_s(plain_s: float) -> float:
    return max(_LEAST_S, plain_s)
