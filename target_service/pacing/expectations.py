"""Expected acceptance of the nodes of a session's tree, and expected gain of asking one more source for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set

from specdec.config.drafter_options import DRAFT_MODEL
from specdec.engine.tree import ROOT
from specdec.target_service.policy.acceptance import Acceptance, OwnRecord
from specdec.target_service.policy.budget import TRY_EVERY
from specdec.target_service.policy.marginal_gains import DrafterCall, Headroom, MarginalGains
from specdec.target_service.policy.means import WEIGHT
from specdec.target_service.session import TargetSession
from specdec.target_service.tree.proposed import Node
from specdec.target_service.tree.speculation_tree import Hung
from specdec.target_service.tree.walk import Walk
from specdec.wire.sampling_params import VerifyMode


class Expectations:
    """Expectations over all sessions of a target, learnt from the outcome of proposals."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        """The record of acceptance of all sources."""
        self.marginal = MarginalGains()
        """Gains of asking one more source."""
        self.tokens_per_s = 0.0
        """Moving mean of committed tokens per second, over all sessions; 0: not known."""

    # --- nodes

    def path_scores(self, session: TargetSession, max_depth: int) -> list[float]:
        """Estimated probability that each node is reached and accepted; 0 for nodes deeper than `max_depth`."""
        tokens, nodes = session.tree.tokens, session.tree.nodes
        is_rejection = session.mode is VerifyMode.REJECTION
        if not (is_rejection or session.tree.has_offers):
            own = session.own_records.get(DRAFT_MODEL)
            return self.acceptance[DRAFT_MODEL].path_scores([node.score for node in nodes], tokens, own, max_depth)
        scores: list[float] = []
        for node, parent, depth in zip(nodes, tokens.parents, tokens.depths, strict=True):
            if depth > max_depth or (is_rejection and not node.is_drawn):
                rate = 0.0
            elif is_rejection and not node.is_local:
                # The choice of nodes must not depend on drawn tokens, and so not on their scores.
                rate = self.acceptance.depth_rate
            elif node.others:
                rate = self._rate(session, node, depth)
            else:
                rate = self.acceptance[node.source].rate(node.score, depth, session.own_records.get(node.source))
            scores.append(rate * scores[parent] if parent >= 0 else rate)
        return scores

    def _rate(self, session: TargetSession, node: Node, depth: int) -> float:
        """The highest acceptance rate among the sources that propose the node."""
        return max(
            self.acceptance[source].rate(score, depth, session.own_records.get(source))
            for source, score in node.offers()
        )

    # --- sources

    def headroom(self, session: TargetSession) -> Headroom:
        """Tokens that the session's next step could accept beyond those expected of its tree."""
        limit = most_accepted(session)
        if not len(session.tree):
            return Headroom(limit, limit)
        scores = self.path_scores(session, limit)
        return Headroom(max(0.0, limit - sum(sorted(scores, reverse=True)[:limit])), limit)

    def worth_per_s(self, source: str, cost_s: float, limit: int) -> float:
        """Tokens that a source gains per second of a call for an empty tree; infinite where `cost_s` is 0."""
        return self.marginal.expected(source, Headroom(limit, limit)) / cost_s if cost_s else math.inf

    def is_worth_asking(self, source: str, asks: Iterable[tuple[TargetSession, Headroom]], cost_s: float) -> bool:
        """Whether a call of `cost_s` seconds for all these sessions gains more tokens than are decoded meanwhile.

        The first source is always asked (the gate judges it). All sources are asked in rejection mode, where proposals
        must not depend on drawn tokens, and in one of `TRY_EVERY` steps.
        """
        gained = 0.0
        for session, headroom in asks:
            is_first = not len(session.tree) or session.mode is VerifyMode.REJECTION
            if headroom.limit and (is_first or session.num_walks % TRY_EVERY == 0):
                return True
            gained += self.marginal.expected(source, headroom)
        return gained > cost_s * self.tokens_per_s

    def observe_rate(self, num_tokens: int, turn_s: float) -> None:
        """Learn that a step of decoding committed `num_tokens`, `turn_s` seconds after the one before."""
        if turn_s > 0:
            rate = num_tokens / turn_s
            self.tokens_per_s += WEIGHT * (rate - self.tokens_per_s) if self.tokens_per_s else rate

    def observe_walk(self, session: TargetSession, tree: Hung, chosen: Sequence[int], walk: Walk) -> None:
        """Learn from a session's walk; `tree`: as it was before, `chosen`: its nodes that were verified."""
        session.num_walks += 1
        accepted = {chosen[index] for index in walk.path}
        self._observe_sources(session, accepted)
        self._observe_offers(session, tree, walk.token_ids)
        reached = {ROOT, *accepted}
        if walk.finish_reason and walk.path and len(walk.path) == len(walk.token_ids):
            reached.discard(chosen[walk.path[-1]])  # the choice ends there: the walk never tried its children
        branched: dict[int, bool] = {}
        for node in chosen:
            parent = tree.tokens.parents[node]
            if parent in reached and not tree.nodes[node].is_local:
                branched[parent] = branched.get(parent, False) or node in accepted
        for went_on in branched.values():
            self.acceptance.observe_depth(went_on)

    def _observe_offers(self, session: TargetSession, tree: Hung, token_ids: Sequence[int]) -> None:
        """Learn from all nodes below a committed token, verified or not; `token_ids`: the tokens committed then."""
        if not tree.nodes:
            return
        tokens, is_rejection = tree.tokens, session.mode is VerifyMode.REJECTION
        if is_rejection and not tree.has_offers:
            return
        depths = {ROOT: 0}
        num_tokens = len(token_ids)
        for node, parent in enumerate(tokens.parents):
            depth = depths.get(parent, num_tokens)
            if depth == num_tokens:
                continue
            payload = tree.nodes[node]
            is_next = tokens.token_ids[node] == token_ids[depth]
            if is_next:
                depths[node] = depth + 1
            for source, score in payload.offers() if payload.others else ((payload.source, payload.score),):
                # A draft's forced node tells nothing of its scores; in rejection mode scores must not be learnt from.
                if source == DRAFT_MODEL and (payload.is_forced or is_rejection):
                    continue
                own = session.own_records.get(source)
                if own is None:
                    own = session.own_records[source] = OwnRecord()
                self.acceptance[source].observe(score, depth + 1, is_next, own)

    def _observe_sources(self, session: TargetSession, accepted: Set[int]) -> None:
        if session.grammar is None:  # dropped illegal nodes renumber the tree, and the calls' ranges no longer fit
            for call in session.drafter_calls:
                self.marginal.observe(call, accepted)
        session.drafter_calls.clear()

    def forget(self, source: str) -> None:
        """Drop the records of a source: another source has its name now."""
        self.acceptance.forget(source)
        self.marginal.forget(source)


def note_call(session: TargetSession, source: str, headroom: Headroom, num_nodes_before: int) -> None:
    """Record a call of a source for a session, whose tree had `headroom` and `num_nodes_before` nodes before it."""
    session.drafter_calls.append(DrafterCall(source, headroom, range(num_nodes_before, len(session.tree))))


def most_accepted(session: TargetSession) -> int:
    """Proposed tokens that the session's next step may accept."""
    return min(session.max_nodes, session.end.max_depth(session.num_tokens))
