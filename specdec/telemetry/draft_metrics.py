"""What a draft's engine process exports."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from specdec.telemetry.engine_metrics import EngineMetrics
from specdec.telemetry.registry import FINE_S, TOKENS


class DraftMetrics(EngineMetrics):
    """Drafting."""

    _prefix = "draft"
    _kinds = "draft, prefill"
    _step_kinds = ("draft", "prefill")
    _outcomes = "closed"
    _ends = ("closed",)
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
