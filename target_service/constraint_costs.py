"""The budget of constraints: a step's masks and commits take little of it, and costly constraints are followed apart.

A step's budget is a share of its time. What exceeds it is a debt of the constraints that cost most. The sessions of a
constraint with too much debt leave the step's thread, for good: they step without proposals when their next mask is
there (`specdec/constraints/grammar/apart.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from specdec.constraints.grammar.apart import ApartFollower, ApartFollowers
from specdec.constraints.grammar.compiler import GrammarCompiler
from specdec.constraints.limits.faults import MOST_WAIT_S
from specdec.target_service.session import SessionState, TargetSession

_SHARE = 1 / 20
"""Fraction of a step's time that constraints may add to it."""
_LEAST_BUDGET_S = 0.001
_LEAST_COSTLY_S = 0.0003
"""Processor seconds in one step below which a session never leaves the step's thread."""


class ConstraintCosts:
    """Moves sessions between the two ways of following a constraint. For the engine's thread."""

    def __init__(self, compiler: GrammarCompiler | None) -> None:
        self._apart = None if compiler is None else ApartFollowers(compiler.arguments)
        self._num_cores = len(os.sched_getaffinity(0))
        self._waiting: dict[str, TargetSession] = {}

    def __len__(self) -> int:
        """Number of sessions that wait for their mask, so that `poll` must be called."""
        return len(self._waiting)

    def settle(self, sessions: Iterable[TargetSession], step_s: float, hidden_s: float) -> None:
        """Charge a step's sessions after their commits.

        Args:
            sessions: sessions of the step, with and without constraints.
            step_s: seconds of the step.
            hidden_s: seconds of filling masks for which the step did not wait.
        """
        costs = [
            (session.grammar.take_spent_s(), session)
            for session in sessions
            if session.grammar is not None and session.state is not SessionState.ENDED
        ]
        if not costs:
            return
        total_s = sum(spent_s for spent_s, _ in costs) - hidden_s * (1 - 1 / self._num_cores)
        over = total_s / max(_LEAST_BUDGET_S, step_s * _SHARE)
        for spent_s, session in costs:
            assert session.constraint is not None
            # A session's budget is its share of the step's, in proportion to what it spent.
            is_costly = over > 1 and spent_s >= _LEAST_COSTLY_S
            if session.constraint.owes(spent_s if is_costly else 0.0, spent_s / max(over, 1.0)) and is_costly:
                self.move(session)

    def move(self, session: TargetSession) -> None:
        """Follow a session's constraint apart from now on."""
        assert self._apart is not None and session.constraint is not None
        constraint = session.constraint
        session.apart = self._apart.follow(constraint.compilation.source, constraint.following)
        session.grammar, session.max_nodes = None, 0
        session.tree.clear()
        self._ask(session, session.apart, session.token_ids[session.body.num_prompt_tokens :])

    def committed(self, session: TargetSession, token_ids: list[int]) -> None:
        """Move a session's constraint past tokens."""
        if session.grammar is not None:
            session.grammar.commit(token_ids)
        elif session.apart is not None:
            self._ask(session, session.apart, token_ids)

    def poll(self) -> None:
        """Let sessions step whose masks have come, or have not come for too long, which ends them."""
        overdue_s = time.monotonic() - MOST_WAIT_S
        for session_id, session in list(self._waiting.items()):
            if session.apart is not None and session.apart.mask is None and session.apart.asked_s < overdue_s:
                session.apart.give_up()
            if session.apart is None or session.apart.mask is not None:
                del self._waiting[session_id]
                session.update_pause()

    def closed(self, session: TargetSession) -> None:
        """Forget a session that has ended."""
        if self._waiting.get(session.session_id) is session:
            del self._waiting[session.session_id]
        if self._apart is not None and session.apart is not None:
            self._apart.close(session.apart)

    def _ask(self, session: TargetSession, apart: ApartFollower, token_ids: list[int]) -> None:
        params = session.params
        num_output = len(apart.tokens) + len(token_ids)
        apart.commit(token_ids, params.min_tokens_ids if params.holds_back(num_output) else ())
        self._waiting[session.session_id] = session
        session.update_pause()
