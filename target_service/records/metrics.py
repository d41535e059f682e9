"""What a target exports of its steps and verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import prometheus_client

from specdec.engine.outputs import EngineStats
from specdec.grammar.compiler import GrammarCompiler
from specdec.telemetry import Tallies, TargetMetrics
from specdec.v1 import common_pb2 as pb
from specdec.worker.engine_gauges import EngineGauges
from target_service.policy.payoff import Payoff
from target_service.records.step_record import StepRecord
from target_service.session import TargetSession

_ORIGINS: dict[int, str] = {value: name.removeprefix("ORIGIN_").lower() for name, value in pb.Origin.items()}
_FINISH = {value: name.removeprefix("FINISH_REASON_").lower() for name, value in pb.FinishReason.items()}


class _Labelled(dict[int, prometheus_client.Counter]):
    """The counters of a metric by label value, looked up once: verdicts count at every depth, step after step."""

    def __init__(self, metric: prometheus_client.Counter, name: Callable[[int], str]) -> None:
        super().__init__()
        self._metric, self._name = metric, name

    def __missing__(self, value: int) -> prometheus_client.Counter:
        counter = self[value] = self._metric.labels(self._name(value))
        return counter


class TargetRecorder:
    """Updates a target's metrics; one call per step, one per verdict."""

    def __init__(self, metrics: TargetMetrics) -> None:
        self._metrics = metrics
        self._engine = EngineGauges(metrics)
        self._tallies = Tallies()
        """Of a step and its verdicts, written when its turn is over: before anybody is told of it."""
        self._tokens = _Labelled(metrics.tokens, lambda origin: _ORIGINS[origin])
        self._proposed_at = _Labelled(metrics.proposed_tokens, str)
        self._accepted_at = _Labelled(metrics.accepted_tokens, str)

    def serves(self, identity: pb.ModelIdentity) -> None:
        """The model is loaded."""
        self._engine.serves(identity)

    def load(
        self, stats: EngineStats, num_sessions: int, draft_credit: int, num_suspended: int, price_tokens: float
    ) -> None:
        """Gauges, a few times a second."""
        self._engine.observe(stats, num_sessions)
        self._metrics.draft_credit.set(draft_credit)
        self._metrics.suspended_sessions.set(num_suspended)
        self._metrics.speculation_price.set(price_tokens)

    def grammars(self, grammars: GrammarCompiler | None) -> None:
        """What was compiled, a few times a second."""
        if grammars is not None:
            self._engine.observe_grammars(grammars)

    def masks(self, fill_s: float, wait_s: float) -> None:
        """What the masks of a step took, and what it waited for them; nothing where it had none."""
        if fill_s:
            self._tallies.observe(self._metrics.mask_seconds, fill_s)
            self._tallies.observe(self._metrics.mask_wait_seconds, wait_s)

    def opened(self) -> None:
        """A session was opened."""
        self._metrics.opened.inc()

    def aborted(self) -> None:
        """A session was closed before its choice had ended."""
        self._metrics.requests.labels("abort").inc()

    def rejected_proposal(self) -> None:
        """A proposal was malformed."""
        self._metrics.mismatches.inc()

    def asked(self, drafter: str, num_nodes: int, elapsed_s: float) -> None:
        """A drafter of the target's own was asked for a session, and offered so many nodes."""
        self._metrics.drafter_proposed.labels(drafter).inc(num_nodes)
        self._metrics.drafter_seconds.labels(drafter).inc(elapsed_s)

    def judged(self, drafter: str, num_verified: int, accepted_depths: Sequence[int]) -> None:
        """So many nodes of a drafter were verified, and those at these depths accepted."""
        self._metrics.drafter_verified.labels(drafter).inc(num_verified)
        for depth in accepted_depths:
            self._metrics.drafter_accepted.labels(drafter, str(depth)).inc()

    def searched(self, elapsed_s: float, matchness: float) -> None:
        """The search for sublayers to leave out went on; the best set finds this share of tokens again."""
        self._metrics.layer_search_seconds.inc(elapsed_s)
        self._metrics.layer_matchness.set(matchness)

    def dropped(self, drafter: str) -> None:
        """A drafter failed or is of no use, and is not asked any more."""
        self._metrics.drafters_dropped.labels(drafter).inc()

    def step(self, step: StepRecord) -> None:
        """One step of the engine; a StepObserver."""
        num_nodes = sum(item.tree_nodes for item in step.output.items)
        is_prefill = any(item.num_new_tokens > 1 for item in step.output.items)
        kind = "verify" if num_nodes else "prefill" if is_prefill else "plain"
        self._engine.observe_step(step.output, kind, step.elapsed_s)
        if num_nodes:
            self._metrics.verify_seconds.observe(step.elapsed_s)
            self._metrics.verified_nodes.inc(num_nodes)

    def turn(self, outside_s: float, payoff: Payoff | None) -> None:
        """The turn of a step is over: what it took besides the step, and what it says of speculation."""
        metrics, tallies = self._metrics, self._tallies
        tallies.observe(metrics.loop_seconds, outside_s)
        if payoff is not None:
            tallies.count(metrics.decode_seconds, payoff.decode_s)
            tallies.count(metrics.plain_equivalent_seconds, payoff.plain_s)
        tallies.write()

    def verdict(self, session: TargetSession, verdict: pb.Verdict, num_stale: int, decided_at_s: float) -> None:
        """One verdict, before the session's own record of its last one is updated."""
        metrics, tallies = self._metrics, self._tallies
        for origin, count in Counter(verdict.origins).items():
            tallies.count(self._tokens[origin], count)
        last_at_s = session.times.last_verdict_at_s
        if last_at_s is None:
            tallies.observe(metrics.ttft_seconds, decided_at_s - session.times.opened_at_s)
        else:
            num_tokens = len(verdict.token_ids)
            each_s = (decided_at_s - last_at_s) / max(1, num_tokens)
            tallies.observe(metrics.inter_token_seconds, each_s, num_tokens)
            tallies.count(metrics.hits if verdict.hit else metrics.misses)
            tallies.observe(metrics.hold_off_seconds, verdict.hold_off_us * 1e-6)
        for depth, count in enumerate(verdict.verified_by_depth, 1):
            if count:
                tallies.count(self._proposed_at[depth])
        for depth in range(1, verdict.num_accepted + 1):
            tallies.count(self._accepted_at[depth])
        if verdict.verified_by_depth:
            tallies.observe(metrics.committed_per_verify, len(verdict.token_ids))
        num_rejected = sum(verdict.verified_by_depth) - verdict.num_accepted
        if num_rejected:
            tallies.count(metrics.rollbacks)
            tallies.observe(metrics.rollback_tokens, num_rejected)
        tallies.count(metrics.wasted_tokens, verdict.num_wasted)
        tallies.count(metrics.stale_proposals, num_stale)
        if verdict.finish_reason:
            metrics.requests.labels(_FINISH[verdict.finish_reason]).inc()
