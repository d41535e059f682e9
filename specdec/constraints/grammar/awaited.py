"""Sessions that wait for the compilation of their constraint. A failed compilation ends them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from specdec.constraints.grammar.compiler import Compilation, GrammarCompiler
from specdec.constraints.grammar.figures import GrammarFigures
from specdec.constraints.grammar.follower import Following, GrammarFollower, TooSlow
from specdec.constraints.limits.faults import MOST_WAIT_S, GrammarError, too_many
from specdec.v1 import common_pb2 as pb

_SALT_MARK = b"\0"
POLL_S = 0.002
"""Seconds between two looks at a compilation."""
MOST_DEBT_S = 0.02
"""Processor seconds beyond the budgets of steps after which a constraint's sessions are followed apart, or not at all.
As much may be spent at once on the committed tokens of a session that is opened again."""
_LEAST_REPLAY_S = 0.001
"""Processor seconds for those tokens if the constraint is known to be costly."""


@dataclass(frozen=True, slots=True)
class KnownConstraint:
    """A session's compiled constraint."""

    compilation: Compilation
    following: Following

    def owes(self, spent_s: float, budget_s: float) -> bool:
        """Whether its sessions have exceeded their budgets by too much, after one more step."""
        self.compilation.debt_s = max(0.0, self.compilation.debt_s + spent_s - budget_s)
        return self.compilation.debt_s > MOST_DEBT_S

    def follower(self) -> GrammarFollower:
        """A follower at the constraint's start. Raises GrammarError: the constraint does not compile."""
        compilation = self.compilation
        follower = GrammarFollower(compilation.result(), compilation.source.field, **self.following)
        follower.on_grown = compilation.on_grown
        return follower


class Constrained(Protocol):
    """A session that may have a grammar."""

    session_id: str
    grammar: GrammarFollower | None
    constraint: KnownConstraint | None


ConstrainedT = TypeVar("ConstrainedT", bound=Constrained)


def tenant_of(cache_salt: bytes) -> bytes:
    """The tenant in a cache salt. All salts of one tenant share its turn."""
    return cache_salt.partition(_SALT_MARK)[0]


class AwaitedGrammars(Generic[ConstrainedT]):
    """Gives sessions their grammars: at once if a grammar is cached."""

    def __init__(
        self,
        compiler: GrammarCompiler | None,
        output_of: Callable[[ConstrainedT], Sequence[int]],
        begin: Callable[[ConstrainedT], None],
        on_fault: Callable[[ConstrainedT, Exception], None],
        figures: GrammarFigures | None = None,
        on_slow: Callable[[ConstrainedT], None] = lambda session: None,
    ) -> None:
        """Start without waiting sessions.

        Args:
            compiler: None: sessions with constraints are refused.
            output_of: returns a session's committed output tokens.
            begin: called once for each session, when its `grammar` is set; may raise.
            on_fault: called with a waiting session that must end.
            on_slow: called before `begin` with a session whose output is too costly to follow: its `grammar` is None.
            figures: counts queries and refusals; None: they are not counted.
        """
        self._figures = figures or GrammarFigures()
        self._compiler = compiler
        self._output_of = output_of
        self._begin = begin
        self._on_fault = on_fault
        self._on_slow = on_slow
        self._waiting: dict[str, tuple[ConstrainedT, pb.OpenSession, Compilation, float]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def open(self, session: ConstrainedT, body: pb.OpenSession) -> None:
        """Begin a session, now or when its constraint is compiled.

        Raises:
            GrammarError: the constraint cannot be compiled, or does not allow the session's output.
        """
        if not body.sampling.HasField("constraint"):
            self._begin(session)
            return
        if self._compiler is None:
            raise GrammarError("constraint", "this model's tokenizer supports no constraints")
        try:
            compilation = self._compiler.compile(body.sampling.constraint, tenant_of(body.cache_salt))
        except GrammarError as error:
            self._figures.refused(error)
            raise
        self._figures.asked(is_known=compilation.num_asked > 1)
        if compilation.is_done:
            self._give(session, body, compilation)
        else:
            self._waiting[session.session_id] = (session, body, compilation, time.monotonic())

    def poll(self) -> None:
        """Begin sessions whose constraints are compiled; end those that have waited too long."""
        overdue_s = time.monotonic() - MOST_WAIT_S
        for session, body, compilation, asked_s in list(self._waiting.values()):
            if compilation.is_done or asked_s < overdue_s:
                del self._waiting[session.session_id]
                try:
                    if not compilation.is_done:
                        fault = too_many(compilation.source.field)
                        self._figures.refused(fault)
                        raise fault
                    self._give(session, body, compilation)
                except Exception as error:
                    self._on_fault(session, error)

    def drop(self, session: ConstrainedT) -> None:
        """Forget a session that has ended, if it was waiting."""
        if self._waiting.get(session.session_id, (None,))[0] is session:
            del self._waiting[session.session_id]

    def _give(self, session: ConstrainedT, body: pb.OpenSession, compilation: Compilation) -> None:
        assert self._compiler is not None
        constraint = body.sampling.constraint
        following = Following(
            vocab_size=self._compiler.vocab_size,
            eos_token_ids=sorted(self._compiler.eos_token_ids),
            after_token_id=constraint.after_token_id if constraint.HasField("after_token_id") else None,
            opening_token_id=constraint.opening_token_id if constraint.HasField("opening_token_id") else None,
            holds_back_eos=body.sampling.ignore_eos,
        )
        session.constraint = KnownConstraint(compilation, following)
        try:
            follower = session.constraint.follower()
            follower.commit(self._output_of(session), max(_LEAST_REPLAY_S, MOST_DEBT_S - compilation.debt_s))
            session.grammar = follower
        except TooSlow:
            self._on_slow(session)
        except GrammarError as error:
            fault = error if compilation.matcher is None else GrammarError("open.token_ids", str(error))
            self._figures.refused(fault)
            raise fault from error
        self._begin(session)
