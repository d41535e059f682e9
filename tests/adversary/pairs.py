"""The models that a fleet serves, and what its requests look like with them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from specdec.commands.up.plan import shipped_model
from tests.adversary.fleet import FleetSettings
from tests.adversary.topology import Topology
from tests.adversary.workload import Sizes
from tests.support.services.model_pair import ModelPair
from tests.support.services.tiny_pair import make_tiny_pair

TINY_HOLD_OFF_MS = 50
"""A step of a tiny target costs less than a draft's answer takes, so its cost model would rightly not wait for one."""
TINY_SIZES = Sizes(prompt=(3, 700), output=(24, 400), vocabulary=250)
SHIPPED_SIZES = Sizes(prompt=(3, 700), output=(24, 320), vocabulary=4000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Models, and sizes of requests that fit them."""

    pair: ModelPair
    sizes: Sizes
    target: dict[str, object] = field(default_factory=dict)

    def fleet(self, topology: Topology) -> FleetSettings:
        """Settings of a fleet that serves it."""
        return FleetSettings(pair=self.pair, topology=topology, target=self.target)


def subject(name: str, folder: Path) -> Subject:
    """tiny or shipped; the tiny pair is written to the folder."""
    if name == "tiny":
        pair = make_tiny_pair(folder / "tiny_pair", max_model_len=2048)
        return Subject(pair=pair, sizes=TINY_SIZES, target={"hold_off_ms": TINY_HOLD_OFF_MS})
    if name == "shipped":
        pair = ModelPair(Path(shipped_model("target")), Path(shipped_model("draft")))
        return Subject(pair=pair, sizes=SHIPPED_SIZES)
    raise ValueError(f"no pair is called {name}; there are tiny and shipped")


def replicas_with(fleet: FleetSettings, **settings: object) -> FleetSettings:
    """The same fleet, with these settings of its targets and drafts."""
    return replace(fleet, target={**fleet.target, **settings}, draft={**fleet.draft, **settings})
