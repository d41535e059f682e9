"""Commits a step's decisions: to the pacing, the owner, the engine and the session."""

from __future__ import annotations

import time
from collections.abc import Callable

from specdec.config.drafter_options import DRAFT_MODEL
from specdec.engine.engine import Engine
from specdec.replica.worker.host import SessionHost
from specdec.target_service.constraint_costs import ConstraintCosts
from specdec.target_service.pacing.pacing import Pacing
from specdec.target_service.proposals.local_drafters import LocalDrafters
from specdec.target_service.proposals.own_draft import OwnDraft
from specdec.target_service.records.metrics import TargetRecorder
from specdec.target_service.records.trace import trace_verdict
from specdec.target_service.sample_and_walk import Decision
from specdec.target_service.session import TargetSession
from specdec.target_service.verdicts import describe_drafters, make_verdict, pieces_of, tree_of
from specdec.v1 import common_pb2 as pb


class Commits:
    """Commits decisions, one by one."""

    def __init__(
        self,
        host: SessionHost[TargetSession],
        engine: Engine,
        recorder: TargetRecorder,
        close: Callable[[TargetSession], None],
        own_draft: OwnDraft,
        local_drafters: LocalDrafters,
        costs: ConstraintCosts,
    ) -> None:
        """`close` frees a session that has ended; `own_draft` gets all tokens, `local_drafters` the outcomes,
        `costs` the tokens of constraints."""
        self._costs = costs
        self._local_drafters = local_drafters
        self._own_draft = own_draft
        self._host = host
        self._engine = engine
        self._recorder = recorder
        self._close = close

    def commit(self, decision: Decision, pacing: Pacing, started_s: float, elapsed_s: float, due_at_s: float) -> None:
        """Commit a decision. The order matters, as each part reads the session's state:

        1. `_prune` learns from the verified tree, then cuts it to the nodes below the new last token; a suspended
           session's tree is cleared.
        2. `make_verdict` and `_tell` describe the decision by the session's state, times and length before it.
        3. `_take` gives the tokens to the engine's sequence and to the history.
        4. `_go_on` ends the session, or lets it run as far as its credit allows.

        Args:
            decision: the decision to commit.
            pacing: learns from the decision.
            started_s: start of the step, of time.monotonic.
            elapsed_s: seconds of the step.
            due_at_s: time at which the step could have begun, on the clock of hold-offs.
        """
        session = decision.candidate.session
        num_stale, told_tree = session.tree.num_stale, tree_of(decision)
        walk, now_s = decision.walk, started_s + elapsed_s
        is_suspended = pacing.observe_gain(session, walk, decision.candidate.num_nodes, now_s)
        is_suspended = is_suspended or session.apart is not None
        self._record_drafts(decision)
        accepted_by = _sources(decision)
        names_drafters = self._local_drafters.has_drafters or any(name != DRAFT_MODEL for name in accepted_by)
        drafters = self._local_drafters.learn(decision, pacing)
        num_wasted = _prune(decision, pacing) + num_stale
        if is_suspended:
            num_wasted += session.tree.clear()
        held_s = session.held_s(due_at_s)
        verdict = make_verdict(decision, started_s, elapsed_s, held_s, num_wasted, is_suspended, told_tree)
        if names_drafters:
            describe_drafters(verdict, accepted_by, drafters)
        self._tell(session, verdict, num_stale)
        start = session.num_tokens
        self._take(decision)
        if not walk.finish_reason:
            self._own_draft.decided(session, start, walk.token_ids, is_suspended=is_suspended)
        self._go_on(session, walk.finish_reason)

    def _record_drafts(self, decision: Decision) -> None:
        candidate = decision.candidate
        tree = candidate.session.tree
        verified = candidate.chosen[: candidate.num_nodes]
        accepted = [candidate.chosen[node] for node in decision.walk.path]
        # The time of the target's own draft is measured per call, for all sessions together.
        draft_s = 0.0 if self._own_draft.is_there else tree.draft_us * 1e-6
        self._recorder.drafts(tree, verified, accepted, draft_s)

    def _tell(self, session: TargetSession, verdict: pb.Verdict, num_stale: int) -> None:
        session.tree.num_stale = session.tree.draft_us = 0
        session.tree.num_hung.clear()
        decided_at_s = time.monotonic()
        self._recorder.verdict(session, verdict, num_stale, decided_at_s)
        if session.trace is not None:
            trace_verdict(session.trace, verdict)
        session.decided(decided_at_s)
        for piece in pieces_of(verdict, self._host.piece_bytes(session.owner)):
            session.sent.append(piece)
            self._host.emit(session, verdict=piece)

    def _take(self, decision: Decision) -> None:
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

    def _go_on(self, session: TargetSession, reason: pb.FinishReason.ValueType) -> None:
        if reason:
            self._close(session)
            self._host.ended(session, pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower())
            return
        session.seq.prompt_logits = False
        session.update_pause()


def _prune(decision: Decision, pacing: Pacing) -> int:
    """Cut the tree to the nodes that stay; returns the number of nodes dropped unaccepted."""
    candidate, tree = decision.candidate, decision.candidate.session.tree
    pacing.expectations.observe_walk(candidate.session, candidate.chosen[: candidate.num_nodes], decision.walk)
    if not tree.nodes:
        return 0
    return tree.advance(decision.walk.token_ids) + tree.drop_local()


def _sources(decision: Decision) -> list[str]:
    """Names of the sources of accepted nodes, forced nodes left out."""
    candidate = decision.candidate
    nodes = candidate.session.tree.nodes
    accepted = (nodes[candidate.chosen[node]] for node in decision.walk.path)
    return [node.origin for node in accepted if not node.is_forced]
