"""The exploration budget: what trying may cost before it has paid.

Each kind of sessions has an account: what speculation saves comes in, and a small share of all time; what steps took
longer than plain ones of the same tokens goes out. Waits that nothing speaks for have a purse with the same share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from specdec.target_service.policy.means import Mean

SHARE = 0.014
"""Share of all time that probes, references, misjudgements and trial waits may cost."""
TRIAL_STEPS = 13
"""Steps of a probe, waits for one depth in a row, calls before a drafter is judged in a session."""
TRY_EVERY = 16
"""Decisions, one of which tries what seems worse, so that no bad record lasts."""
WORTHWHILE = 1.15
"""Factor over plain decoding above which a session begins to speculate, or a step to wait: gains are noisy, and what
is not measured may be lost."""
_LEAST_S = 0.04
"""Seconds, or one plain step if that is longer, that an account may be above or below zero."""
_SAVINGS = 2
"""Factor on that for what speculation itself has saved, which is kept for bad times."""
_FIRST_RESPITE_S = 0.25
"""Seconds before an emptied account is set to zero: a stalled step or a lucky plain measurement may have emptied it by
mistake. Doubles each time, until no more is lent than the share gives; full accounts begin again."""


@dataclass(slots=True)
class Account:
    """Of one kind of sessions, in seconds of decoding."""

    balance_s: float = 0.0
    invested_s: float = 0.0
    """What prompts have taken that drafts computed, and neither savings nor the share have paid back yet. No session
    is suspended for it: it is spent."""
    prompt_s: Mean | None = None
    """What one takes; None: not known."""
    num_failed: int = 0
    """Trials that brought less than they cost."""
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
        return self.prompt_s is not None and self.balance_s >= self.invested_s + num_beginning * self.prompt_s.value

    def invest(self, seconds: float) -> None:
        """A prompt, or a part of one, took so long."""
        self.invested_s += seconds

    def observe_prompt(self, seconds: float) -> None:
        """A prompt took so long in all."""
        self.prompt_s = self.prompt_s or Mean()
        self.prompt_s.observe(seconds)

    def enter(self, time_s: float, saved_s: float, plain_s: float) -> None:
        """A session decoded for `time_s`, by which it saved so much; negative: lost. `plain_s`: of a plain step."""
        most_s = _most_s(plain_s)
        self.balance_s += min(0.0, saved_s)
        earned_s = SHARE * time_s + max(0.0, saved_s)
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
            self._respite_s = min(2 * self._respite_s, most_s / SHARE)
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


@dataclass(slots=True)
class WaitPurse:
    """Pays waits that nothing speaks for: for drafts that were silent, or for a depth that did not pay.

    A draft that is slower than the target's steps sends nothing but what is stale until it is waited for: without such
    waits it never catches up.
    """

    most_s: float
    """The longest wait that is saved up for before anybody asks for a longer one; as much is there at first."""
    _saved_s: float = field(init=False)
    _seen_s: float | None = field(default=None, init=False)
    _granted_s: float = field(default=0.0, init=False)
    """How long the sessions that are planned now may wait."""

    def __post_init__(self) -> None:
        self._saved_s = self.most_s

    def grants(self, wait_s: float, now_s: float) -> bool:
        """Whether a session may wait so long from now on; sessions of one moment wait together, and pay once."""
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
