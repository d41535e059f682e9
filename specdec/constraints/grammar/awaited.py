"""Sessions that wait for the compilation of their constraint. A failed compilation ends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from specdec.constraints.grammar.compiler import Compilation, GrammarCompiler
from specdec.constraints.grammar.failure import GrammarError
from specdec.constraints.grammar.figures import GrammarFigures
from specdec.constraints.grammar.follower import GrammarFollower
from specdec.v1 import common_pb2 as pb

_SALT_MARK = b"\0"
POLL_S = 0.002
"""Seconds between two looks at a compilation."""


class Constrained(Protocol):
    """A session that may have a grammar."""

    session_id: str
    grammar: GrammarFollower | None


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
    ) -> None:
        """Start without waiting sessions.

        Args:
            compiler: None: sessions with constraints are refused.
            output_of: returns a session's committed output tokens.
            begin: called once for each session, when its `grammar` is set; may raise.
            on_fault: called with a waiting session that must end.
            figures: counts queries and refusals; None: they are not counted.
        """
        self._figures = figures or GrammarFigures()
        self._compiler = compiler
        self._output_of = output_of
        self._begin = begin
        self._on_fault = on_fault
        self._waiting: dict[str, tuple[ConstrainedT, pb.OpenSession, Compilation]] = {}

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
            self._waiting[session.session_id] = (session, body, compilation)

    def poll(self) -> None:
        """Begin sessions whose constraints are compiled."""
        for session, body, compilation in list(self._waiting.values()):
            if compilation.is_done:
                del self._waiting[session.session_id]
                try:
                    self._give(session, body, compilation)
                except Exception as error:
                    self._on_fault(session, error)

    def drop(self, session: ConstrainedT) -> None:
        """Forget a session that has ended, if it was waiting."""
        if self._waiting.get(session.session_id, (None,))[0] is session:
            del self._waiting[session.session_id]

    def _give(self, session: ConstrainedT, body: pb.OpenSession, compilation: Compilation) -> None:
        assert self._compiler is not None
        try:
            session.grammar = self._follower(self._compiler, body, compilation, self._output_of(session))
        except GrammarError as error:
            self._figures.refused(error)
            raise
        self._begin(session)

    @staticmethod
    def _follower(
        compiler: GrammarCompiler, body: pb.OpenSession, compilation: Compilation, output: Sequence[int]
    ) -> GrammarFollower:
        constraint = body.sampling.constraint
        follower = GrammarFollower(
            compilation.result(),
            compilation.source.field,
            vocab_size=compiler.vocab_size,
            eos_token_ids=compiler.eos_token_ids,
            after_token_id=constraint.after_token_id if constraint.HasField("after_token_id") else None,
            holds_back_eos=body.sampling.ignore_eos,
        )
        try:
            follower.commit(output)
        except GrammarError as error:
            raise GrammarError("open.token_ids", str(error)) from error
        return follower
