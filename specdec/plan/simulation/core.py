"""A processor that several replicas share: while some of them compute, each advances at its part of the speed."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import simpy

_DONE_S = 1e-9


@dataclass(slots=True, eq=False)
class SharedCore:
    """Processor sharing without a cost of switches. A single user computes at full speed."""

    env: simpy.Environment
    _left_s: dict[simpy.Event, float] = field(default_factory=dict)
    """Work of each user, by the event that ends it."""
    _at_s: float = 0.0
    _turn: int = 0

    def work(self, seconds: float) -> Generator[simpy.Event, None, None]:
        """Compute for `seconds` of the processor's time; an interrupt ends it."""
        self._advance()
        done = self.env.event()
        self._left_s[done] = seconds
        self._plan()
        try:
            yield done
        finally:
            if done in self._left_s:  # interrupted
                self._advance()
                del self._left_s[done]
                self._plan()

    def _advance(self) -> None:
        now_s = float(self.env.now)
        if self._left_s:
            part_s = (now_s - self._at_s) / len(self._left_s)
            self._left_s = {done: left - part_s for done, left in self._left_s.items()}
        self._at_s = now_s

    def _plan(self) -> None:
        """Wake at the next end; a plan that another one has replaced wakes for nothing."""
        self._turn += 1
        if self._left_s:
            self.env.process(self._end_next(max(0.0, min(self._left_s.values())) * len(self._left_s), self._turn))

    def _end_next(self, wait_s: float, turn: int) -> Generator[simpy.Event, None, None]:
        yield self.env.timeout(wait_s)
        if turn != self._turn:
            return
        self._advance()
        for done in [each for each, left in self._left_s.items() if left <= _DONE_S]:
            del self._left_s[done]
            done.succeed()
        self._plan()
