"""Which service gets which cores, when one machine runs them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreAssignment:
    """Core numbers per part."""

    target_engine: tuple[int, ...]
    draft_engine: tuple[int, ...]
    shared: tuple[int, ...]
    """For the servicers and the coordinator."""


def share_cores(cores: Sequence[int]) -> CoreAssignment:
    """Return what a target that runs its draft itself gets: all cores but one of more than two, for the others.

    With two or less, all share all. Raises ValueError when there is no core.
    """
    ordered = tuple(sorted(set(cores)))
    if not ordered:
        raise ValueError("no cores to assign")
    if len(ordered) <= 2:
        return CoreAssignment(ordered, (), ordered)
    return CoreAssignment(ordered[:-1], (), ordered[-1:])


def assign_cores(cores: Sequence[int]) -> CoreAssignment:
    """Return about half of `cores` for the target's engine, one for the draft's, the rest for the others. The engines
    share no core unless there is only one.

    With two cores, everything but the target's engine shares the second one; with one core, all share it.
    OpenMP threads that are preempted stall their whole team, so the target's engine is never disturbed.
    Raises ValueError when there is no core.
    """
    ordered = tuple(sorted(set(cores)))
    if not ordered:
        raise ValueError("no cores to assign")
    if len(ordered) == 1:
        return CoreAssignment(ordered, ordered, ordered)
    if len(ordered) == 2:
        return CoreAssignment(ordered[:1], ordered[1:], ordered[1:])
    num_target = max(1, len(ordered) // 2)
    return CoreAssignment(
        target_engine=ordered[:num_target],
        draft_engine=ordered[num_target : num_target + 1],
        shared=ordered[num_target + 1 :],
    )
