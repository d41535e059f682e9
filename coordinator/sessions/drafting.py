"""The drafts of a session: none, one, or two for a bounded time (`recovery.hedging`), and how each keeps up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from specdec.coordinator.sessions.hosts import DraftHost
from specdec.v1 import common_pb2 as pb
from specdec.wire.proposals import start_position

_SLOW_STEPS = 16
"""Late steps, each timely one counting -2, after which a draft is slow. A draft that is late for two thirds of the
steps or fewer never becomes slow."""
_CATCH_UP_STEPS = 2
"""Late steps that one timely step cancels."""
_MOST_DOUBLINGS = 6
_DEAF_S = 0.25
"""Seconds without an answer, at least, after which a draft with a direct link gets its tokens from the coordinator
too."""
_DEAF_ANSWERS = 4
"""The same in mean times to answer; the longer one counts."""
_ANSWER_WEIGHT = 0.125
"""Weight of the last answer in the mean: about eight answers count."""


class DraftFault(Enum):
    """A fault of a draft that it does not report."""

    STALL = auto()
    """The draft proposes nothing."""
    SLOW = auto()
    """The draft's proposals are too late for most steps."""
    FLOOD = auto()
    """The draft proposes far too much."""


@dataclass(slots=True, eq=False)
class DraftSide:
    """A session at a draft, from one opening to the next."""

    host: DraftHost[Any]
    epoch: int
    told: int = 0
    """Position up to which it knows the session's tokens."""
    is_suspended: bool = False
    """It was told to stop drafting; it gets the tokens when it is to resume."""
    is_linked: bool = False
    """It has joined the session at the target, which sends it the tokens."""
    linked_position: int = 0
    """The greatest position up to which it has said to know tokens, by way of the target."""
    granted_for: int | None = None
    """Epoch of the target's opening for which it was granted a link; None: for none."""
    is_open: bool = False
    """The host has confirmed the opening."""
    unanswered_s: float | None = None
    """Monotonic time of the first commit that no proposal has covered yet; None: all are covered."""
    unanswered_position: int = 0
    """End position of that commit."""
    has_proposed: bool = False
    """A proposal came since measuring began: the first one waits for the prompt and is not measured."""
    num_answers: int = 0
    """Commits that a later proposal covered."""
    answer_s: float = 0.0
    """Mean time from a commit to the proposal that covers it, weighted to the last answers."""
    num_late: int = 0
    """Steps for which it was late, less twice the timely ones; never below 0."""
    num_barren: int = 0
    """Steps in a row that verified its proposal and accepted no token."""
    has_accepted: bool = False
    """One of its tokens was accepted."""
    num_proposals: int = 0
    """Proposals since the last commit."""
    num_proposed_bytes: int = 0
    """Bytes of these proposals."""
    num_link_changes: int = 0
    """Joins and leaves of its link since the last commit."""

    def committed(self, position: int, now_s: float, *, is_plain: bool) -> float | None:
        """A commit that ends at `position` is sent: a proposal is due.

        `is_plain`: the step verified nothing. If it verified something, a draft that has not answered the commit
        before was far enough ahead. Returns the seconds that commit has waited, None if it was answered.
        """
        self.num_proposals = self.num_proposed_bytes = self.num_link_changes = 0
        if self.unanswered_s is None:
            self.unanswered_s, self.unanswered_position = now_s, position
            if self.num_late:
                self.num_late = max(0, self.num_late - _CATCH_UP_STEPS)
            return None
        if is_plain and self.has_proposed:
            self.num_late += 1
        return now_s - self.unanswered_s

    def proposed(self, proposal: bytes, now_s: float) -> float | None:
        """A proposal came; returns the seconds that a commit waited for it, None if none did."""
        start = start_position(proposal)
        return self._answered(start is None or start >= self.unanswered_position, now_s, None)

    def answered_directly(self, linked: pb.LinkedDraft, position: int, now_s: float) -> float | None:
        """The target reports how far the draft has answered; as `proposed`. `position`: the session's."""
        if not linked.position:
            return None
        self.told = min(position, max(self.told, linked.position))
        took_s = linked.answer_us * 1e-6 if linked.answer_us else None
        return self._answered(linked.position >= self.unanswered_position, now_s, took_s)

    def _answered(self, covers: bool, now_s: float, took_s: float | None) -> float | None:
        """A proposal came, or is known to have come after `took_s`; `covers`: it was made after the awaited commit."""
        had_proposed, self.has_proposed = self.has_proposed, True
        if self.unanswered_s is None or not covers:
            return None
        if took_s is None:
            took_s = now_s - self.unanswered_s
        self.unanswered_s = None
        if had_proposed:
            self.num_answers += 1
            self.answer_s += (took_s - self.answer_s) * max(_ANSWER_WEIGHT, 1 / self.num_answers)
        return took_s

    def seems_deaf(self, now_s: float) -> bool:
        """Whether a draft that takes tokens from the target has not answered for so long that they may not arrive."""
        if self.unanswered_s is None:
            return False
        return now_s - self.unanswered_s >= max(_DEAF_S, _DEAF_ANSWERS * self.answer_s)

    def may_be_ahead(self, position: int) -> bool:
        """Whether it may have tokens from the target that have not arrived here; `position`: the session's."""
        return self.is_linked or self.linked_position > position

    def suspended(self) -> None:
        """The draft is told to stop: no proposal is due, and measuring begins anew."""
        self.is_suspended, self.unanswered_s = True, None
        self.measure_anew()

    def pace_s(self, now_s: float) -> float:
        """Seconds to answer a commit: the mean, or the present wait if that is longer."""
        waits_s = 0.0 if self.unanswered_s is None else now_s - self.unanswered_s
        return max(self.answer_s, waits_s)

    def measure_anew(self) -> None:
        """Discard the measured answers and the one under way."""
        self.has_proposed, self.num_answers, self.answer_s = False, 0, 0.0


@dataclass(slots=True, eq=False)
class Drafting:
    """A session's drafts. Epochs count openings at any draft; results of earlier ones are dropped.

    Invariant: a draft's link has the session exactly while `sides` has one for it.
    """

    sides: list[DraftSide] = field(default_factory=list)
    """Of two, the second is the hedge."""
    num_openings: int = 0
    num_failures: int = 0
    """Failures since a draft last came up."""
    num_stalls: int = 0
    """Moves because of stalls since the last proposal."""
    num_deaths: int = 0
    """Drafts that died in a step of this session, without an accepted token between."""
    num_changes: int = 0
    """Hedges and moves because a draft was slow. Each doubles the late steps needed for the next."""
    retry: asyncio.TimerHandle | None = None
    is_coming: bool = False
    """A draft is chosen, and is opened right after the target."""

    @property
    def has_draft(self) -> bool:
        """Whether it has a draft, or is about to get one."""
        return self.is_coming or bool(self.sides)

    def at(self, host: DraftHost[Any]) -> DraftSide | None:
        """The side at a draft."""
        for side in self.sides:
            if side.host is host:
                return side
        return None

    def epoch_at(self, host: DraftHost[Any]) -> int:
        """Epoch of the opening at a draft; 0 if it is not open there."""
        side = self.at(host)
        return 0 if side is None else side.epoch

    def opened(self, host: DraftHost[Any]) -> DraftSide:
        """Begin a new opening at a draft, which replaces an earlier one there."""
        self.num_openings += 1
        self.is_coming = False
        side, former = DraftSide(host, self.num_openings), self.at(host)
        if former is None:
            self.sides.append(side)
        else:
            self.sides[self.sides.index(former)] = side
        return side

    def closed(self, host: DraftHost[Any]) -> None:
        """The session is closed at a draft."""
        self.sides = [side for side in self.sides if side.host is not host]

    def died(self, side: DraftSide) -> None:
        """A draft crashed in a step of the session."""
        self.num_deaths = 1 if side.has_accepted else self.num_deaths + 1

    def is_slow(self, side: DraftSide) -> bool:
        """Whether a draft has been late for too many steps."""
        return side.num_late >= _SLOW_STEPS * 2 ** min(self.num_changes, _MOST_DOUBLINGS)

    def pardon(self, for_s: float, now_s: float) -> None:
        """Do not count `for_s` seconds in which this process stood still."""
        for side in self.sides:
            if side.unanswered_s is not None:
                side.unanswered_s = min(now_s, side.unanswered_s + for_s)

    def cancel_retry(self) -> None:
        """Cancel the planned opening at a draft."""
        if self.retry is not None:
            self.retry.cancel()
            self.retry = None
