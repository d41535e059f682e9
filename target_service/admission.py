"""Makes a session and its sequence in the engine from an OpenSession, and ends both."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from specdec.config import TargetSettings
from specdec.config.drafter_options import DRAFT_MODEL
from specdec.constraints.grammar.awaited import AwaitedGrammars
from specdec.constraints.grammar.compiler import GrammarCompiler
from specdec.engine.engine import Engine
from specdec.engine.errors import EngineError
from specdec.engine.sampling.token_history import TokenHistory
from specdec.engine.sequence import Sequence
from specdec.replica.worker.errors import invalid
from specdec.replica.worker.opening import check_open, check_prediction, rejection_method, sampling_params, verify_mode
from specdec.replica.worker.sessions import EngineSessionTable, Owner
from specdec.target_service.constraint_costs import ConstraintCosts
from specdec.target_service.logprobs import PromptLogprobs
from specdec.target_service.session import SessionState, SessionTimes, TargetSession
from specdec.target_service.tree.speculation_tree import SpeculationTree
from specdec.target_service.tree.walk import EndOfChoice
from specdec.v1 import common_pb2 as pb
from specdec.wire.sampling_params import VerifyMode


def new_session(
    owner: Owner,
    session_id: str,
    epoch: int,
    body: pb.OpenSession,
    *,
    identity: pb.ModelIdentity,
    settings: TargetSettings,
    drafters: Iterable[str],
    now_s: float,
    piece_bytes: int,
) -> TargetSession:
    """Check an OpenSession and make its session, which has no sequence yet.

    Args:
        owner: connection that opened the session.
        session_id: id of the session, unique at the target.
        epoch: number of the session's opening.
        body: the message.
        identity: identity of the target's model.
        settings: limits and defaults.
        drafters: names of the target's drafters.
        now_s: time of time.monotonic, in seconds.
        piece_bytes: most bytes of one part of the prompt's log-probabilities.

    Raises:
        SessionFailure: a field is out of range; the error names it.
    """
    check_open(
        body,
        vocab_size=identity.vocab_size,
        max_model_len=identity.max_model_len,
        eos_token_ids=identity.eos_token_ids,
    )
    check_prediction(body, vocab_size=identity.vocab_size, max_model_len=identity.max_model_len)
    params = sampling_params(body, tuple(identity.eos_token_ids))
    history = TokenHistory(body.token_ids[: body.num_prompt_tokens])
    history.append(body.token_ids[body.num_prompt_tokens :])
    mode = verify_mode(body, params, VerifyMode(settings.verify_mode))
    wanted = body.max_draft_tokens if body.HasField("max_draft_tokens") else settings.max_draft_tokens
    limit = min(wanted, settings.max_draft_tokens, settings.max_proposal_nodes)
    wants_prompt = body.HasField("num_prompt_logprobs") and body.prompt_logprobs_start < body.num_prompt_tokens
    wanted_drafters = frozenset(body.drafters) if body.drafters else None
    return TargetSession(
        session_id=session_id,
        epoch=epoch,
        owner=owner,
        body=body,
        params=params,
        mode=mode,
        rejection_method=rejection_method(body),
        end=EndOfChoice(params, body.num_prompt_tokens, identity.max_model_len),
        history=history,
        tree=SpeculationTree(identity.vocab_size, is_chain=mode is VerifyMode.REJECTION),
        max_nodes=limit if body.speculate else 0,
        has_draft=not body.has_no_draft,
        wanted_drafters=wanted_drafters,
        sources=sources_of(body, wanted_drafters, drafters),
        prediction=list(body.prediction_token_ids),
        wanted_token_s=body.time_per_token_us * 1e-6,
        credit_position=body.credit_position,
        times=SessionTimes(now_s),
        prompt_logprobs=PromptLogprobs(body, identity.vocab_size, piece_bytes) if wants_prompt else None,
    )


def sources_of(body: pb.OpenSession, wanted: frozenset[str] | None, drafters: Iterable[str]) -> str:
    """Names of a session's sources, separated by blanks: the draft and `drafters`, as far as its client wants them.

    `wanted`: names that the client allows; None: all.
    """
    names = [DRAFT_MODEL, *drafters]
    if not body.prediction_token_ids:
        names = [name for name in names if name != "prediction"]
    return " ".join(name for name in names if wanted is None or name in wanted)


class Forks:
    """Sessions in state FORKING, by the id of the session whose prompt they wait for."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[TargetSession]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def wait(self, session: TargetSession) -> None:
        """Add a session that waits."""
        self._waiting.setdefault(session.body.fork_from, []).append(session)

    def take(self, parent_id: str) -> list[TargetSession]:
        """Remove and return the sessions that wait for a prompt: it is computed, or never will be."""
        return self._waiting.pop(parent_id, [])

    def drop(self, session: TargetSession) -> None:
        """Remove a session that has ended, if it waits."""
        if session in (waiting := self._waiting.get(session.body.fork_from, [])):
            waiting.remove(session)


def may_fork(session: TargetSession, parent: TargetSession | None) -> bool:
    """Whether `parent` is about to compute the same prompt, so that `session` may wait and share its KV."""
    return (
        parent is not None
        and parent.owner is session.owner
        and parent.state is SessionState.PREFILL
        and len(parent.body.token_ids) == parent.body.num_prompt_tokens
        and session.body.token_ids == parent.body.token_ids
        and session.body.cache_salt == parent.body.cache_salt
        and not session.body.HasField("num_prompt_logprobs")
        and not (session.body.apart_until or parent.body.apart_until)  # a fork shares its parent's step
    )


class Admission:
    """Gives sessions their sequences when their constraint is compiled and a shared prompt is computed.

    Invariant: a session waits for its constraint, waits for a prompt, has a sequence, or has ended.
    """

    def __init__(
        self,
        sessions: EngineSessionTable[TargetSession],
        engine: Engine,
        compiler: GrammarCompiler | None,
        on_fault: Callable[[TargetSession, Exception], None],
    ) -> None:
        """`sessions`: all open sessions. `on_fault` ends a session whose constraint cannot be compiled."""
        self.costs = ConstraintCosts(compiler)
        self.forks = Forks()
        self.by_seq: dict[int, TargetSession] = {}
        """Sessions by the id of their sequence."""
        self._sessions = sessions
        self._engine = engine
        self._grammars = AwaitedGrammars[TargetSession](
            compiler,
            _output_of,
            self._admit,
            on_fault,
            None if compiler is None else compiler.figures,
            self.costs.move,
        )

    @property
    def num_waiting(self) -> int:
        """Number of sessions that wait for a constraint or a prompt."""
        return len(self.forks) + len(self._grammars)

    @property
    def is_compiling(self) -> bool:
        """Whether a session waits for its constraint or a mask of it, so that `poll` must be called."""
        return len(self._grammars) > 0 or len(self.costs) > 0

    def poll(self) -> None:
        """Admit sessions whose constraints are compiled, and let sessions step whose masks have come."""
        self._grammars.poll()
        self.costs.poll()

    def open(self, session: TargetSession, body: pb.OpenSession) -> None:
        """Begin a session. Raises SessionFailure: its constraint is invalid, or the engine cannot hold its tokens."""
        self._grammars.open(session, body)

    def register(self, session: TargetSession, seq: Sequence) -> None:
        """Give a session its sequence."""
        session.begin(seq)
        self.by_seq[seq.seq_id] = session
        session.update_pause()

    def ready(self) -> list[TargetSession]:
        """Sessions that may step."""
        return [session for session in self.by_seq.values() if session.seq.is_ready]

    def of(self, sequences: Iterable[Sequence]) -> list[TargetSession]:
        """The sessions of these sequences."""
        return [self.by_seq[seq.seq_id] for seq in sequences]

    def end(self, session: TargetSession) -> None:
        """Free the sequence; its full blocks stay in the prefix cache. Forks that wait for its prompt compute it."""
        self._grammars.drop(session)
        self.costs.closed(session)
        self.forks.drop(session)
        if (seq := session.finish()) is not None:
            del self.by_seq[seq.seq_id]
            self._engine.free(seq)
        for orphan in self.forks.take(session.session_id):
            self._start(orphan)

    def _admit(self, session: TargetSession) -> None:
        if may_fork(session, self._sessions.get(session.body.fork_from)):
            self.forks.wait(session)
        else:
            self._start(session)

    def _start(self, session: TargetSession) -> None:
        body, prompt = session.body, session.prompt_logprobs
        try:
            seq = self._engine.add(
                body.token_ids,
                num_prompt_tokens=body.num_prompt_tokens,
                priority=body.priority,
                cache_salt=body.cache_salt,
                prompt_logits=prompt is not None,
                prompt_logits_from=0 if prompt is None else prompt.next_position - 1,
            )
        except EngineError as error:
            raise invalid("open.token_ids", str(error)) from error
        self.register(session, seq)


def _output_of(session: TargetSession) -> list[int]:
    return session.token_ids[session.body.num_prompt_tokens :]
