"""When the target runs its next step and what that step verifies: the policies, applied to live sessions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from specdec.engine.tree import ROOT
from specdec.sampling_params import VerifyMode
from specdec.v1 import common_pb2 as pb
from target_service.policy.hold_off import DraftLatency, HoldOffChoice, kind_of
from target_service.policy.step_time import StepTimeModel
from target_service.policy.verify_policy import AcceptanceCalibration, select_nodes
from target_service.session import TargetSession
from target_service.walk import Walk

_MAX_FITTED_ROWS = 128  # prefill chunks would bend the line that decodes and verifications lie on
_MAX_UNANSWERED = 2
_PATIENCE = 1.5
_CREDIT_WEIGHT = 0.05
_FIRST_MEAN_NODES = 4.0


class Pacing:
    """Chooses hold-offs and trees from what the target has measured: step times, draft latency, acceptance."""

    def __init__(self, hold_off_ms: float | None) -> None:
        self.step_time = StepTimeModel()
        self.acceptance = AcceptanceCalibration()
        self.draft_latency = DraftLatency()
        self._hold_off: defaultdict[str, HoldOffChoice] = defaultdict(HoldOffChoice)
        self._hold_off_ms = hold_off_ms
        self._mean_nodes = _FIRST_MEAN_NODES

    def wait_s(self, ready: Sequence[TargetSession], now_s: float) -> float | None:
        """Time until the next step is due; 0: now; None: nothing to step.

        A step holds off only while every session may gain from it: prefill, plain decoding and sessions whose draft is
        silent are never kept waiting for the drafts of others.
        """
        if not ready:
            return None
        until_s = 0.0
        for session in ready:
            if session.is_undecided:
                self._plan_hold_off(session, now_s)
            if not session.has_decided or (session.wanted_depth == 0 and len(session.tree) == 0):
                return 0.0
            if session.tree.max_depth < session.wanted_depth:
                until_s = max(until_s, session.hold_until_s - now_s)
        return until_s

    def choose_trees(self, ready: Sequence[TargetSession]) -> dict[str, list[int]]:
        """Set the tree that the next step verifies for each session; returns the chosen nodes by session id."""
        for session in ready:
            if session.seq is not None:
                session.seq.tree = None  # chosen for a step that had no room for the session
        candidates = [s for s in ready if s.seq is not None and len(s.tree) and s.seq.num_pending_tokens <= 1]
        limits = [s.max_nodes for s in candidates]
        scores = [self._path_scores(s, min(s.end.max_depth(s.num_tokens), self._credit(s))) for s in candidates]
        selected = select_nodes(scores, limits, len(ready) - len(candidates), self.step_time)
        for nodes in selected:
            self._mean_nodes += _CREDIT_WEIGHT * (len(nodes) - self._mean_nodes)
        chosen: dict[str, list[int]] = {}
        for session, nodes in zip(candidates, selected, strict=True):
            if nodes and session.seq is not None:
                session.seq.tree, chosen[session.session_id] = session.tree.select(nodes)
        return chosen

    def draft_credit(self, limit: int) -> int:
        """Draft tokens per session that are worth proposing: some more than steps have verified of late."""
        return max(1, min(limit, math.ceil(1.5 * self._mean_nodes) + 1))

    def observe_step(self, num_rows: int, elapsed_s: float) -> None:
        """A step took this long."""
        if num_rows <= _MAX_FITTED_ROWS:
            self.step_time.observe(num_rows, elapsed_s)

    def observe_walk(self, session: TargetSession, chosen: Sequence[int], walk: Walk) -> None:
        """Learn from the nodes whose parents were accepted."""
        accepted = {chosen[index] for index in walk.path}
        reached = {ROOT, *accepted}
        if walk.finish_reason and len(walk.path) == len(walk.token_ids):
            reached.discard(chosen[walk.path[-1]])  # the choice ends there: nothing below was asked for
        branched = set()
        for node in chosen:
            parent = session.tree.tokens.parents[node]
            if parent in reached:
                branched.add(parent)
                self.acceptance.observe(session.tree.nodes[node].score, node in accepted)
        for depth in range(len(branched)):
            self.acceptance.observe_depth(depth < len(accepted))

    def observe_proposal(self, session: TargetSession, depth_before: int, proposal: pb.Proposal, now_s: float) -> None:
        """A proposal was merged; the tree was `depth_before` deep."""
        num_new = session.tree.max_depth - depth_before
        if num_new <= 0:
            return
        session.num_unanswered = 0
        latency = self.draft_latency
        if proposal.path_length:
            node_us = proposal.draft_us / proposal.path_length
            session.tree.draft_us += round(node_us * num_new)
            latency.observe_node(node_us * 1e-6)
        if session.held_since_s is not None and depth_before == 0:
            latency.observe_first(max(0.0, now_s - session.held_since_s - (num_new - 1) * latency.node_s))

    def after_verdict(self, session: TargetSession) -> None:
        """A verdict was sent: the next step's hold-off is planned once all that arrived meanwhile is in the tree."""
        session.is_undecided = True
        session.had_proposal = False
        session.held_since_s = None
        session.wanted_depth = 0

    def _plan_hold_off(self, session: TargetSession, now_s: float) -> None:
        session.is_undecided = False
        session.had_proposal = len(session.tree) > 0
        max_depth = min(session.max_nodes, session.end.max_depth(session.num_tokens))
        if session.had_proposal or max_depth == 0:
            return
        choice = self._hold_off[kind_of(session.params.temperature)]
        if session.episode is not None:
            depth, began_s, num_tokens = session.episode
            choice.observe(depth, session.num_tokens - num_tokens, now_s - began_s)
            session.episode = None
        session.num_unanswered += 1
        if session.num_unanswered > _MAX_UNANSWERED:
            return
        if self._hold_off_ms is not None:
            wanted, hold_s = max_depth, self._hold_off_ms / 1e3
        else:
            wanted = choice.choose(max_depth)
            hold_s = _PATIENCE * self.draft_latency.until_depth(wanted)
            session.episode = (wanted, now_s, session.num_tokens)
        if wanted and hold_s > 0:
            session.wanted_depth, session.held_since_s, session.hold_until_s = wanted, now_s, now_s + hold_s

    def _path_scores(self, session: TargetSession, max_depth: int) -> list[float]:
        """Estimated probability that each node is reached and accepted; 0 below `max_depth`."""
        tokens = session.tree.tokens
        if session.mode is VerifyMode.REJECTION:
            # What is verified must not depend on the tokens drawn, so not on their scores either.
            return [self.acceptance.depth_rate**depth if depth <= max_depth else 0.0 for depth in tokens.depths]
        scores: list[float] = []
        for node, parent, depth in zip(session.tree.nodes, tokens.parents, tokens.depths, strict=True):
            rate = self.acceptance.rate(node.score) if depth <= max_depth else 0.0
            scores.append(rate * (scores[parent] if parent >= 0 else 1.0))
        return scores

    @staticmethod
    def _credit(session: TargetSession) -> int:
        return max(0, session.credit_position - session.num_tokens - 1)
