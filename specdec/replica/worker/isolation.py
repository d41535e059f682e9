"""A fault ends only the session that caused it: how that session is found.

An exception in one session's part of the work ends that session (`specdec.replica.worker.errors`). Work for many
sessions that raises is repeated with halves of them, until the one at fault is known.

Some faults kill the process. Sessions that their owners suspect of it step alone, and all others together: each
suspect, and the others as one group, gets one step in turn. So no session waits for more than one step of each other
group, and an engine that dies in the step of a single session shows which one caused it.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Generic, TypeVar

import structlog

from specdec.engine.engine import Engine
from specdec.engine.errors import is_out_of_memory
from specdec.engine.outputs import StepOutput
from specdec.engine.runner import PassObserver
from specdec.engine.sequence import Sequence
from specdec.replica.worker.errors import is_engines_own
from specdec.replica.worker.sessions import SessionT

_MOST_FAULTS_IN_A_ROW = 2
"""Faults without a good step in between after which the engine ends."""
_MOST_MEMORY_FAULTS = 3
"""The same for faults that are too little memory of a device, which each gives some back."""
_log = structlog.get_logger("specdec.replica.worker")
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def each_or_halves(
    items: list[ItemT], run: Callable[[list[ItemT]], list[ResultT]], on_fault: Callable[[ItemT, Exception], None]
) -> list[ResultT]:
    """The results of `run` for all items except those for which it raises; `on_fault` gets these.

    `run` must change nothing if it raises. Raises its error if it is the engine's own, or if every item fails.
    """
    faults: list[tuple[ItemT, Exception]] = []
    results = _run_halves(items, run, faults)
    if len(faults) > 1 and len(faults) == len(items):
        raise faults[0][1]
    for item, error in faults:
        on_fault(item, error)
    return results


def _run_halves(
    items: list[ItemT], run: Callable[[list[ItemT]], list[ResultT]], faults: list[tuple[ItemT, Exception]]
) -> list[ResultT]:
    try:
        return run(items)
    except Exception as error:
        if is_engines_own(error):
            raise
        if len(items) == 1:
            faults.append((items[0], error))
            return []
    middle = len(items) // 2
    return _run_halves(items[:middle], run, faults) + _run_halves(items[middle:], run, faults)


class IsolatedSteps:
    """Steps of an engine. After a step that raises, its sequences are computed again in halves, until the faulty one is
    known.

    A half is cleared when all its sequences have reached their former length. Meanwhile no other sequence steps, so
    that the next failure is the half's.
    """

    def __init__(self, engine: Engine, observer: PassObserver, *, is_alone: bool) -> None:
        """`is_alone`: no other rank takes part in steps; other ranks would hang after a step that raises."""
        self._engine = engine
        self._observer = observer
        self._is_alone = is_alone
        self._halves: list[list[tuple[Sequence, int]]] = []
        self._faults_in_a_row = 0

    def step(
        self, on_fault: Callable[[Sequence, Exception], None], only: Container[int] | None = None
    ) -> StepOutput | None:
        """Engine.step; None after a step that raised. `on_fault` gets the faulty sequence.

        While halves are tried, they step whatever `only` says.

        Raises the step's error if it is the engine's own, and at the second fault without a good step in between.
        """
        return self.collect(on_fault) if self.launch(on_fault, only) else None

    def launch(self, on_fault: Callable[[Sequence, Exception], None], only: Container[int] | None = None) -> bool:
        """Engine.launch; False also if it raised. Otherwise as `step`."""
        while True:
            suspects = self._suspects()
            try:
                seq_ids = only if suspects is None else {seq.seq_id for seq, _ in suspects}
                is_launched = self._engine.launch(seq_ids, self._observer)
            except Exception as error:
                self._on_raise(error, on_fault)
                return False
            if is_launched or suspects is None:
                return is_launched
            self._halves.pop(0)  # no sequence of it can run now

    def collect(self, on_fault: Callable[[Sequence, Exception], None]) -> StepOutput | None:
        """Engine.collect; None if the pass raised. Otherwise as `step`."""
        try:
            output = self._engine.collect()
        except Exception as error:
            self._on_raise(error, on_fault)
            return None
        self._faults_in_a_row = 0
        return output

    def _suspects(self) -> list[tuple[Sequence, int]] | None:
        """The half that is being tried; None: all sequences may run."""
        while self._halves:
            if any(self._is_suspect(seq, num_tokens) for seq, num_tokens in self._halves[0]):
                return self._halves[0]
            self._halves.pop(0)
        return None

    def _is_suspect(self, seq: Sequence, num_tokens: int) -> bool:
        return self._engine.scheduler.holds(seq) and seq.is_ready and seq.num_computed_tokens < num_tokens

    def _on_raise(self, error: Exception, on_fault: Callable[[Sequence, Exception], None]) -> None:
        if is_engines_own(error) or not self._is_alone:
            raise error
        batch = self._engine.abandon_step()
        if self._halves:
            self._halves.pop(0)
        _log.warning("step_failed", num_sequences=len(batch), error=repr(error))
        most = _MOST_FAULTS_IN_A_ROW
        if is_out_of_memory(error):
            self._engine.release_memory()
            most = _MOST_MEMORY_FAULTS
        if len(batch) == 1:
            self._faults_in_a_row += 1
            if self._faults_in_a_row >= most:
                raise error
            if self._engine.scheduler.holds(batch[0]):
                on_fault(batch[0], error)
            return
        suspects = [(seq, len(seq.token_ids)) for seq in batch if self._engine.scheduler.holds(seq)]
        middle = len(suspects) // 2
        self._halves[:0] = [half for half in (suspects[:middle], suspects[middle:]) if half]


class FaultIsolation(Generic[SessionT]):
    """Groups sessions that step together, and orders their turns."""

    def __init__(self, position: Callable[[SessionT], int]) -> None:
        """`position` returns a session's number of committed tokens."""
        self._position = position
        self._num_turns = 0
        self._others_turn = 0

    def is_apart(self, session: SessionT) -> bool:
        """Whether a session steps alone."""
        return bool(session.apart_until) and self._position(session) < session.apart_until

    def groups(self, sessions: list[SessionT]) -> list[list[SessionT]]:
        """The sessions in groups, the longest-waiting group first; one group if none steps alone."""
        apart = [session for session in sessions if session.apart_until and self.is_apart(session)]
        if not apart:
            return [sessions]
        turns = [(session.apart_turn, [session]) for session in apart]
        if len(apart) < len(sessions):
            turns.append((self._others_turn, [session for session in sessions if not self.is_apart(session)]))
        return [group for _, group in sorted(turns, key=lambda turn: turn[0])]

    def take(self, group: list[SessionT]) -> None:
        """Count this group's turn: all others come before its next."""
        self._num_turns += 1
        if len(group) == 1 and self.is_apart(group[0]):
            group[0].apart_turn = self._num_turns
        else:
            self._others_turn = self._num_turns
