"""Common to all model drafters: steps by turns, isolation of faulty sessions, metrics and traces."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol

from google.rpc import code_pb2

from specdec.config import DraftSettings
from specdec.drafting.role.commits import CommitConflict, num_known
from specdec.drafting.role.metrics import DraftRecorder, load_report
from specdec.drafting.role.opening import Beginnings
from specdec.drafting.role.session import FollowingT
from specdec.engine.errors import EngineError, NonFiniteLogits
from specdec.engine.outputs import StepOutput
from specdec.engine.runner import PassObserver
from specdec.engine.sequence import Sequence
from specdec.replica.bridge.step_memory import StepMemory
from specdec.replica.worker.build import BuiltEngine
from specdec.replica.worker.errors import FaultLog, SessionFailure, non_finite_logits
from specdec.replica.worker.isolation import FaultIsolation, IsolatedSteps
from specdec.replica.worker.sessions import EngineSessionTable
from specdec.v1 import common_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings(Generic[FollowingT]):
    """Access to a drafter's sessions."""

    position: Callable[[FollowingT], int]
    """Number of committed tokens."""
    sequences: Callable[[FollowingT], list[Sequence]]
    """Sequences of a session, the main one first; empty once it is closed."""
    owner: Callable[[Sequence], FollowingT]
    ready: Callable[[], list[FollowingT]]
    """Sessions for which a step has something to compute."""
    close: Callable[[FollowingT], None]
    """Frees a session's sequences."""


class DraftWork(PassObserver, Generic[FollowingT]):
    """Runs a drafter's engine. An error in one session's work ends only that session."""

    def __init__(
        self,
        host: DraftingHost[FollowingT],
        built: BuiltEngine,
        settings: DraftSettings,
        recorder: DraftRecorder,
        holdings: Holdings[FollowingT],
    ) -> None:
        self._host = host
        self._engine = built.engine
        self._settings = settings
        self._recorder = recorder
        self._vocab_size = built.info.identity.vocab_size
        self._held = holdings
        self.beginnings = Beginnings()
        self._apart = FaultIsolation[FollowingT](holdings.position)
        self._steps = IsolatedSteps(built.engine, self, is_alone=settings.tensor_parallel_size == 1)
        self.started_s = 0.0
        """Monotonic time at which the last step began."""
        self._step_s = 0.0
        recorder.serves(built.info.identity)

    # --- commits

    def entry(
        self, session: FollowingT, kind: str, body: Any, commit: Callable[[FollowingT, int, list[int]], None]
    ) -> None:
        """Pass a commit to `commit` and measure its time. One that was overtaken on another way suspends nothing."""
        if kind == "commit":
            started_s = time.monotonic()
            if body.start_position + len(body.token_ids) >= self._held.position(session):
                session.is_suspended = body.suspend
                self.beginnings.heard(session, body.suspend)
            commit(session, body.start_position, list(body.token_ids))
            self._recorder.commit_handled(time.monotonic() - started_s)

    def new_tokens(self, session: FollowingT, held: list[int], start: int, token_ids: list[int]) -> list[int]:
        """The tokens of a commit that were not committed before; `held` begins with the committed ones.

        Raises SessionFailure: see `num_known`.
        """
        try:
            new = token_ids[num_known(held, self._held.position(session), start, token_ids, self._vocab_size) :]
        except CommitConflict:
            self._recorder.mismatch()
            raise
        if not new:
            self._recorder.stale_commit()
        return new

    def committed(self, session: FollowingT, num_new: int, num_found: int, num_dropped: int) -> None:
        """A commit added `num_new` tokens. The drafted tokens held `num_found` of them and lost `num_dropped`."""
        self._recorder.commit(num_found, num_new, num_dropped)
        if session.trace is not None:
            session.trace.add(num_commits=1, num_tokens=num_new, num_accepted=num_found)
        session.committed_at_s = time.monotonic()

    def send(self, session: FollowingT, proposal: pb.Proposal, num_tokens: int, num_new: int) -> None:
        """Emit a proposal of `num_tokens`, of which `num_new` were not sent before."""
        waited_s = None if session.committed_at_s is None else time.monotonic() - session.committed_at_s
        session.committed_at_s = None
        self._recorder.proposal(num_tokens, num_new, waited_s)
        if session.trace is not None:
            session.trace.add(num_proposals=1)
        self._host.emit(session, proposal=proposal.SerializeToString())

    # --- steps

    def step(self) -> StepOutput | None:
        """Compute one batch of the sessions whose turn it is; None if there was no output."""
        self.started_s = time.monotonic()
        output = self._steps.step(lambda seq, error: self.fault(self._held.owner(seq), error), self._turn())
        if output is None:
            return None
        for seq in output.preempted:
            if (trace := self._held.owner(seq).trace) is not None:
                trace.add(num_preemptions=1)
        for item in output.items:
            if (trace := self._held.owner(item.seq).trace) is not None:
                trace.stepped(self.started_s)
                trace.add(num_steps=1)
                if item.completes:
                    trace.prefilled()
        return output

    def stepped(self, output: StepOutput, num_drafted: int, num_rounds: int = 1) -> None:
        """A step's guesses are done: `num_drafted` tokens in `num_rounds` rounds."""
        self._step_s = time.monotonic() - self.started_s
        self._recorder.step(output, num_drafted, self._step_s / num_rounds)

    def load(self) -> pb.LoadReport:
        """The engine's load. Also exports the gauges."""
        num_sessions = len(self._host.sessions)
        self._recorder.load(self._engine.stats(), num_sessions)
        return load_report(self._engine, num_sessions, self._settings.max_sessions, self._step_s)

    def _turn(self) -> set[int] | None:
        """Ids of the sequences whose turn it is; None: all of them."""
        if not any(session.apart_until for session in self._host.sessions):
            return None
        groups = self._apart.groups(self._held.ready())
        self._apart.take(groups[0])
        return None if len(groups) == 1 else {seq.seq_id for each in groups[0] for seq in self._held.sequences(each)}

    def pass_chosen(self, sequences: list[Sequence]) -> None:
        """Note whose sessions the pass is for."""
        keys = (self._held.owner(seq).key for seq in sequences)
        self._host.steps.work_on(list(dict.fromkeys(keys)))

    # --- ends

    def isolated(self, session: FollowingT, work: Callable[[FollowingT], None]) -> None:
        """Call `work` with a session unless it is closed; an error ends the session."""
        try:
            if self._held.sequences(session):
                work(session)
        except Exception as error:
            self.fault(session, error)

    def fault(self, session: FollowingT, error: Exception) -> None:
        """End a session for an error in its work."""
        self._fail(session, self._host.faults.failure(error))

    def spoiled(self, session: FollowingT) -> None:
        """End a session whose logits are unusable; its blocks are not reused from the prefix cache."""
        for seq in self._held.sequences(session):
            self._engine.distrust(seq)
        failure = non_finite_logits(NonFiniteLogits(), expected_position=self._held.position(session))
        self._fail(session, failure)

    def ending(self, session: FollowingT) -> None:
        """Record a session's end; it must still hold its sequences."""
        sequences = self._held.sequences(session)
        if session.trace is not None:
            session.trace.add(
                num_prompt_tokens=session.body.num_prompt_tokens,
                num_cached_tokens=sequences[0].num_cached_tokens,
                num_kv_blocks=sum(len(seq.block_ids) for seq in sequences),
                num_preemptions=0,
            )
        self._recorder.closed()

    def _fail(self, session: FollowingT, failure: SessionFailure) -> None:
        if self._held.sequences(session):
            self._held.close(session)
            self._host.failed(session, failure)


def context_end(error: EngineError, committed: int) -> SessionFailure:
    """The error of a session whose commit exceeds the draft's context."""
    return SessionFailure(code_pb2.OUT_OF_RANGE, "DRAFT_CONTEXT_END", str(error), expected_position=committed)


class DraftingHost(Protocol[FollowingT]):
    """Owner of the sessions, which takes proposals and failures; see `specdec.replica.worker.host`."""

    sessions: EngineSessionTable[FollowingT]
    faults: FaultLog
    steps: StepMemory

    def emit(self, session: FollowingT, **body: Any) -> None:
        """Send a result, such as an encoded proposal, to the session's owner."""

    def failed(self, session: FollowingT, failure: SessionFailure) -> None:
        """The drafter has closed a session because of an error."""
