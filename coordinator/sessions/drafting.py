"""The drafts of a session: none, one, or two for a bounded time (`recovery.hedging`), and how each keeps up.

Without one it goes on, more slowly.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from specdec.coordinator.sessions.hosts import DraftHost

_SLOW_STEPS = 16
"""A draft is slow when it has been late for so many steps, each step in time making up for two of them: one that is
late for two thirds of the steps or less never gets there."""
_CATCH_UP_STEPS = 2
_MOST_DOUBLINGS = 6
_ANSWER_WEIGHT = 0.125
"""Of the last answer in the mean: it follows about the last eight."""
_START_TAG = 1 << 3
"""Of `Proposal.start_position`: field 1, a varint."""
_MOST_VARINT_BYTES = 5
"""Of 32 bits."""


class DraftFault(Enum):
    """What a draft does wrong without a word."""

    STALL = auto()
    """It proposes nothing."""
    SLOW = auto()
    """It proposes, but for most steps too late."""
    FLOOD = auto()
    """It proposes far too much."""


@dataclass(slots=True, eq=False)
class DraftSide:
    """A session at a draft, from one opening to the next."""

    host: DraftHost[Any]
    epoch: int
    told: int = 0
    """The position up to which it knows the session's tokens."""
    is_suspended: bool = False
    """It was told that nobody wants its proposals; of tokens it hears again when somebody does."""
    is_open: bool = False
    """The host has said so."""
    unanswered_s: float | None = None
    """When it was told of the first commit that no proposal has covered yet, on the monotonic clock."""
    unanswered_position: int = 0
    """Where that commit ended."""
    has_proposed: bool = False
    """Since it is measured: the first proposal waits for the prompt, or for what was before, and measures nothing."""
    num_answers: int = 0
    """Commits that a later proposal covered."""
    answer_s: float = 0.0
    """The time from a commit to the proposal that covers it: a mean of these answers, the last ones above all."""
    num_late: int = 0
    """Steps for which it was late, less those for which it was not."""
    num_barren: int = 0
    """Steps in a row that verified a proposal of the host and accepted nothing."""
    has_accepted: bool = False
    """Something of what the host proposed was accepted."""
    num_proposals: int = 0
    """Since the last commit."""
    num_proposed_bytes: int = 0
    """In these."""

    def committed(self, position: int, now_s: float, *, is_plain: bool) -> float | None:
        """It is told of a commit that ends at a position: proposals are due.

        `is_plain`: the step had nothing to verify. If it had, a draft that is still to answer the commit before was
        far enough ahead. Returns for how long that one has waited, None if it was answered.
        """
        self.num_proposals = self.num_proposed_bytes = 0
        if self.unanswered_s is None:
            self.unanswered_s, self.unanswered_position = now_s, position
            if self.num_late:
                self.num_late = max(0, self.num_late - _CATCH_UP_STEPS)
            return None
        if is_plain and self.has_proposed:
            self.num_late += 1
        return now_s - self.unanswered_s

    def proposed(self, proposal: bytes, now_s: float) -> float | None:
        """It proposes; returns how long a commit has waited for that, None if none has."""
        had_proposed, self.has_proposed = self.has_proposed, True
        if self.unanswered_s is None:
            return None
        start = start_position(proposal)
        if start is not None and start < self.unanswered_position:
            return None  # made before it knew of the commit
        took_s, self.unanswered_s = now_s - self.unanswered_s, None
        if had_proposed:
            self.num_answers += 1
            self.answer_s += (took_s - self.answer_s) * max(_ANSWER_WEIGHT, 1 / self.num_answers)
        return took_s

    def suspended(self) -> None:
        """It is told that nobody wants its proposals, so that none is due, nor is what follows measured."""
        self.is_suspended, self.unanswered_s = True, None
        self.measure_anew()

    def pace_s(self, now_s: float) -> float:
        """What it takes to answer a commit, or the time for which one has been waiting, if that is longer."""
        waits_s = 0.0 if self.unanswered_s is None else now_s - self.unanswered_s
        return max(self.answer_s, waits_s)

    def measure_anew(self) -> None:
        """What it took before counts no more, nor does what is under way."""
        self.has_proposed, self.num_answers, self.answer_s = False, 0, 0.0


@dataclass(slots=True, eq=False)
class Drafting:
    """A session's drafts. Epochs count openings at any draft, and only grow: what comes from an earlier one is dropped.

    Invariant: a draft's link has the session exactly while one of the sides is there.
    """

    sides: list[DraftSide] = field(default_factory=list)
    """Of two, the second is the hedge."""
    num_openings: int = 0
    num_failures: int = 0
    """Since a draft last came up."""
    num_stalls: int = 0
    """Moves since a proposal came, because none did."""
    num_deaths: int = 0
    """Drafts that died while they worked for it, with nothing of what they proposed accepted between."""
    num_changes: int = 0
    """Hedges and moves because a draft was slow. Each doubles the patience: whatever is gained, not much is lost."""
    retry: asyncio.TimerHandle | None = None
    is_coming: bool = False
    """One was chosen, and is opened as soon as the target is."""

    @property
    def has_draft(self) -> bool:
        """Whether it has one, or is about to."""
        return self.is_coming or bool(self.sides)

    def at(self, host: DraftHost[Any]) -> DraftSide | None:
        """The side at a draft."""
        for side in self.sides:
            if side.host is host:
                return side
        return None

    def epoch_at(self, host: DraftHost[Any]) -> int:
        """Of the opening at a draft; 0 where it is not open."""
        side = self.at(host)
        return 0 if side is None else side.epoch

    def opened(self, host: DraftHost[Any]) -> DraftSide:
        """A new opening begins at a draft, in place of the one there, if any."""
        self.num_openings += 1
        self.is_coming = False
        side, former = DraftSide(host, self.num_openings), self.at(host)
        if former is None:
            self.sides.append(side)
        else:
            self.sides[self.sides.index(former)] = side
        return side

    def closed(self, host: DraftHost[Any]) -> None:
        """It is open at a draft no more; the other one, if there are two, goes on alone."""
        self.sides = [side for side in self.sides if side.host is not host]

    def died(self, side: DraftSide) -> None:
        """A draft ended by itself while it worked for the session."""
        self.num_deaths = 1 if side.has_accepted else self.num_deaths + 1

    def is_slow(self, side: DraftSide) -> bool:
        """Whether a draft has been late for long."""
        return side.num_late >= _SLOW_STEPS * 2 ** min(self.num_changes, _MOST_DOUBLINGS)

    def pardon(self, for_s: float, now_s: float) -> None:
        """For so long nobody here listened: that is no time in which anybody proposed nothing."""
        for side in self.sides:
            if side.unanswered_s is not None:
                side.unanswered_s = min(now_s, side.unanswered_s + for_s)

    def cancel_retry(self) -> None:
        """Do not open the session again by itself."""
        if self.retry is not None:
            self.retry.cancel()
            self.retry = None


def start_position(proposal: bytes) -> int | None:
    """Where an encoded Proposal starts, of which no more is read; None if that does not come first.

    A draft's proposals start where the commits end that it knows of.
    """
    if not proposal or proposal[0] != _START_TAG:
        return None
    value = shift = 0
    for byte in proposal[1 : 1 + _MOST_VARINT_BYTES]:
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value
        shift += 7
    return None
