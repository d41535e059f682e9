"""The policies applied to live sessions: when the next step runs, and which nodes it verifies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from specdec.target_service.pacing.expectations import Expectations, most_accepted
from specdec.target_service.policy.budget import WaitPurse
from specdec.target_service.policy.gate import SpeculationGate
from specdec.target_service.policy.hold_off import (
    CATCH_UP_S,
    DEPTHS,
    DraftLatency,
    Episode,
    HoldOff,
    HoldOffChoice,
    kind_of,
    pays_for_all,
)
from specdec.target_service.policy.means import Mean
from specdec.target_service.policy.step_clock import StepClock
from specdec.target_service.policy.step_time import StepTimeModel
from specdec.target_service.policy.verify_policy import select_nodes
from specdec.target_service.session import SessionState, TargetSession
from specdec.target_service.tree.walk import Walk
from specdec.v1 import common_pb2 as pb

_MAX_UNANSWERED = 2
"""Consecutive waits in vain after which a session's draft counts as silent until it sends something: it may be gone, or
its proposals come too late. Waits for a silent draft are paid from `WaitPurse`. Chosen, not measured: each wait in vain
delays a token, and a single answer may be late."""
_MAX_VAIN = 8
"""Consecutive waits in vain, over all sessions, after which all drafts count as silent until one answers in time.
Requests are short, and each begins with a draft whose speed is unknown."""
_PATIENCE = 1.5
"""Factor over a draft's mean time for the wanted depth that a step waits. About half of the answers take longer than
the mean, and a wait that just misses its answer is lost. Chosen, not measured: too long a wait lowers the rate of its
episodes, so that `HoldOffChoice` picks another depth."""
_MOST_STEPS_PER_NODE = 2.0
"""Steps per wanted node that a wait may last. With all nodes accepted, a wait pays below one step per node; the rest is
for distant drafts, which stay ahead after their first answer. The limit also bounds the delay that a draft with false
times causes in other sessions."""
_MOST_NODE_US = 1e6
"""Most microseconds per token that a draft's report is believed."""
_CREDIT_MARGIN = 1.5
"""Factor over the mean number of verified nodes, plus one node, that drafts are asked to propose: without a margin the
mean could only fall."""


class Pacing:
    """Chooses hold-offs and trees from what the target has measured: step times, draft latency, acceptance."""

    def __init__(self, hold_off_ms: float | None, *, is_gated: bool = False, row_edges: tuple[int, ...] = ()) -> None:
        """`hold_off_ms`: milliseconds of every wait for a draft; None: learnt. `is_gated`: sessions speculate only
        while that pays. `row_edges`: row counts that the engine pads steps to.
        """
        self.clock = StepClock(StepTimeModel(edges=row_edges))
        self.gate = SpeculationGate(is_gated, clock=self.clock)
        self.expectations = Expectations()
        """Expectations of proposed nodes and of sources."""
        self.draft_latency = DraftLatency()
        self._hold_off: defaultdict[str, HoldOffChoice] = defaultdict(HoldOffChoice)
        self._purse = WaitPurse(CATCH_UP_S)
        self._hold_off_ms = hold_off_ms
        self._mean_nodes = Mean()
        """Mean number of nodes that a step verifies for a session."""
        self._num_vain = 0

    def plan(self, ready: Sequence[TargetSession], now_s: float) -> None:
        """Decide which sessions' next steps are held off, and for which depth.

        Stops at the first session that waits for nothing: then the step is due for all sessions.
        """
        self.gate.expect(len(ready))
        may_wait = self._hold_off_ms is not None or self._may_keep_waiting(ready)
        for session in ready:
            if session.state is SessionState.DECIDED:
                session.plan(self._plan_hold_off(session, now_s, len(ready)) if may_wait else None)
            if _waits_for_nothing(session):
                return

    def wait_s(self, ready: Sequence[TargetSession], now_s: float) -> float | None:
        """Seconds until the next step is due; 0.0: now; None: no session is ready.

        A step is held off only while every session may gain from that: prefill, plain decoding and sessions with a
        silent draft never wait for the drafts of others.
        """
        if not ready:
            return None
        until_s = 0.0
        for session in ready:
            if _waits_for_nothing(session):
                return 0.0
            if session.hold_off is None or session.is_answered:
                continue
            if session.tree.lasting_depth < session.hold_off.depth:
                until_s = max(until_s, session.hold_off.until_s - now_s)
        return until_s

    def will_wait(self, ready: Sequence[TargetSession]) -> bool:
        """Whether the next step will be held off, as far as that is known before proposals are merged."""
        without = [session for session in ready if not session.tree.nodes]
        return (
            bool(without)
            and all(self._may_wait(s) and not self._is_silent(s) for s in without)
            and self._may_keep_waiting(ready)
        )

    def count_vain_waits(self, ready: Sequence[TargetSession], now_s: float) -> None:
        """Learn from the waits in vain when a step begins: those that ran out. A wait that ended sooner, for
        the sake of another session, tells nothing of the draft.
        """
        has_vain = False
        for session in ready:
            hold_off = session.hold_off
            if hold_off is None or now_s < hold_off.until_s or session.tree.lasting_depth or session.is_answered:
                continue
            has_vain = True
            session.misses.num_unanswered += 1
            self.draft_latency.observe_vain(hold_off.until_s - hold_off.since_s)
        self._num_vain += has_vain

    def choose_trees(self, ready: Sequence[TargetSession], now_s: float) -> dict[str, list[int]]:
        """Set the tree that the next step verifies for each session.

        Returns, by session id, the index in the session's speculation tree of each node of that tree.
        """
        for session in ready:
            session.seq.tree = None  # left over from a step that had no room for the session
        candidates = [s for s in ready if s.tree.nodes and s.seq.num_pending_tokens <= 1 and self.may_offer(s)]
        limits = [s.max_nodes for s in candidates]
        scores = [self.expectations.path_scores(s, _most_depth(s)) for s in candidates]
        weights = None
        if any(s.wanted_token_s for s in candidates):
            weights = [s.urgency(now_s) for s in candidates]
        selected = select_nodes(scores, limits, len(ready) - len(candidates), self.clock.rows, weights)
        for nodes in selected:
            self._mean_nodes.observe(len(nodes))
        chosen: dict[str, list[int]] = {}
        for session, likely in zip(candidates, selected, strict=True):
            nodes = _with_window(session, likely) if session.tree.has_window else likely
            if nodes:
                session.seq.tree, chosen[session.session_id] = session.tree.select(nodes)
        return chosen

    def may_verify(self, session: TargetSession) -> bool:
        """Whether a session's proposals are verified. True before its first token, when the gate has not judged it."""
        return session.max_nodes > 0 and (session.gate is None or self.gate.is_open(session.gate))

    def may_offer(self, session: TargetSession) -> bool:
        """Whether nodes that cost only their rows are verified, even while the session's draft is suspended."""
        return session.max_nodes > 0 and (session.gate is None or self.gate.allows_free_nodes(session.gate))

    def draft_credit(self, limit: int) -> int:
        """Draft tokens per session that are worth proposing, at most `limit`: somewhat more than steps verify."""
        if not self._mean_nodes.num_seen:
            return limit
        return max(1, min(limit, math.ceil(_CREDIT_MARGIN * self._mean_nodes.value) + 1))

    def observe_step(self, num_rows: int, elapsed_s: float) -> None:
        """Learn the time of a step without prefill; chunks of prompts do not lie on the fitted line."""
        self.clock.rows.observe(num_rows, elapsed_s)

    def observe_gain(self, session: TargetSession, walk: Walk, num_nodes: int, now_s: float) -> bool:
        """Report a session's step to the gate, before its tree is pruned; returns whether its draft is suspended."""
        if not session.max_nodes:
            return False
        if session.gate is None:
            session.gate = self.gate.admit(
                f"{session.mode.name} {kind_of(session.params.temperature)} {session.sources}", now_s
            )
        else:
            has_proposal = bool(session.tree.nodes)
            self.gate.stepped(session.gate, len(walk.path), has_proposal, now_s, num_nodes=num_nodes)
        if self.gate.is_open(session.gate):
            return False
        session.misses.num_unanswered, session.misses.episode = _MAX_UNANSWERED, None
        return True

    def observe_proposal(self, session: TargetSession, depth_before: int, proposal: pb.Proposal, now_s: float) -> None:
        """Learn from a merged proposal of a draft; `depth_before`: depth of the drafts' nodes before it."""
        if proposal.is_complete and proposal.start_position == session.num_tokens:
            session.num_answered, session.misses.num_unanswered, self._num_vain = session.num_tokens, 0, 0
        num_new = session.tree.lasting_depth - depth_before
        if num_new <= 0:
            return
        session.misses.num_unanswered = 0
        latency = self.draft_latency
        if proposal.path_length:
            node_us = min(proposal.draft_us / proposal.path_length, _MOST_NODE_US)
            session.tree.draft_us += round(node_us * num_new)
            latency.observe_node(node_us * 1e-6)
        if session.hold_off is not None and depth_before == 0:
            self._num_vain = 0
            latency.observe_first(max(0.0, now_s - session.hold_off.since_s - (num_new - 1) * latency.node_s))

    def _may_keep_waiting(self, ready: Sequence[TargetSession]) -> bool:
        """Whether sessions without a proposal may delay sessions that have one."""
        num_waiting = sum(not session.tree.nodes for session in ready)
        if not 0 < num_waiting < len(ready):
            return True
        expected = self.expectations
        return pays_for_all(num_waiting, expected.acceptance.depth_rate, expected.tokens_per_s, self.draft_latency)

    def _may_wait(self, session: TargetSession) -> bool:
        """Whether the session's next step may wait for a proposal, which may come and be accepted."""
        if self._hold_off_ms == 0 or session.state is SessionState.PREFILL or session.is_answered:
            return False
        return session.has_draft and self.may_verify(session) and most_accepted(session) > 0

    def _is_silent(self, session: TargetSession) -> bool:
        is_learnt = self._hold_off_ms is None
        return session.misses.num_unanswered >= _MAX_UNANSWERED or (is_learnt and self._num_vain >= _MAX_VAIN)

    def _plan_hold_off(self, session: TargetSession, now_s: float, num_ready: int) -> HoldOff | None:
        if self._has_enough(session) or not self._may_wait(session):
            return None
        max_depth = most_accepted(session)
        choice, misses = self._hold_off[kind_of(session.params.temperature)], session.misses
        if misses.episode is not None:
            last, misses.episode = misses.episode, None
            choice.observe(last.depth, session.num_tokens - last.num_tokens, now_s - last.began_s)
        is_learnt = self._hold_off_ms is None
        is_silent = self._is_silent(session)
        if self._hold_off_ms is not None:
            wanted, hold_s = max_depth, self._hold_off_ms / 1e3
        else:
            wanted = choice.choose(max_depth) if not is_silent else DEPTHS[1] if max_depth > 1 else 0
            hold_s = self._patience_s(wanted, num_ready, is_silent=is_silent)
        needs_grant = is_silent or (is_learnt and choice.is_trial(wanted))
        if hold_s <= 0 or (needs_grant and not self._purse.grants(hold_s, now_s)):
            wanted = 0
        if is_learnt and (wanted or not is_silent):
            misses.episode = Episode(wanted, now_s, session.num_tokens)
        if not wanted:
            return None
        return HoldOff(now_s, now_s + hold_s, wanted)

    def _patience_s(self, wanted: int, num_ready: int, *, is_silent: bool) -> float:
        """Seconds to wait for a depth. A silent draft's limit is at least `CATCH_UP_S`, so that it catches up."""
        if not wanted:
            return 0.0
        expected_s = _PATIENCE * self.draft_latency.until_depth(wanted)
        most_s = _MOST_STEPS_PER_NODE * wanted * self.clock.rows.predict(num_ready)
        return min(expected_s, max(most_s, CATCH_UP_S) if is_silent else most_s)

    def _has_enough(self, session: TargetSession) -> bool:
        """Whether a wait is needless: a draft has proposed, or other sources offer one expected token at least."""
        tree = session.tree
        return len(tree) > 0 and (
            not tree.is_local or sum(self.expectations.path_scores(session, session.max_nodes)) >= 1
        )


def _waits_for_nothing(session: TargetSession) -> bool:
    """Whether the session's next step is prefill, or plain decoding that is not held off."""
    if session.state is SessionState.PREFILL:
        return True
    return not session.tree.nodes and (session.hold_off is None or session.is_answered)


def _with_window(session: TargetSession, nodes: list[int]) -> list[int]:
    """The given nodes and all window nodes of a drafter within credit; both are closed under parents."""
    tree, depth = session.tree, _most_depth(session)
    window = [
        node
        for node, (payload, own) in enumerate(zip(tree.nodes, tree.tokens.depths, strict=True))
        if payload.is_window and own <= depth
    ]
    return sorted({*nodes, *window})


def _most_depth(session: TargetSession) -> int:
    """Number of nodes that may be accepted before the session ends or pauses; one more token always follows them."""
    return max(0, min(session.end.most_tokens, session.credit_position) - session.num_tokens - 1)
