"""Metrics of a target's steps and verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import prometheus_client

from specdec.config.drafter_options import DRAFT_MODEL
from specdec.constraints.grammar.compiler import GrammarCompiler
from specdec.engine.outputs import EngineStats
from specdec.replica.worker.engine_gauges import EngineGauges
from specdec.target_service.records.step_record import Payoff, StepRecord, Taken
from specdec.target_service.sample_and_walk import Decision
from specdec.target_service.session import SessionState
from specdec.target_service.tree.speculation_tree import Hung
from specdec.telemetry import Tallies, TargetMetrics
from specdec.v1 import common_pb2 as pb

_ORIGINS: dict[int, str] = {value: name.removeprefix("ORIGIN_").lower() for name, value in pb.Origin.items()}
_FINISH = {value: name.removeprefix("FINISH_REASON_").lower() for name, value in pb.FinishReason.items()}
_KeyT = TypeVar("_KeyT")


class _Labelled(dict[_KeyT, prometheus_client.Counter], Generic[_KeyT]):
    """Cache of a metric's counters by label values: every verdict counts at several depths."""

    def __init__(self, metric: prometheus_client.Counter, labels: Callable[[_KeyT], tuple[str, ...]]) -> None:
        super().__init__()
        self._metric, self._labels = metric, labels

    def __missing__(self, key: _KeyT) -> prometheus_client.Counter:
        counter = self[key] = self._metric.labels(*self._labels(key))
        return counter


class TargetRecorder:
    """Updates a target's metrics; one call per step, one per verdict."""

    def __init__(self, metrics: TargetMetrics) -> None:
        self._metrics = metrics
        self._engine = EngineGauges(metrics)
        self._tallies = Tallies()
        """Counts since the last `write`."""
        self._tokens = _Labelled[int](metrics.tokens, lambda origin: (_ORIGINS[origin],))
        self._proposed_at = _Labelled[int](metrics.proposed_tokens, lambda depth: (str(depth),))
        self._accepted_at = _Labelled[int](metrics.accepted_tokens, lambda depth: (str(depth),))
        self._proposed_down_to, self._accepted_down_to = Counter[int](), Counter[int]()
        """Number of verdicts since the last `write`, by the depth they verified, and by the depth they accepted."""
        self._proposed_by = _Labelled[str](metrics.drafter_proposed, _alone)
        self._verified_of = _Labelled[str](metrics.drafter_verified, _alone)
        self._seconds_of = _Labelled[str](metrics.drafter_seconds, _alone)
        self._accepted_of = _Labelled[tuple[str, int]](metrics.drafter_accepted, lambda key: (key[0], str(key[1])))

    def serves(self, identity: pb.ModelIdentity) -> None:
        """Export the identity of the loaded model."""
        self._engine.serves(identity)

    def load(
        self, stats: EngineStats, num_sessions: int, draft_credit: int, num_suspended: int, min_gain_tokens: float
    ) -> None:
        """Set the gauges; called a few times a second."""
        self._engine.observe(stats, num_sessions)
        self._metrics.draft_credit.set(draft_credit)
        self._metrics.suspended_sessions.set(num_suspended)
        self._metrics.speculation_price.set(min_gain_tokens)

    def grammars(self, grammars: GrammarCompiler | None) -> None:
        """Export the counts of compiled constraints; called a few times a second."""
        if grammars is not None:
            self._engine.observe_grammars(grammars)

    def masks(self, fill_s: float, wait_s: float) -> None:
        """Observe the seconds of filling a step's masks, and of waiting for them; ignored for a step without masks."""
        if fill_s:
            self._tallies.observe(self._metrics.mask_seconds, fill_s)
            self._tallies.observe(self._metrics.mask_wait_seconds, wait_s)

    def opened(self) -> None:
        """Count an opened session."""
        self._metrics.opened.inc()

    def aborted(self) -> None:
        """Count a session that was closed before its choice ended."""
        self._metrics.requests.labels("abort").inc()

    def rejected_proposal(self) -> None:
        """Count a malformed proposal."""
        self._metrics.mismatches.inc()

    def asked(self, drafter: str, num_nodes: int, elapsed_s: float) -> None:
        """Count a local drafter's call for a session: `num_nodes` nodes in `elapsed_s` seconds."""
        self._tallies.count(self._proposed_by[drafter], num_nodes)
        self._tallies.count(self._seconds_of[drafter], elapsed_s)

    def judged(self, drafter: str, num_verified: int, accepted_depths: Sequence[int]) -> None:
        """Count a drafter's verified nodes, and its accepted ones by their depths."""
        self._tallies.count(self._verified_of[drafter], num_verified)
        for depth in accepted_depths:
            self._tallies.count(self._accepted_of[drafter, depth])

    def drafted(self, elapsed_s: float) -> None:
        """Count `elapsed_s` seconds of the own draft's call, for all sessions together."""
        self._tallies.count(self._seconds_of[DRAFT_MODEL], elapsed_s)

    def drafts(self, tree: Hung, verified: Sequence[int], accepted: Sequence[int], draft_s: float) -> None:
        """Count the nodes that drafts have proposed for a session since its last step, and their outcome in this step.

        Cost: a tenth of a microsecond per verified node, and one per draft.

        Args:
            tree: the session's tree before the step's tokens were committed.
            verified: verified nodes of the tree.
            accepted: accepted nodes of the tree, from depth 1 on.
            draft_s: seconds that drafts report, divided among them by their nodes.
        """
        count, nodes, hung = self._tallies.count, tree.nodes, tree.num_hung
        if hung:
            node_s = draft_s / sum(hung.values())
            for draft, num_nodes in hung.items():
                count(self._proposed_by[draft], num_nodes)
                count(self._seconds_of[draft], num_nodes * node_s)
        proposed = [n.draft for i in verified if (n := nodes[i]).source == DRAFT_MODEL and not n.is_forced]
        if not proposed:
            return
        for draft in set(proposed):
            count(self._verified_of[draft], proposed.count(draft))
        for depth, index in enumerate(accepted, 1):
            node = nodes[index]
            if node.source == DRAFT_MODEL and not node.is_forced:
                count(self._accepted_of[node.draft, depth])

    def searched(self, elapsed_s: float, matchness: float) -> None:
        """Count a search for sublayers to skip; `matchness`: share of tokens that the best set predicts."""
        self._metrics.layer_search_seconds.inc(elapsed_s)
        self._metrics.layer_matchness.set(matchness)

    def dropped(self, drafter: str) -> None:
        """Count a drafter that failed or does not help, and is not asked any more."""
        self._metrics.drafters_dropped.labels(drafter).inc()

    def step(self, step: StepRecord) -> None:
        """Count one step of the engine."""
        num_nodes = sum(item.tree_nodes for item in step.output.items)
        is_prefill = any(item.num_new_tokens > 1 for item in step.output.items)
        kind = "verify" if num_nodes else "prefill" if is_prefill else "plain"
        self._engine.observe_step(step.output, kind, step.elapsed_s, self._tallies)
        if num_nodes:
            self._tallies.observe(self._metrics.verify_seconds, step.elapsed_s)
            self._tallies.count(self._metrics.verified_nodes, num_nodes)
        gap_s = step.output.gap_s() if step.is_decode else None
        if gap_s is not None:
            self._tallies.observe(self._metrics.device_gap_seconds, gap_s)

    def turn(self, outside_s: float, payoff: Payoff | None) -> None:
        """Count a finished turn: `outside_s` seconds besides the step, and the payoff of speculation."""
        metrics, tallies = self._metrics, self._tallies
        tallies.observe(metrics.loop_seconds, outside_s)
        if payoff is not None:
            tallies.count(metrics.decode_seconds, payoff.decode_s)
            tallies.count(metrics.plain_equivalent_seconds, payoff.plain_s)

    def write(self) -> None:
        """Export all counts; called a few times a second, and before the owner of an ended choice is told."""
        self._count_depths(self._proposed_at, self._proposed_down_to)
        self._count_depths(self._accepted_at, self._accepted_down_to)
        self._tallies.write()

    def verdict(self, decision: Decision, taken: Taken) -> None:
        """Count one verdict."""
        metrics, tallies, candidate, walk = self._metrics, self._tallies, decision.candidate, decision.walk
        num_nodes, num_tokens, num_accepted = candidate.num_nodes, len(walk.token_ids), len(walk.path)
        for origin in set(walk.origins):
            tallies.count(self._tokens[origin], walk.origins.count(origin))
        if taken.last_at_s is None:
            tallies.observe(metrics.ttft_seconds, taken.decided_at_s - candidate.session.times.opened_at_s)
        else:
            each_s = (taken.decided_at_s - taken.last_at_s) / num_tokens
            tallies.observe(metrics.inter_token_seconds, each_s, num_tokens)
            tallies.count(metrics.hits if taken.state is SessionState.HIT else metrics.misses)
            tallies.observe(metrics.hold_off_seconds, taken.held_s)
        self._proposed_down_to[max(candidate.tree.depths[:num_nodes], default=0)] += 1
        self._accepted_down_to[num_accepted] += 1
        if num_nodes:
            tallies.observe(metrics.committed_per_verify, num_tokens)
        if num_nodes > num_accepted:
            tallies.count(metrics.rollbacks)
            tallies.observe(metrics.rollback_tokens, num_nodes - num_accepted)
        tallies.count(metrics.wasted_tokens, taken.num_wasted)
        tallies.count(metrics.stale_proposals, taken.tree.num_stale)
        if walk.finish_reason:
            metrics.requests.labels(_FINISH[walk.finish_reason]).inc()

    def _count_depths(self, counters: _Labelled[int], down_to: Counter[int]) -> None:
        """Count each depth once per verdict that reached it: a tree has nodes at every depth above its deepest."""
        num_verdicts = 0
        for depth in range(max(down_to, default=0), 0, -1):
            num_verdicts += down_to[depth]
            self._tallies.count(counters[depth], num_verdicts)
        down_to.clear()


def _alone(label: str) -> tuple[str, ...]:
    return (label,)
