"""Commits a step's decisions: to the engine, the session, its owner and the pacing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from specdec.config.drafter_options import DRAFT_MODEL
from specdec.engine.engine import Engine
from specdec.replica.worker.host import SessionHost
from specdec.target_service.constraint_costs import ConstraintCosts
from specdec.target_service.pacing.pacing import Pacing
from specdec.target_service.proposals.local_drafters import LocalDrafters
from specdec.target_service.proposals.own_draft import OwnDraft
from specdec.target_service.records.metrics import TargetRecorder
from specdec.target_service.records.step_record import Taken
from specdec.target_service.records.trace import trace_verdict
from specdec.target_service.sample_and_walk import Decision
from specdec.target_service.session import SessionState, TargetSession
from specdec.target_service.verdicts import describe_drafters, make_verdict, pieces_of
from specdec.v1 import common_pb2 as pb


class Commits:
    """Commits decisions in three parts: a session takes its tokens, so that the next step can be chosen; its owner is
    told; pacing and metrics learn, on a GPU while it computes that step."""

    def __init__(
        self,
        host: SessionHost[TargetSession],
        engine: Engine,
        recorder: TargetRecorder,
        close: Callable[[TargetSession], None],
        on_fault: Callable[[TargetSession, Exception], None],
        own_draft: OwnDraft,
        local_drafters: LocalDrafters,
        costs: ConstraintCosts,
    ) -> None:
        """`close` frees a session that has ended, `on_fault` one whose part raised; `own_draft` gets all tokens,
        `local_drafters` the outcomes, `costs` the tokens of constraints."""
        self._costs = costs
        self._local_drafters = local_drafters
        self._own_draft = own_draft
        self._host = host
        self._engine = engine
        self._recorder = recorder
        self._close = close
        self._on_fault = on_fault
        self._untold: dict[TargetSession, tuple[Decision, Taken, Pacing]] = {}
        self._unlearnt: deque[tuple[Decision, Taken, Pacing]] = deque()
        self.has_ended = False
        """Whether a choice has ended of which nobody has learnt."""

    def take(self, decision: Decision, pacing: Pacing, started_s: float, elapsed_s: float, due_at_s: float) -> None:
        """Give a session its tokens. The order matters, as each part reads the session's state:

        1. The gate and the drafters learn from the verified tree, which is cut to the nodes below the new last token;
           a suspended session's tree is cleared.
        2. The engine's sequence and the history get the tokens.
        3. The session ends, once its owner is told, or runs as far as its credit allows.

        Args:
            decision: the decision to commit.
            pacing: learns from the decision.
            started_s: start of the step, of time.monotonic.
            elapsed_s: seconds of the step.
            due_at_s: time at which the step could have begun, on the clock of hold-offs.
        """
        candidate, walk = decision.candidate, decision.walk
        session = candidate.session
        decided_at_s = started_s + elapsed_s
        suspends = pacing.observe_gain(session, walk, candidate.num_nodes, decided_at_s) or session.apart is not None
        drafters = self._local_drafters.learn(decision, pacing)
        before, num_wasted = session.tree.hung(), 0
        if before.nodes:
            num_wasted = session.tree.advance(walk.token_ids, decision.accepted) + session.tree.drop_local()
        if suspends:
            num_wasted += session.tree.clear()
        taken = Taken(
            tree=before,
            start=session.num_tokens,
            state=session.state,
            last_at_s=session.times.last_verdict_at_s,
            began_at_s=started_s,
            elapsed_s=elapsed_s,
            held_s=session.held_s(due_at_s),
            decided_at_s=decided_at_s,
            num_wasted=num_wasted + before.num_stale,
            suspends_draft=suspends,
            drafters=drafters,
        )
        session.decided(decided_at_s)
        self._append(decision)
        self._untold[session] = decision, taken, pacing
        if walk.finish_reason:
            self.has_ended = True
            self.tell_all()
            if session.state is not SessionState.ENDED:
                reason = pb.FinishReason.Name(walk.finish_reason).removeprefix("FINISH_REASON_").lower()
                self._close(session)
                self._host.ended(session, reason)
            return
        self._own_draft.decided(session, taken.start, walk.token_ids, is_suspended=suspends)
        session.seq.prompt_logits = False
        session.update_pause()

    def tell_all(self) -> None:
        """Tell owners of what their sessions have taken, before they are told anything else."""
        while self._untold:
            session = next(iter(self._untold))
            try:
                self._tell(*self._untold.pop(session))
            except Exception as error:
                self._on_fault(session, error)

    def _tell(self, decision: Decision, taken: Taken, pacing: Pacing) -> None:
        session, nodes = decision.candidate.session, taken.tree.nodes
        verdict = make_verdict(decision, taken)
        accepted_by = [nodes[index].origin for index in decision.accepted if not nodes[index].is_forced]
        if self._local_drafters.has_drafters or not {DRAFT_MODEL}.issuperset(accepted_by):
            describe_drafters(verdict, accepted_by, taken.drafters)
        self._unlearnt.append((decision, taken, pacing))
        if session.trace is not None:
            trace_verdict(session.trace, verdict)
        for piece in pieces_of(verdict, self._host.piece_bytes(session.owner)) if decision.logprobs else [verdict]:
            session.sent.append(piece)
            self._host.emit(session, verdict=piece)

    def learn_all(self) -> None:
        """Let pacing and metrics learn of what owners have been told."""
        self.has_ended = False
        while self._unlearnt:
            decision, taken, pacing = self._unlearnt.popleft()
            try:
                self._learn(decision, taken, pacing)
            except Exception as error:
                self._on_fault(decision.candidate.session, error)

    def _learn(self, decision: Decision, taken: Taken, pacing: Pacing) -> None:
        candidate = decision.candidate
        verified = candidate.chosen[: candidate.num_nodes]
        # The time of the target's own draft is measured per call, for all sessions together.
        draft_s = 0.0 if self._own_draft.is_there else taken.tree.draft_us * 1e-6
        self._recorder.drafts(taken.tree, verified, decision.accepted, draft_s)
        pacing.expectations.observe_walk(candidate.session, taken.tree, verified, decision.walk)
        self._recorder.verdict(decision, taken)

    def _append(self, decision: Decision) -> None:
        candidate, walk = decision.candidate, decision.walk
        seq = candidate.session.seq
        if candidate.num_nodes:
            self._engine.accept(seq, walk.path)
        self._engine.append(seq, walk.token_ids[len(walk.path) :])
        self._engine.finalize(seq, len(seq.token_ids))
        if candidate.session.params.needs_history:
            candidate.session.history.append(walk.token_ids)
        if not walk.finish_reason:
            self._costs.committed(candidate.session, walk.token_ids)
