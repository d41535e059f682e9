"""Assignment of one machine's cores to the services."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreAssignment:
    """Core numbers per part."""

    target_engine: tuple[int, ...]
    draft_engine: tuple[int, ...]
    shared: tuple[int, ...]
    """Cores of the servicers, the coordinator and the gateway."""


def share_cores(cores: Sequence[int]) -> CoreAssignment:
    """Return the cores if there is no draft service: the target's engine gets all but one, which the others share.

    With one or two cores all share all. Raises ValueError when there is no core.
    """
    ordered = tuple(sorted(set(cores)))
    if not ordered:
        raise ValueError("no cores to assign")
    if len(ordered) <= 2:
        return CoreAssignment(ordered, (), ordered)
    return CoreAssignment(ordered[:-1], (), ordered[-1:])


def assign_cores(cores: Sequence[int]) -> CoreAssignment:
    """Return half of `cores` for the target's engine, one for the draft's, the rest for the others.

    With two cores, everything but the target's engine shares the second one; with one core, all share it. The target's
    engine has cores of its own, because a preempted OpenMP thread stalls its whole team. Raises ValueError when there
    is no core.
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
