"""What targets and drafts export: their engine processes, and the servicer processes in front of them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from specdec.telemetry.registry import BATCH_TOKENS, COARSE_S, FINE_S, TOKENS, MetricGroup

_DEPTH = {"depth": "1, 2, ...: the distance from the last committed token"}
_DIRECTION = {"direction": "in (from coordinators), out"}


class _EngineMetrics(MetricGroup):
    """What targets and drafts have in common: steps, KV cache, sessions."""

    _kinds: str
    _outcomes: str
    _stale: str
    _loop: str

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._make_step_metrics()
        self._make_session_metrics()
        self._make_cache_metrics()

    def _make_step_metrics(self) -> None:
        kind = {"kind": self._kinds}
        self.steps = self._counter(
            "steps_total", "Steps, by kind of their rows.", kind, promql="sum by (kind) (rate($steps_total[5m]))"
        )
        self.step_seconds = self._histogram(
            "step_seconds",
            "Time of a step, sampling included.",
            FINE_S,
            kind,
            promql="histogram_quantile(0.5, sum by (le, kind) (rate($step_seconds_bucket[5m])))",
        )
        self.step_tokens = self._histogram(
            "step_tokens",
            "Rows of a step.",
            BATCH_TOKENS,
            promql="sum(rate($step_tokens_sum[5m])) / sum(rate($step_tokens_count[5m]))",
        )
        self.step_sequences = self._histogram(
            "step_sequences",
            "Sequences of a step.",
            TOKENS,
            promql="sum(rate($step_sequences_sum[5m])) / sum(rate($step_sequences_count[5m]))",
        )
        self.loop_seconds = self._histogram(
            "loop_seconds",
            self._loop,
            FINE_S,
            promql="sum by (instance) (rate($loop_seconds_sum[5m]))",
        )

    def _make_session_metrics(self) -> None:
        self.sessions = self._gauge(
            "sessions", "Sessions that are held, orphaned ones too.", promql="sum by (instance) ($sessions)"
        )
        self.running = self._gauge(
            "sessions_running", "Sessions that take part in steps.", promql="sum by (instance) ($sessions_running)"
        )
        self.queue_length = self._gauge(
            "queue_length", "Sessions that wait for their first step.", promql="sum by (instance) ($queue_length)"
        )
        self.requests = self._counter(
            "requests_total",
            "Sessions that ended.",
            {"outcome": self._outcomes},
            promql="sum by (outcome) (rate($requests_total[5m]))",
        )
        self.opened = self._counter(
            "sessions_opened_total",
            "Sessions opened, reopened ones too.",
            promql="sum by (instance) (rate($sessions_opened_total[5m]))",
        )
        self.stale_proposals = self._counter(
            "stale_proposals_total", self._stale, promql="sum(rate($stale_proposals_total[5m]))"
        )
        self.mismatches = self._counter(
            "token_mismatches_total",
            "Messages of the peer that were malformed or contradicted what was committed.",
            promql="sum(increase($token_mismatches_total[1h]))",
        )
        self.info = self._gauge(
            "info",
            "1, with what is served as labels.",
            {
                "model": "the name clients use",
                "numerics_id": "equal ids give equal logits",
                "device": "cpu, cuda:0, ...",
                "dtype": "float32, bfloat16, ...",
                "tokenizer": "first 12 digits of the tokenizer's digest; one per deployment",
            },
            promql="count by (model, numerics_id, tokenizer) ($info)",
        )

    def _make_cache_metrics(self) -> None:
        self.kv_blocks_used = self._gauge(
            "kv_blocks_used",
            "KV blocks in use.",
            promql="max by (instance) ($kv_blocks_used / $kv_blocks)",
        )
        self.kv_blocks_cached = self._gauge(
            "kv_blocks_cached",
            "Free KV blocks that hold a cached prefix.",
            promql="max by (instance) ($kv_blocks_cached / $kv_blocks)",
        )
        self.kv_blocks = self._gauge("kv_blocks", "KV blocks in all.", promql="sum($kv_blocks)")
        self.prefix_cache_queries = self._counter(
            "prefix_cache_queries_total",
            "Tokens looked up in the prefix cache.",
            promql="sum(rate($prefix_cache_queries_total[5m]))",
        )
        self.prefix_cache_hits = self._counter(
            "prefix_cache_hits_total",
            "Tokens found in the prefix cache.",
            promql="sum(rate($prefix_cache_hits_total[5m])) / sum(rate($prefix_cache_queries_total[5m]))",
        )
        self.preemptions = self._counter(
            "preemptions_total",
            "Sequences whose blocks were taken away.",
            promql="sum by (instance) (rate($preemptions_total[5m]))",
        )
        self.rollbacks = self._counter(
            "rollbacks_total", "Times a sequence forgot tokens.", promql="sum(rate($rollbacks_total[5m]))"
        )
        self.rollback_tokens = self._histogram(
            "rollback_tokens",
            "Rollback depth: tokens that a rollback forgot.",
            TOKENS,
            promql="histogram_quantile(0.95, sum by (le) (rate($rollback_tokens_bucket[5m])))",
        )


class TargetMetrics(_EngineMetrics):
    """Verification and plain decoding."""

    _prefix = "target"
    _kinds = "verify (with a tree), plain, prefill"
    _outcomes = (
        "stop, length; abort: closed before, by the coordinator (a stop string, a client that left), an error or expiry"
    )
    _stale = "Draft tokens that came too late: verdicts had decided their positions."
    _loop = "Time of a step's turn outside the step: merging proposals before it, verdicts after it."

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.tokens = self._counter(
            "tokens_total",
            "Committed tokens, by origin.",
            {"origin": "prefill, draft, recovered, bonus, decode"},
            promql="sum by (origin) (rate($tokens_total[5m]))",
        )
        self._make_speculation_metrics()
        self._make_latency_metrics()
        self._make_payoff_metrics()

    def _make_speculation_metrics(self) -> None:
        self.proposed_tokens = self._counter(
            "proposed_tokens_total",
            "Steps of a session that verified a node at this depth.",
            _DEPTH,
            promql="sum(rate($accepted_tokens_total[5m])) / sum(rate($proposed_tokens_total[5m]))",
        )
        self.accepted_tokens = self._counter(
            "accepted_tokens_total",
            "Accepted nodes at this depth.",
            _DEPTH,
            promql="sum by (depth) (rate($accepted_tokens_total[5m]))"
            " / sum by (depth) (rate($proposed_tokens_total[5m]))",
        )
        self.verified_nodes = self._counter(
            "verified_nodes_total",
            "Tree nodes verified.",
            promql="sum(rate($accepted_tokens_total[5m])) / sum(rate($verified_nodes_total[5m]))",
        )
        self.wasted_tokens = self._counter(
            "wasted_tokens_total",
            "Tree nodes thrown away, verified or not.",
            promql="sum(rate($wasted_tokens_total[5m])) / sum(rate($tokens_total[5m]))",
        )
        self.hits = self._counter(
            "hits_total",
            "Steps of a session with a usable proposal at hand.",
            promql="sum(rate($hits_total[5m])) / (sum(rate($hits_total[5m])) + sum(rate($misses_total[5m])))",
        )
        self.misses = self._counter(
            "misses_total", "Steps of a session without one.", promql="sum by (instance) (rate($misses_total[5m]))"
        )
        self.committed_per_verify = self._histogram(
            "committed_tokens",
            "Acceptance length: tokens committed by a step of a session that verified a proposal.",
            TOKENS,
            promql="sum(rate($committed_tokens_sum[5m])) / sum(rate($committed_tokens_count[5m]))",
        )
        self.draft_credit = self._gauge(
            "draft_credit",
            "Draft tokens per session worth proposing at this load.",
            promql="avg by (instance) ($draft_credit)",
        )

    def _make_latency_metrics(self) -> None:
        self.hold_off_seconds = self._histogram(
            "hold_off_seconds",
            "Time a session's step waited for a draft; 0 when it did not.",
            FINE_S,
            promql="sum(rate($hold_off_seconds_sum[5m])) / sum(rate($hold_off_seconds_count[5m]))",
        )
        self.verify_seconds = self._histogram(
            "verify_seconds",
            "Time of a step that verified proposals.",
            FINE_S,
            promql="histogram_quantile(0.95, sum by (le) (rate($verify_seconds_bucket[5m])))",
        )
        self.ttft_seconds = self._histogram(
            "time_to_first_token_seconds",
            "From the session's opening to its first token.",
            COARSE_S,
            promql="histogram_quantile(0.95, sum by (le) (rate($time_to_first_token_seconds_bucket[5m])))",
        )
        self.inter_token_seconds = self._histogram(
            "inter_token_seconds",
            "Time between committed tokens; a burst of n is n intervals of 1/n.",
            FINE_S,
            promql="histogram_quantile(0.95, sum by (le) (rate($inter_token_seconds_bucket[5m])))",
        )

    def _make_payoff_metrics(self) -> None:
        speed_up = "sum(rate($plain_equivalent_seconds_total[5m])) / sum(rate($decode_seconds_total[5m]))"
        self.decode_seconds = self._counter(
            "decode_seconds_total",
            "Time that decoding took, summed over the sessions of each step: the step's turn and the hold-off before"
            " it. Steps that carried prefill are left out here and in plain_equivalent_seconds.",
            promql=speed_up,
        )
        self.plain_equivalent_seconds = self._counter(
            "plain_equivalent_seconds_total",
            "Time that the same tokens would have taken by plain decoding of the same batch: by plain steps of as many"
            " sessions as measured last, or, before there was one, by the target's model of its step time. Over"
            " decode_seconds it is the speed-up; below 1 speculation does not pay. A draft that shares the target's"
            " machine slows plain steps down, too; that is corrected by plain steps that ran while no draft worked (of"
            " requests without speculation). Until there were some, the figure flatters speculation there.",
            promql=speed_up,
        )


class DraftMetrics(_EngineMetrics):
    """Drafting."""

    _prefix = "draft"
    _kinds = "draft, prefill"
    _outcomes = "closed"
    _stale = "Commits that told nothing new."
    _loop = "Time of a commit: following it in the tree, rolling back, planning."

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.proposals = self._counter(
            "proposals_total", "Proposals sent.", promql="sum by (instance) (rate($proposals_total[5m]))"
        )
        self.tokens = self._counter(
            "tokens_total",
            "Depths by which sessions were drafted further, counted when a proposal carried them.",
            {"kind": "main"},
            promql="sum(rate($tokens_total[5m])) / sum(rate($proposals_total[5m]))",
        )
        self.drafted_tokens = self._counter(
            "drafted_tokens_total",
            "Draft tokens computed, sent or not.",
            promql="sum by (instance) (rate($drafted_tokens_total[5m]))",
        )
        self.proposal_tokens = self._histogram(
            "proposal_tokens",
            "Nodes of a proposal.",
            TOKENS,
            promql="sum(rate($proposal_tokens_sum[5m])) / sum(rate($proposal_tokens_count[5m]))",
        )
        self.committed_tokens = self._counter(
            "committed_tokens_total",
            "Committed tokens, by whether the draft had them.",
            {"found": "found, missing"},
            promql='sum(rate($committed_tokens_total{found="found"}[5m])) / sum(rate($committed_tokens_total[5m]))',
        )
        self.draft_seconds = self._histogram(
            "draft_seconds",
            "From the arrival of a commit to the first proposal after it.",
            FINE_S,
            promql="histogram_quantile(0.95, sum by (le) (rate($draft_seconds_bucket[5m])))",
        )


class RelayMetrics(MetricGroup):
    """The servicer process of a target or draft: its streams, and its registration."""

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        self._prefix = service
        super().__init__(registry)
        self.streams = self._gauge(
            "open_streams", "Open streams of coordinators.", promql="sum by (instance) ($open_streams)"
        )
        self.stream_ends = self._counter(
            "streams_total",
            "Streams that ended.",
            {"outcome": "closed, cancelled, aborted"},
            promql="sum by (outcome) (rate($streams_total[5m]))",
        )
        self.messages = self._counter(
            "messages_total",
            "Messages relayed.",
            _DIRECTION,
            promql="sum by (direction) (rate($messages_total[5m]))",
        )
        self.message_bytes = self._counter(
            "message_bytes_total",
            "Bytes relayed.",
            _DIRECTION,
            promql="sum by (direction) (rate($message_bytes_total[5m]))",
        )
        self.store_up = self._gauge(
            "store_up",
            "1 if the last operation that reached Redis was answered, else 0; without Redis always 1.",
            promql="min($store_up)",
        )
        self.store_up.set(1)
        self.announce_failures = self._counter(
            "announce_failures_total",
            "Renewals of the registration in Redis that failed.",
            promql="sum by (instance) (increase($announce_failures_total[5m]))",
        )
