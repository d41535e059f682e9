"""Gates that suspend drafts without regard to speed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from specdec.target_service.policy.gate import SpeculationGate
from specdec.target_service.policy.gate_state import GateState


class Erratic(SpeculationGate):
    """Opens and closes at random."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._is_open: dict[int, bool] = {}

    def is_open(self, state: GateState | None) -> bool:
        return state is not None and self._is_open.get(id(state), True)

    def stepped(
        self, state: GateState, num_accepted: int, has_proposal: bool, now_s: float, *, num_nodes: int = 0
    ) -> None:
        if self._random.random() < 0.3:
            self._is_open[id(state)] = self._random.random() < 0.5


class Closed(SpeculationGate):
    """Suspends every session after its first token."""

    def is_open(self, state: GateState | None) -> bool:
        return False


class Bookkeeping(SpeculationGate):
    """Decides as the product does, and records the seconds of prompts computed for the target's own draft."""

    def __init__(self) -> None:
        super().__init__(computes_prompts=True)
        self.invested_s: list[float] = []
        self.excused_s = 0.0

    def invested(self, state: GateState, seconds: float) -> None:
        self.invested_s.append(seconds)
        super().invested(state, seconds)

    def observe_turn(self, states: Sequence[GateState | None], *, prompt_s: float = 0.0, **turn: Any) -> None:
        self.excused_s += prompt_s
        super().observe_turn(states, prompt_s=prompt_s, **turn)


class Spiteful(SpeculationGate):
    """Suspends a session after each step that accepted a token, and resumes it after the next step."""

    def __init__(self) -> None:
        super().__init__()
        self._closed: set[int] = set()

    def is_open(self, state: GateState | None) -> bool:
        return state is not None and id(state) not in self._closed

    def stepped(
        self, state: GateState, num_accepted: int, has_proposal: bool, now_s: float, *, num_nodes: int = 0
    ) -> None:
        if num_accepted:
            self._closed.add(id(state))
        else:
            self._closed.discard(id(state))
