"""Metrics of a draft's engine process."""

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
    _stale = "Commits whose tokens the draft already knew."
    _loop = "Seconds of a commit: following it in the tree, rolling back, planning."

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.proposals = self._counter(
            "proposals_total", "Proposals sent.", promql="sum by (instance) (rate($proposals_total[5m]))"
        )
        self.tokens = self._counter(
            "tokens_total",
            "Depths added to sessions' drafts, counted when a proposal carries them.",
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
            "Committed tokens, by whether the draft had proposed them.",
            {"found": "found, missing"},
            promql='sum(rate($committed_tokens_total{found="found"}[5m])) / sum(rate($committed_tokens_total[5m]))',
        )
        self.draft_seconds = self._histogram(
            "draft_seconds",
            "Seconds from the arrival of a commit to the first proposal after it.",
            FINE_S,
            promql="histogram_quantile(0.95, sum by (le) (rate($draft_seconds_bucket[5m])))",
        )
        self._make_drafter_metrics()

    def _make_drafter_metrics(self) -> None:
        drafter = {"drafter": "a name of the setting `drafters`: ngram, suffix, openai_api"}
        self.drafter_offered = self._counter(
            "drafter_offered_tokens_total",
            "Tree nodes offered by a drafter of a draft service without a model.",
            drafter,
            promql="sum by (drafter) (rate($drafter_offered_tokens_total[5m]))",
        )
        self.drafters_dropped = self._counter(
            "drafters_dropped_total",
            "Drafters that failed and are no longer used.",
            drafter,
            promql="sum by (instance, drafter) ($drafters_dropped_total) > 0",
        )
        self.api_tokens = self._counter(
            "api_tokens_total",
            "Tokens that openai_api asked an endpoint for, of prompts and of completions.",
            {"kind": "prompt, completion"},
            promql="sum by (instance, kind) (increase($api_tokens_total[1h]))",
        )
        self.api_cost = self._counter(
            "api_cost_total",
            "Cost of these tokens by the prices of the settings.",
            promql="sum by (instance) (increase($api_cost_total[1h]))",
        )
        self.api_faults = self._counter(
            "api_faults_total",
            "Calls of an endpoint that failed; after each the endpoint is not called for a while.",
            {"kind": "timeout, slow, redirect, status_5xx, no_json, long_line, ..."},
            promql="sum by (instance, kind) (increase($api_faults_total[15m]))",
        )
