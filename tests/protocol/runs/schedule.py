"""What happens to a deployment, and when: drawn from a seed, written as one line, and read again from it."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Self

from tests.protocol.simulation.world import Shape

_PICKS = 1000
_NUM_PICKS = 4
_WEIGHTS = {
    "submit": 8, "disconnect": 4, "resume": 4, "steal": 3, "abort": 1,
    "cut": 8, "block": 2, "unblock": 3, "delay": 2,
    "kill": 5, "start": 6, "leave": 2, "freeze": 2, "thaw": 3,
    "end-engine": 2, "freeze-engine": 1, "slow": 2,
    "silence-store": 1, "deafen-store": 1, "part-from-store": 2, "mend-store": 3, "empty-store": 1,
}  # fmt: skip
"""Of each kind of action: how often it is drawn."""
_PAUSES_S = (0.0, 0.001, 0.004, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0)
_SHAPES = (
    Shape(coordinators=2, targets=2, drafts=2, clients=4),
    Shape(coordinators=2, targets=2, drafts=1, clients=3, keeps_names=True),
    Shape(coordinators=2, targets=1, drafts=1, clients=3, options={"proposal_path": "relayed"}),
    Shape(coordinators=3, targets=3, drafts=2, clients=5, options={"credit_window_tokens": 3}),
)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that happens. Its picks mean something in any situation, so that others can be left out."""

    pause_s: float
    """Since the action before."""
    kind: str
    picks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.pause_s:g}:{self.kind}:{','.join(map(str, self.picks))}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """What `str` made. Raises ValueError."""
        pause, kind, picks = text.split(":")
        if kind not in _WEIGHTS:
            raise ValueError(f"unknown action {kind!r}")
        return cls(float(pause), kind, tuple(map(int, picks.split(","))))


@dataclass(frozen=True, slots=True)
class Schedule:
    """A run: equal schedules make equal runs."""

    seed: int
    """Of the deployment's shape, and of all chance in its network and its programs."""
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        return " ".join([str(self.seed), *map(str, self.actions)])

    @classmethod
    def parse(cls, text: str) -> Self:
        """What `str` made. Raises ValueError."""
        seed, *actions = text.split()
        return cls(int(seed), tuple(map(Action.parse, actions)))

    @property
    def shape(self) -> Shape:
        """What is deployed."""
        return _SHAPES[self.seed % len(_SHAPES)]

    def of(self, actions: tuple[Action, ...]) -> Schedule:
        """The same deployment, to which something else happens."""
        return replace(self, actions=actions)


def draw(seed: int, *, most_actions: int = 24) -> Schedule:
    """Two requests to begin with, then whatever comes."""
    rng = random.Random(f"schedule {seed}")
    kinds = ["submit", "submit"]
    kinds += rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=rng.randint(most_actions // 3, most_actions))
    actions = [
        Action(rng.choice(_PAUSES_S), kind, tuple(rng.randrange(_PICKS) for _ in range(_NUM_PICKS))) for kind in kinds
    ]
    return Schedule(seed, tuple(actions))
