"""Whom of the suspended sessions to probe, and when a probe is over: a few at a time, more while they find gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.target_service.policy.gate_state import GateState

PROBE_STEPS = 16
"""Of a probe, at most."""
_BARREN, _BARREN_OF_KIND = 6, 3
"""A probe is over sooner when so many steps have accepted nothing, the last number where hardly anything ever is in
sessions of its kind."""
_BARREN_KIND = 0.1
"""Accepted tokens per step, whatever verifying them costs, below which that is said of a kind."""
_INTERVAL_S = 0.4


@dataclass(slots=True)
class Probing:
    """Of all sessions of a target."""

    _due_s: float = 0.0
    _num_at_once: int = 1

    @staticmethod
    def is_over(state: GateState, accepted_by_kind: float | None) -> bool:
        """Whether a probe that has not paid yet has had its chance.

        `accepted_by_kind`: tokens that sessions of its kind accept per step; None: not known.
        """
        is_barren = accepted_by_kind is not None and accepted_by_kind < _BARREN_KIND
        return state.num_counted >= PROBE_STEPS or state.num_barren >= (_BARREN_OF_KIND if is_barren else _BARREN)

    def succeeded(self, now_s: float) -> None:
        """Twice as many are probed, at once."""
        self._num_at_once *= 2
        self._due_s = now_s

    def failed(self) -> None:
        """One at a time."""
        self._num_at_once = 1

    def postpone(self, now_s: float) -> None:
        """A session was suspended: those that are left first show what they gain."""
        self._due_s = max(self._due_s, now_s + _INTERVAL_S)

    def next_ones(self, suspended: Sequence[GateState], num_under_way: int, now_s: float) -> Sequence[GateState]:
        """Of the suspended sessions, in the order of their turns, those to be probed from now on."""
        num_left = self._num_at_once - num_under_way
        if now_s < self._due_s or num_left <= 0:
            return ()
        if not suspended:
            self._num_at_once = 1
        self._due_s = now_s + _INTERVAL_S
        return suspended[:num_left]
