"""Speculation statistics of a choice, summed up from its verdicts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

from specdec.v1 import common_pb2 as pb
from specdec.v1 import coordinator_pb2 as api

_MOST_DRAFTERS = 64
"""Drafters counted per choice."""
_MOST_COUNT = 2**32 - 1
"""Largest value of the count fields; the sums are bounded because targets may report anything."""


@dataclass(slots=True)
class DrafterTally:
    """Counts of one of the target's own drafters."""

    num_proposed: int = 0
    num_verified: int = 0
    num_accepted: int = 0
    cost_us: int = 0

    def add(self, other: pb.DrafterRecord | DrafterTally) -> None:
        """Count a step, or the steps of another choice."""
        self.num_proposed += other.num_proposed
        self.num_verified += other.num_verified
        self.num_accepted += other.num_accepted
        self.cost_us += other.cost_us


@dataclass(slots=True)
class SpeculationTally:
    """Counts over one choice. Times are in microseconds unless named otherwise."""

    num_steps: int = 0
    num_verify_steps: int = 0
    num_verify_tokens: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_hits: int = 0
    num_suspended_steps: int = 0
    num_wasted: int = 0
    verified_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    admission_s: float = 0.0
    queue_us: int = 0
    prefill_us: int = 0
    draft_us: int = 0
    step_us: int = 0
    hold_off_us: int = 0
    hit_outside_us: float = 0.0
    first_verdict_s: float | None = None
    last_verdict_s: float = 0.0
    drafters: dict[str, DrafterTally] = field(default_factory=dict)
    """Counts by name of the target's own drafters."""
    num_partial_tokens: int = 0
    """Tokens of a step whose last verdict is still to come."""

    @property
    def previous_verdict_s(self) -> float | None:
        """Monotonic time of the last verdict; None if there was none."""
        return None if self.first_verdict_s is None else self.last_verdict_s

    def add(self, verdict: pb.Verdict, num_kept: int, is_first: bool, now_s: float) -> None:
        """Count a step at its last verdict.

        Args:
            verdict: the step's last verdict.
            num_kept: tokens of the step that survived the stop check.
            is_first: first verdict of the choice; its step ends the prefill and is counted there.
            now_s: monotonic time of its arrival.
        """
        gap_us = (now_s - self.last_verdict_s) * 1e6
        self.last_verdict_s = now_s
        if self.first_verdict_s is None:
            self.first_verdict_s = now_s
        for record in verdict.drafters:
            self._add_drafter(record.name, record)
        self.queue_us += verdict.queue_us
        self.prefill_us += verdict.prefill_us
        self.num_wasted += verdict.num_wasted
        if is_first and not verdict.verified_by_depth:
            return
        self.num_steps += 1
        self.num_hits += verdict.hit
        self.num_suspended_steps += verdict.suspends_draft
        if verdict.hit:
            self.hit_outside_us += gap_us - verdict.step_us - verdict.hold_off_us
        self.step_us += verdict.step_us
        self.hold_off_us += verdict.hold_off_us
        self.draft_us += verdict.draft_us
        if verdict.verified_by_depth:
            self._add_verified(verdict, num_kept)

    def _add_drafter(self, name: str, record: pb.DrafterRecord | DrafterTally) -> None:
        known = self.drafters.get(name)
        if known is None:
            if len(self.drafters) >= _MOST_DRAFTERS:
                return
            known = self.drafters[name] = DrafterTally()
        known.add(record)

    def _add_verified(self, verdict: pb.Verdict, num_kept: int) -> None:
        verified = list(verdict.verified_by_depth)
        num_depths = sum(num > 0 for num in verified)
        num_accepted = min(verdict.num_accepted, num_kept)
        self.num_verify_steps += 1
        self.num_verify_tokens += num_kept
        self.num_proposed += sum(verified)
        self.num_accepted += num_accepted
        _count_up_to(self.verified_by_depth, num_depths)
        _count_up_to(self.accepted_by_depth, num_accepted)

    def to_proto(self) -> api.SpeculationStats:
        """The statistics for clients."""
        wall_us = 0.0 if self.first_verdict_s is None else (self.last_verdict_s - self.first_verdict_s) * 1e6
        return _stats(self, max(0.0, wall_us - self.step_us - self.hold_off_us))


def total(tallies: Iterable[SpeculationTally]) -> api.SpeculationStats:
    """Statistics over a request's choices: sums of counts and times, and rates of these sums."""
    sum_ = SpeculationTally()
    outside_us = 0.0
    for tally in tallies:
        for name in _SUMMED:
            setattr(sum_, name, getattr(sum_, name) + getattr(tally, name))
        for name, record in tally.drafters.items():
            sum_._add_drafter(name, record)
        _count_depths(sum_.verified_by_depth, tally.verified_by_depth)
        _count_depths(sum_.accepted_by_depth, tally.accepted_by_depth)
        sum_.admission_s = max(sum_.admission_s, tally.admission_s)
        outside_us += tally.to_proto().outside_ms * 1e3
    return _stats(sum_, outside_us)


def prediction_counts(stats: api.SpeculationStats) -> tuple[int, int]:
    """Accepted and verified tokens of a prediction."""
    for record in stats.drafters:
        if record.name == "prediction":
            return min(record.num_accepted, record.num_verified), record.num_verified
    return 0, 0


_SUMMED = (
    "num_steps",
    "num_verify_steps",
    "num_verify_tokens",
    "num_proposed",
    "num_accepted",
    "num_hits",
    "num_suspended_steps",
    "num_wasted",
    "queue_us",
    "prefill_us",
    "draft_us",
    "step_us",
    "hold_off_us",
    "hit_outside_us",
)


def _count_up_to(counts: list[int], depth: int) -> None:
    if len(counts) < depth:
        counts.extend([0] * (depth - len(counts)))
    for index in range(depth):
        counts[index] += 1


def _count_depths(counts: list[int], more: Iterable[int]) -> None:
    counts[:] = [a + b for a, b in zip_longest(counts, more, fillvalue=0)]


def _stats(tally: SpeculationTally, outside_us: float) -> api.SpeculationStats:
    verify_steps = tally.num_verify_steps
    return api.SpeculationStats(
        num_steps=tally.num_steps,
        num_verify_steps=verify_steps,
        num_proposed=min(tally.num_proposed, _MOST_COUNT),
        num_accepted=tally.num_accepted,
        verified_by_depth=tally.verified_by_depth,
        accepted_by_depth=tally.accepted_by_depth,
        mean_acceptance_length=tally.num_verify_tokens / verify_steps if verify_steps else 0.0,
        hit_rate=tally.num_hits / tally.num_steps if tally.num_steps else 0.0,
        num_wasted=min(tally.num_wasted, _MOST_COUNT),
        queue_ms=tally.admission_s * 1e3 + tally.queue_us / 1e3,
        prefill_ms=tally.prefill_us / 1e3,
        draft_ms=tally.draft_us / 1e3,
        verify_ms=tally.step_us / 1e3,
        hold_off_ms=tally.hold_off_us / 1e3,
        outside_ms=outside_us / 1e3,
        num_hits=tally.num_hits,
        num_suspended_steps=tally.num_suspended_steps,
        hit_outside_ms=tally.hit_outside_us / 1e3,
        drafters=[
            api.DrafterStats(
                name=name,
                num_proposed=min(record.num_proposed, _MOST_COUNT),
                num_verified=min(record.num_verified, _MOST_COUNT),
                num_accepted=min(record.num_accepted, _MOST_COUNT),
                cost_ms=record.cost_us / 1e3,
            )
            for name, record in sorted(tally.drafters.items())
        ],
    )
