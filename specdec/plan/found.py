"""What a search has found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdec.plan.deployment import Deployment
from specdec.plan.kind import Kind
from specdec.plan.simulation.faults import Scope
from specdec.plan.trial import Figures


@dataclass(frozen=True, slots=True)
class Tried:
    """A kind of replica that was looked at."""

    label: str
    least: int
    """Targets that its throughput and the losses to bear take."""
    num_targets: int | None
    """Targets that hold the objectives, by a rough trial but for the plan's kind; None: not tried, or none hold."""
    price: float
    """Dollars per hour: of the least number, or of what holds."""
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A rolling update in place that misses the objectives."""

    missed: str
    """The objective that it misses, with the figure; empty: the only target is gone meanwhile."""
    num_targets: int | None
    """Targets that hold the objectives meanwhile; None: no tried number does."""
    more: float
    """Dollars per hour of these and their drafts above the plan's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The plan."""

    kind: Kind
    deployment: Deployment
    figures: Figures
    """Undisturbed."""
    with_loss: Mapping[Scope, Figures]
    rolled: Figures | None
    """While targets are replaced one after the other; None: there is one."""
    update: Update | None
    """None: a rolling update holds the objectives."""
    fewer: str = ""
    """What fewer targets miss; empty: they have not the throughput, or none would be left after a loss."""
    tried: Sequence[Tried] = field(default_factory=tuple)

    @property
    def notes(self) -> list[str]:
        """What who buys the plan must know besides its figures, one line each."""
        return [f"Not fewer: {self.fewer}."] * bool(self.fewer) + self.warnings

    @property
    def warnings(self) -> list[str]:
        """What the plan does not hold."""
        if self.update is None:
            return []
        update, placement = self.update, self.deployment.placement
        harm = update.missed or "the only target is gone while it starts: requests wait up to 30 s, then fail"
        free = f"{placement.num_ranks} free {placement.device.name}"
        instead = f" or deploy {update.num_targets} targets for {update.more:.2f} dollars per hour more"
        return [
            f"Rolling updates in place miss the objectives ({harm}): set target.updateStrategy to surge, which takes "
            f"{free} meanwhile,{instead if update.num_targets else ' as no tried number of targets holds them'}."
        ]
