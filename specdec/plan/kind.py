"""A kind of replica: a placement, and what it does at each load."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from specdec.plan.deployment import BATCH_TOKENS, MOST_BATCH, Placement, num_drafts
from specdec.plan.simulation.curve import ReplicaCurve
from specdec.plan.simulation.draft_pool import PoolSettings
from specdec.plan.simulation.target import TargetSettings

_DRAFT_PARTS = 12
"""Parts in which the share of drafts that are up is rounded down: each takes a curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A placement with its curves."""

    placement: Placement
    curve: ReplicaCurve
    plain: ReplicaCurve
    crowded: Callable[[float], ReplicaCurve] | None = None
    """Curve while this share of the drafts is up; None: targets have no drafts on other devices."""

    def curve_at(self, share: float) -> ReplicaCurve:
        """What a target does while a share of the drafts, above 0, is up."""
        if self.crowded is None or share >= 1:
            return self.curve
        return self.crowded(max(1, math.floor(share * _DRAFT_PARTS)) / _DRAFT_PARTS)

    def pool(self, num_targets: int, num_zones: int, *, may_lose: bool) -> PoolSettings | None:
        """The drafts of a number of targets; None: they have none on other devices."""
        device = self.placement.draft_device
        if device is None:
            return None
        num = num_drafts(self.placement, num_targets, may_lose=may_lose)
        per_node = min(device.per_node, math.ceil(num / max(2, num_zones)))  # the chart spreads pods over nodes
        return PoolSettings(num, per_node, num_zones, self.curve_at)

    def settings(self) -> TargetSettings:
        """Settings of a target of this kind."""
        return TargetSettings(
            curve=self.curve,
            plain=self.plain,
            steps=self.placement.steps,
            kv_tokens=self.placement.kv_tokens,
            max_batch_seqs=min(MOST_BATCH, self.curve.most_sessions),
            max_batch_tokens=BATCH_TOKENS["gpu" if self.placement.device.flops else "cpu"],
        )
