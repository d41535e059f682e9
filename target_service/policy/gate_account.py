"""What speculation may lose before sessions of a kind go without it."""

from __future__ import annotations

import math
from dataclasses import dataclass

_ALLOWANCE = 0.012
"""Of all time, what probes and misjudgements may cost."""
_LEAST_S, _LEAST_STEPS = 0.04, 4
"""An account lends, and gives away, at most this long, or as long as so many plain steps."""
_SAVINGS = 2
"""So many times as much of what speculation has saved is kept for bad times."""
_WEIGHT = 1 / 8
"""Of a prompt in what they take."""
_FIRST_RESPITE_S = 0.25
"""So long after it was emptied an account may be made even: some steps that stalled, a text that begins with nothing
to guess, or a reference that was lucky, may have done it. The time doubles, until no more is lent than the allowance
gives; it is as at first when the account is full."""


@dataclass(slots=True)
class Account:
    """Of one kind of sessions, in seconds of decoding."""

    balance_s: float = 0.0
    invested_s: float = 0.0
    """What prompts have taken that drafts computed, and neither savings nor the allowance have paid back yet. No
    session is suspended for it: it is spent."""
    prompt_s: float | None = None
    """What one takes: a moving mean; None: not known."""
    num_probes: int = 0
    """That have failed."""
    _respite_s: float = _FIRST_RESPITE_S
    _due_s: float = math.inf

    @property
    def is_solvent(self) -> bool:
        """Whether it has something left to lose."""
        return self.balance_s >= 0

    def may_invest(self, num_beginning: int) -> bool:
        """Whether the draft may compute one more prompt, beside those of so many sessions that it is at."""
        if not num_beginning:
            return self.balance_s >= self.invested_s
        return self.prompt_s is not None and self.balance_s >= self.invested_s + num_beginning * self.prompt_s

    def invest(self, seconds: float) -> None:
        """A prompt, or a part of one, took so long."""
        self.invested_s += seconds

    def observe_prompt(self, seconds: float) -> None:
        """A prompt took so long in all."""
        self.prompt_s = seconds if self.prompt_s is None else self.prompt_s + _WEIGHT * (seconds - self.prompt_s)

    def enter(self, time_s: float, saved_s: float, plain_s: float) -> None:
        """A session decoded for `time_s`, by which it saved so much; negative: lost. `plain_s`: of a plain step."""
        most_s = _most_s(plain_s)
        self.balance_s += min(0.0, saved_s)
        earned_s = _ALLOWANCE * time_s + max(0.0, saved_s)
        paid_s = min(self.invested_s, max(0.0, earned_s + min(0.0, self.balance_s)))  # debts come first
        self.invested_s -= paid_s
        limit_s = _SAVINGS * most_s if saved_s > 0 else most_s
        if self.balance_s < limit_s:
            self.balance_s = min(limit_s, self.balance_s + earned_s - paid_s)

    def has_fallen(self, plain_s: float, now_s: float) -> bool:
        """Whether it has just fallen through its floor, where it is held."""
        most_s = _most_s(plain_s)
        if self.balance_s >= 0:
            self._due_s = math.inf
            if self.balance_s >= most_s:
                self._respite_s = _FIRST_RESPITE_S
        elif self._due_s == math.inf:
            self._due_s = now_s + self._respite_s
            self._respite_s = min(2 * self._respite_s, most_s / _ALLOWANCE)
        if self.balance_s >= -most_s:
            return False
        self.balance_s = -most_s
        return True

    def is_due(self, now_s: float) -> bool:
        """Whether it may be made even."""
        return self.balance_s < 0 and now_s >= self._due_s

    def make_even(self) -> None:
        """Lend again."""
        self.balance_s, self._due_s = 0.0, math.inf


def _most_s(plain_s: float) -> float:
    return max(_LEAST_S, _LEAST_STEPS * plain_s)
