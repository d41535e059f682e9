"""The drafts of a fleet that have devices of their own: how many are up, and what that means for every target.

Sessions are spread evenly over the drafts, so that each target has the same part of its sessions at a lost one. These
decode plainly until another draft has them; then all drafts have more sessions than before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import simpy

from specdec.coordinator.timings import Timings
from specdec.plan.simulation.curve import ReplicaCurve

_TAKEN_UP_S = 0.5
"""Seconds in which another draft computes a session's tokens before it drafts: a prompt of a few thousand tokens."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Drafts of a fleet."""

    num: int
    per_node: int
    num_zones: int
    curve_at: Callable[[float], ReplicaCurve]
    """What a target does while this share of the drafts is up."""


@dataclass(slots=True)
class DraftPool:
    """One fleet's drafts, by their numbers."""

    settings: PoolSettings
    env: simpy.Environment
    curve: ReplicaCurve = field(init=False)
    """What targets do with the sessions that have a draft."""
    plain_share: float = 0.0
    """Part of the sessions without one."""
    _down: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.curve = self.settings.curve_at(1.0)

    @property
    def up(self) -> Sequence[int]:
        """Drafts that are up."""
        return [number for number in range(self.settings.num) if number not in self._down]

    def on_node(self, number: int) -> Sequence[int]:
        """Drafts on the node of one."""
        per_node = self.settings.per_node
        return [each for each in self.up if each // per_node == number // per_node]

    def in_zones(self, zones: set[str]) -> Sequence[int]:
        """Drafts in some of the zones."""
        settings = self.settings
        return [each for each in self.up if f"z{each // settings.per_node % settings.num_zones}" in zones]

    def lose(self, numbers: Sequence[int], *, at_once: bool) -> Generator[simpy.Event, Any, None]:
        """Drafts end. `at_once`: their streams are broken; else they are silent until their sessions count as stalled.

        A SimPy process.
        """
        num_before = len(self.up)
        self._down.update(numbers)
        self.plain_share += (1 - self.plain_share) * len(numbers) / max(1, num_before)
        yield self.env.timeout((0.0 if at_once else Timings().draft_stall_s) + _TAKEN_UP_S)
        self._spread()

    def bring_back(self, numbers: Sequence[int]) -> None:
        """Drafts are there again."""
        self._down.difference_update(numbers)
        self._spread()

    def _spread(self) -> None:
        """All sessions are spread over the drafts that are up."""
        share = len(self.up) / self.settings.num
        self.plain_share = 0.0 if share else 1.0
        if share:
            self.curve = self.settings.curve_at(share)
