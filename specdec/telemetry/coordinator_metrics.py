"""Metrics of a coordinator."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from specdec.telemetry.registry import COARSE_S, FINE_S, MetricGroup

_DEPTH = {"depth": "1, 2, ...: the distance from the last committed token"}
_OPERATION = {
    "operation": "begin, append, renew, end, load, abort (journal), take_tokens (quotas), announce, withdraw, replicas "
    "(registry), add_prefixes, prefix_holders, ping"
}
_OPERATIONS = (
    *("begin", "append", "renew", "end", "load", "abort", "take_tokens"),
    *("announce", "withdraw", "replicas", "add_prefixes", "prefix_holders", "ping"),
)
_ROLES = ("target", "draft")
_ROLE = {"role": "target, draft"}
_OUTCOMES = (
    *("OK", "CANCELLED", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"),
    *("UNAVAILABLE", "INTERNAL", "UNKNOWN", "DATA_LOSS"),
)
_ADMISSION_CAUSES = (
    *("overloaded", "queue_timeout", "deadline_unreachable"),
    *("quota", "concurrency", "prompt_bytes"),
)
_STEP_KINDS = ("verify", "plain", "prefill")
_FALLBACK_CAUSES = (
    *("stream_broken", "draining", "bad_proposal", "too_many_sessions", "non_finite_logits"),
    *("stalled", "slow", "flood", "never_accepted", "fault", "message_too_large", "other"),
)
FALLBACK_CAUSES = frozenset(
    (
        *_FALLBACK_CAUSES,
        *("commit_gap", "commit_mismatch", "draft_context_end", "invalid_field", "session_fault", "stale_lease"),
        *("session_taken_over", "deadline_exceeded", "unavailable", "internal"),
    )
)
"""Causes of draft fallbacks in metrics: a draft may give any reason, and each new one would add a series."""


class CoordinatorMetrics(MetricGroup):
    """Requests, tokens, latency, admission and speculation as clients see them."""

    _prefix = "coordinator"

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._make_request_metrics()
        self._make_latency_metrics()
        self._make_speculation_metrics()
        self._make_fleet_metrics()
        self._make_store_metrics()

    def _make_request_metrics(self) -> None:
        self.requests = self._counter(
            "requests_total",
            "Requests that ended, by gRPC code.",
            {"outcome": "a gRPC status code: OK, CANCELLED, INVALID_ARGUMENT, UNAVAILABLE, ..."},
            promql='sum(rate($requests_total{outcome!~"OK|CANCELLED|INVALID_ARGUMENT"}[5m]))'
            " / sum(rate($requests_total[5m]))",
            initial=_OUTCOMES,
        )
        self.admission_rejects = self._counter(
            "admission_rejects_total",
            "Requests that were not admitted.",
            {
                "cause": "want of capacity: overloaded, queue_timeout, deadline_unreachable; "
                "limits: quota, concurrency, prompt_bytes"
            },
            promql="sum by (cause) (rate($admission_rejects_total[5m]))",
            initial=_ADMISSION_CAUSES,
        )
        self.readers_stalled = self._counter(
            "readers_stalled_total",
            "Streams that were cut off because their client read nothing for reader_stall_s.",
            promql="sum(rate($readers_stalled_total[5m]))",
        )
        self.speculation_shed = self._counter(
            "speculation_shed_total",
            "Requests that decode without speculation because others waited for places when they started.",
            promql="sum(rate($speculation_shed_total[5m]))",
        )
        self.running = self._gauge("requests_running", "Requests that run.", promql="sum($requests_running)")
        self.queue_length = self._gauge("queue_length", "Requests that wait for a place.", promql="sum($queue_length)")
        self.prompt_tokens = self._counter(
            "prompt_tokens_total",
            "Prompt tokens of admitted requests.",
            promql="sum(rate($prompt_tokens_total[5m]))",
        )
        self.cached_tokens = self._counter(
            "cached_tokens_total",
            "Prompt tokens found in a prefix cache.",
            promql="sum(rate($cached_tokens_total[5m])) / sum(rate($prompt_tokens_total[5m]))",
        )
        self.tokens = self._counter(
            "tokens_total",
            "Output tokens sent to clients, by origin.",
            {
                "origin": "prefill, draft, recovered, bonus, decode, forced",
            },
            promql="sum by (origin) (rate($tokens_total[5m]))",
        )

    def _make_latency_metrics(self) -> None:
        self.queue_seconds = self._histogram(
            "queue_seconds",
            "Seconds that a request waited for a place.",
            COARSE_S,
            promql="histogram_quantile(0.95, sum by (le) (rate($queue_seconds_bucket[5m])))",
        )
        self.ttft_seconds = self._histogram(
            "time_to_first_token_seconds",
            "Seconds from the request's arrival to its first token.",
            COARSE_S,
            promql="histogram_quantile(0.95, sum by (le) (rate($time_to_first_token_seconds_bucket[5m])))",
        )
        self.inter_token_seconds = self._histogram(
            "inter_token_seconds",
            "Seconds between tokens of a choice; a burst of n tokens is n intervals of 1/n of its gap.",
            FINE_S,
            promql="histogram_quantile(0.95, sum by (le) (rate($inter_token_seconds_bucket[5m])))",
        )
        self.e2e_seconds = self._histogram(
            "request_seconds",
            "Seconds from arrival to the end of the stream, of admitted requests with any outcome.",
            COARSE_S,
            promql="histogram_quantile(0.95, sum by (le) (rate($request_seconds_bucket[5m])))",
        )
        self.outside_seconds = self._histogram(
            "outside_seconds",
            "Seconds outside the models: decoding time of a choice in which no step ran or waited for a draft.",
            COARSE_S,
            promql="sum(rate($outside_seconds_sum[5m])) / sum(rate($request_seconds_sum[5m]))",
        )
        self.draft_latency_seconds = self._histogram(
            "draft_latency_seconds",
            "Seconds from a commit to the first proposal that includes it (draft RPC latency), by the way of both.",
            FINE_S,
            {"path": "direct (as the target measures it, on average), relayed"},
            promql="histogram_quantile(0.95, sum by (le, path) (rate($draft_latency_seconds_bucket[5m])))",
        )
        for path in ("direct", "relayed"):
            self.draft_latency_seconds.labels(path)
        self.link_changes = self._counter(
            "link_changes_total",
            "Reports of drafts about direct links to their sessions' targets.",
            {"change": "joined, left (the link ended, lagged, or could not be had)"},
            promql="sum by (change) (rate($link_changes_total[5m]))",
            initial=("joined", "left"),
        )
        self.verify_latency_seconds = self._histogram(
            "verify_latency_seconds",
            "Seconds from relaying a proposal to the verdict that used it (verify RPC latency).",
            FINE_S,
            promql="histogram_quantile(0.95, sum by (le) (rate($verify_latency_seconds_bucket[5m])))",
        )

    def _make_speculation_metrics(self) -> None:
        self.proposed_tokens = self._counter(
            "proposed_tokens_total",
            "Steps of a choice that verified a draft token at this depth.",
            _DEPTH,
            promql="sum(rate($accepted_tokens_total[5m])) / sum(rate($proposed_tokens_total[5m]))",
        )
        self.accepted_tokens = self._counter(
            "accepted_tokens_total",
            "Draft tokens accepted at this depth.",
            _DEPTH,
            promql="sum by (depth) (rate($accepted_tokens_total[5m]))"
            " / sum by (depth) (rate($proposed_tokens_total[5m]))",
        )
        self.steps = self._counter(
            "steps_total",
            "Verdicts received, by kind.",
            {"kind": "verify (with a tree), plain, prefill"},
            promql='1 + sum(rate($accepted_tokens_total[5m])) / sum(rate($steps_total{kind="verify"}[5m]))',
            initial=_STEP_KINDS,
        )
        self.hits = self._counter(
            "hits_total",
            "Steps of a choice that had a usable proposal when they were formed.",
            promql='sum(rate($hits_total[5m])) / sum(rate($steps_total{kind!="prefill"}[5m]))',
        )
        self.wasted_tokens = self._counter(
            "wasted_tokens_total",
            "Draft tokens that verdicts made useless.",
            promql="sum(rate($wasted_tokens_total[5m]))",
        )
        self.draft_fallbacks = self._counter(
            "draft_fallbacks_total",
            "Choices that lost their draft and went on without one.",
            {
                "cause": "stream_broken, draining, bad_proposal (no target would accept it), stalled, slow "
                "(rejection mode), flood, never_accepted, fault (its message could not be handled), or the reason of "
                "the draft's refusal; other: a reason that specdec's drafts do not give"
            },
            promql="sum by (cause) (rate($draft_fallbacks_total[5m]))",
            initial=_FALLBACK_CAUSES,
        )
        self.draft_hedges = self._counter(
            "draft_hedges_total",
            "Choices that were opened at a second draft because their own was slow.",
            promql="sum(rate($draft_hedges_total[5m]))",
        )
        self.draft_hedges_won = self._counter(
            "draft_hedges_won_total",
            "Choices that kept their second draft.",
            promql="sum(rate($draft_hedges_won_total[5m])) / sum(rate($draft_hedges_total[5m]))",
        )
        self.draft_hedges_open = self._gauge(
            "draft_hedges_open", "Choices that are open at two drafts.", promql="sum($draft_hedges_open)"
        )
        self.mismatches = self._counter(
            "token_mismatches_total",
            "Verdicts whose overlap differed from delivered tokens.",
            promql="sum(increase($token_mismatches_total[1h]))",
        )

    def _make_fleet_metrics(self) -> None:
        self.sessions = self._gauge(
            "sessions", "Open sessions, by role of the replica.", _ROLE, promql="sum by (role) ($sessions)"
        )
        self.session_reopens = self._counter(
            "session_reopens_total",
            "Sessions opened again under a higher epoch.",
            _ROLE,
            promql="sum by (role) (rate($session_reopens_total[5m]))",
            initial=_ROLES,
        )
        self.stream_reconnects = self._counter(
            "stream_reconnects_total",
            "Streams to replicas opened again.",
            _ROLE,
            promql="sum by (role) (increase($stream_reconnects_total[5m]))",
            initial=_ROLES,
        )
        self.replicas = self._gauge(
            "replicas",
            "Replicas, by role and state; of several processes the largest count.",
            {
                **_ROLE,
                "state": "connecting, ready, draining, ejected, probation, incompatible, down",
            },
            promql='min by (role) (sum by (role, instance) ($replicas{state="ready"}))',
            merge="livemax",
        )
        self.processes = self._gauge(
            "processes", "Processes behind the port that are serving.", promql="min by (instance) ($processes)"
        )

    def _make_store_metrics(self) -> None:
        self.journal_seconds = self._histogram(
            "journal_seconds",
            "Seconds of one journal operation in Redis; without Redis nothing is observed.",
            FINE_S,
            promql="histogram_quantile(0.95, sum by (le) (rate($journal_seconds_bucket[5m])))",
        )
        self.journal_errors = self._counter(
            "journal_errors_total",
            "Journal operations that Redis refused or did not answer in time; few are tried while it is down.",
            promql="sum(rate($journal_errors_total[5m]))",
        )
        self.unjournalled = self._gauge(
            "requests_unjournalled",
            "Requests that wait or run and are not in the journal because Redis fails.",
            promql="sum($requests_unjournalled)",
        )
        self.store_up = self._gauge(
            "store_up",
            "1 if the last operation that reached Redis was answered, otherwise 0; without Redis always 1.",
            promql="min($store_up)",
            merge="livemin",
        )
        self.store_operation_seconds = self._histogram(
            "store_operation_seconds",
            "Seconds of one operation in Redis; without Redis nothing is observed.",
            FINE_S,
            _OPERATION,
            promql="histogram_quantile(0.95, sum by (le, operation) (rate($store_operation_seconds_bucket[5m])))",
        )
        self.store_errors = self._counter(
            "store_errors_total",
            "Operations that Redis refused or did not answer in time; few are tried while it is down.",
            _OPERATION,
            promql="sum by (operation) (rate($store_errors_total[5m]))",
            initial=_OPERATIONS,
        )


class SupervisorMetrics(MetricGroup):
    """Metrics of the process that keeps several coordinator processes running."""

    _prefix = "coordinator"

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.process_restarts = self._counter(
            "process_restarts_total",
            "Coordinator processes that ended unasked; with num_processes above 1 only.",
            promql="sum by (instance) (increase($process_restarts_total[1h]))",
        )
