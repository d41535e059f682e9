"""A fault costs the one session that it belongs to: whose share of the work it was, and how that is found out.

Whatever is raised in one session's share ends that session (`specdec.replica.worker.errors`). What is raised for many
at once is tried again with halves of them, until it is known whose it is.

Some faults end the process without a word. Sessions of which an owner fears that step alone, and all others together:
each of them, and the others as one, gets one step in turn. So nobody waits for more than one step of everybody else,
and an engine that ends in the step of a single session tells whose it was.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Generic, TypeVar

import structlog

from specdec.engine.engine import Engine
from specdec.engine.outputs import StepOutput
from specdec.engine.runner import PassObserver
from specdec.engine.sequence import Sequence
from specdec.replica.worker.errors import is_engines_own
from specdec.replica.worker.sessions import SessionT

_MOST_FAULTS_IN_A_ROW = 2
_log = structlog.get_logger("specdec.replica.worker")
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def each_or_halves(
    items: list[ItemT], run: Callable[[list[ItemT]], list[ResultT]], on_fault: Callable[[ItemT, Exception], None]
) -> list[ResultT]:
    """The results of `run` for all items but those it raises for, which `on_fault` is told of.

    `run` must change nothing when it raises. Raises its error when it is the engine's own, or when no item is without.
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
    """Steps of an engine. After one that raises, those who were in it are computed anew, in halves, until it is known
    who it raises for.

    A half is cleared when all of it has got as far as it was. Meanwhile nobody else steps, so that what fails next
    tells something about the half.
    """

    def __init__(self, engine: Engine, observer: PassObserver, *, is_alone: bool) -> None:
        """`observer` is told of every pass. `is_alone`: no other rank has a part in steps; with others a step that
        raises leaves them behind.
        """
        self._engine = engine
        self._observer = observer
        self._is_alone = is_alone
        self._halves: list[list[tuple[Sequence, int]]] = []
        self._faults_in_a_row = 0

    def step(
        self, on_fault: Callable[[Sequence, Exception], None], only: Container[int] | None = None
    ) -> StepOutput | None:
        """As Engine.step; None after a step that raised. `on_fault` is told of the sequence that is to blame.

        While halves are tried these step, whatever `only` says.

        Raises what a step raises when it is the engine's own, and at the second fault without a good step in between.
        """
        return self.collect(on_fault) if self.launch(on_fault, only) else None

    def launch(self, on_fault: Callable[[Sequence, Exception], None], only: Container[int] | None = None) -> bool:
        """As Engine.launch, and false after one that raised; otherwise as `step`."""
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
            self._halves.pop(0)  # nothing of it can run now

    def collect(self, on_fault: Callable[[Sequence, Exception], None]) -> StepOutput | None:
        """As Engine.collect, and None where the pass raised; otherwise as `step`."""
        try:
            output = self._engine.collect()
        except Exception as error:
            self._on_raise(error, on_fault)
            return None
        self._faults_in_a_row = 0
        return output

    def _suspects(self) -> list[tuple[Sequence, int]] | None:
        """The half that is being tried; None: all may run."""
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
        if len(batch) == 1:
            self._faults_in_a_row += 1
            if self._faults_in_a_row >= _MOST_FAULTS_IN_A_ROW:
                raise error
            if self._engine.scheduler.holds(batch[0]):
                on_fault(batch[0], error)
            return
        suspects = [(seq, len(seq.token_ids)) for seq in batch if self._engine.scheduler.holds(seq)]
        middle = len(suspects) // 2
        self._halves[:0] = [half for half in (suspects[:middle], suspects[middle:]) if half]


class FaultIsolation(Generic[SessionT]):
    """Groups of sessions that step together, in the order of their turns."""

    def __init__(self, position: Callable[[SessionT], int]) -> None:
        """`position` is the number of a session's committed tokens."""
        self._position = position
        self._num_turns = 0
        self._others_turn = 0

    def is_apart(self, session: SessionT) -> bool:
        """Whether a session steps alone."""
        return bool(session.apart_until) and self._position(session) < session.apart_until

    def groups(self, sessions: list[SessionT]) -> list[list[SessionT]]:
        """The sessions in groups, the one that has waited longest first; where none is apart, all are one group."""
        apart = [session for session in sessions if session.apart_until and self.is_apart(session)]
        if not apart:
            return [sessions]
        turns = [(session.apart_turn, [session]) for session in apart]
        if len(apart) < len(sessions):
            turns.append((self._others_turn, [session for session in sessions if not self.is_apart(session)]))
        return [group for _, group in sorted(turns, key=lambda turn: turn[0])]

    def take(self, group: list[SessionT]) -> None:
        """It is this group's turn: all others come before it is again."""
        self._num_turns += 1
        if len(group) == 1 and self.is_apart(group[0]):
            group[0].apart_turn = self._num_turns
        else:
            self._others_turn = self._num_turns
