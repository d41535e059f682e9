"""Metrics that the engine processes of targets and drafts have in common."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from specdec.telemetry.registry import BATCH_TOKENS, COARSE_S, FINE_S, TOKENS, MetricGroup


class EngineMetrics(MetricGroup):
    """Metrics of targets and drafts: steps, KV cache, sessions, constraints."""

    _kinds: str
    _step_kinds: tuple[str, ...]
    _outcomes: str
    _ends: tuple[str, ...]
    _stale: str
    _loop: str

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._make_step_metrics()
        self._make_device_metrics()
        self._make_session_metrics()
        self._make_cache_metrics()
        self._make_grammar_metrics()

    def _make_step_metrics(self) -> None:
        kind = {"kind": self._kinds}
        self.steps = self._counter(
            "steps_total",
            "Steps, by the kind of their rows.",
            kind,
            promql="sum by (kind) (rate($steps_total[5m]))",
            initial=self._step_kinds,
        )
        self.step_seconds = self._histogram(
            "step_seconds",
            "Seconds of a step, sampling included.",
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
            BATCH_TOKENS,
            promql="sum(rate($step_sequences_sum[5m])) / sum(rate($step_sequences_count[5m]))",
        )
        self.loop_seconds = self._histogram(
            "loop_seconds",
            self._loop,
            FINE_S,
            promql="sum by (instance) (rate($loop_seconds_sum[5m]))",
        )

    def _make_device_metrics(self) -> None:
        self.captured_graphs = self._gauge(
            "captured_graphs",
            "Captured graphs of a GPU; 0 on a GPU: kernels are launched one by one, which is slower.",
            promql="min by (instance) ($captured_graphs)",
        )
        self.memory_faults = self._counter(
            "device_memory_faults_total",
            "Steps for which the device had too little free memory: they were repeated with fewer sequences.",
            promql="sum by (instance) (increase($device_memory_faults_total[1h]))",
        )

    def _make_session_metrics(self) -> None:
        self.sessions = self._gauge(
            "sessions",
            "Sessions that are held, including those without a coordinator's stream.",
            promql="sum by (instance) ($sessions)",
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
            initial=self._ends,
        )
        self.opened = self._counter(
            "sessions_opened_total",
            "Sessions opened, including reopened ones.",
            promql="sum by (instance) (rate($sessions_opened_total[5m]))",
        )
        self.stale_proposals = self._counter(
            "stale_proposals_total", self._stale, promql="sum(rate($stale_proposals_total[5m]))"
        )
        self.mismatches = self._counter(
            "token_mismatches_total",
            "Messages of a peer that were malformed or contradicted committed tokens.",
            promql="sum(increase($token_mismatches_total[1h]))",
        )
        self.info = self._gauge(
            "info",
            "1, with the served model as labels.",
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
        self.kv_blocks = self._gauge("kv_blocks", "KV blocks, used and free.", promql="sum($kv_blocks)")
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
            "Sequences that lost their KV blocks to others.",
            promql="sum by (instance) (rate($preemptions_total[5m]))",
        )
        self.rollbacks = self._counter(
            "rollbacks_total", "Rollbacks: sequences that dropped tokens.", promql="sum(rate($rollbacks_total[5m]))"
        )
        self.rollback_tokens = self._histogram(
            "rollback_tokens",
            "Tokens that a rollback dropped.",
            TOKENS,
            promql="histogram_quantile(0.95, sum by (le) (rate($rollback_tokens_bucket[5m])))",
        )

    def _make_grammar_metrics(self) -> None:
        self.grammar_compile_seconds = self._histogram(
            "grammar_compile_seconds",
            "Seconds of compiling a constraint, or of finding that it does not compile; the check in a process of its"
            " own is included, the wait for a thread is not.",
            COARSE_S,
            promql="histogram_quantile(0.95, sum by (le) (rate($grammar_compile_seconds_bucket[5m])))",
        )
        self.grammar_cache_queries = self._counter(
            "grammar_cache_queries_total",
            "Sessions opened with a constraint.",
            promql="sum by (instance) (rate($grammar_cache_queries_total[5m]))",
        )
        self.grammar_cache_hits = self._counter(
            "grammar_cache_hits_total",
            "Sessions opened with a constraint that was compiled, or being compiled.",
            promql="sum(rate($grammar_cache_hits_total[5m])) / sum(rate($grammar_cache_queries_total[5m]))",
        )
        self.grammars_cached = self._gauge(
            "grammars_cached", "Compiled constraints that are kept.", promql="sum by (instance) ($grammars_cached)"
        )
        self.grammar_refusals = self._counter(
            "grammar_refusals_total",
            "Sessions that were refused or ended because of their constraint.",
            {
                "reason": "invalid; too_complex: compiling or following it would exceed a limit; output: committed"
                " tokens violate it; busy: too many others wait to be compiled; fault"
            },
            promql="sum by (reason) (rate($grammar_refusals_total[5m]))",
            initial=("invalid", "too_complex", "output", "busy", "fault"),
        )
