"""Metrics of a target's engine process."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from specdec.telemetry.engine_metrics import EngineMetrics
from specdec.telemetry.registry import COARSE_S, FINE_S, GAP_S, TOKENS

_DEPTH = {"depth": "1, 2, ...: the distance from the last committed token"}

_OWN = {"drafter": "a name of the setting `drafters`: ngram, eagle3, ..."}

_DRAFTER = {
    "drafter": "draft_model: a draft, in a draft service or in the target's own process; else a name of the setting"
    " `drafters` of the target or of draft services: ngram, eagle3, openai_api, ..."
}


class TargetMetrics(EngineMetrics):
    """Verification and plain decoding."""

    _prefix = "target"
    _kinds = "verify (with a tree), plain, prefill"
    _step_kinds = ("verify", "plain", "prefill")
    _outcomes = (
        "stop, length; abort: closed before, by the coordinator (a stop string, a client that left), an error or expiry"
    )
    _ends = ("stop", "length", "abort")
    _stale = "Draft tokens that came after a verdict on their positions."
    _loop = "Seconds of a step's turn outside the step: merging proposals before it, verdicts after it."

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.tokens = self._counter(
            "tokens_total",
            "Committed tokens, by origin.",
            {"origin": "prefill, draft, recovered, bonus, decode, forced"},
            promql="sum by (origin) (rate($tokens_total[5m]))",
            initial=("prefill", "draft", "recovered", "bonus", "decode", "forced"),
        )
        self._make_speculation_metrics()
        self._make_latency_metrics()
        self._make_mask_metrics()
        self._make_payoff_metrics()
        self._make_drafter_metrics()

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
            "Tree nodes that were dropped, verified or not.",
            promql="sum(rate($wasted_tokens_total[5m])) / sum(rate($tokens_total[5m]))",
        )
        self.hits = self._counter(
            "hits_total",
            "Steps of a session with a usable proposal.",
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
        self.suspended_sessions = self._gauge(
            "suspended_sessions",
            "Sessions whose drafts are suspended, because speculation would cost more time than it saves.",
            promql="sum by (instance) ($suspended_sessions)",
        )
        self.speculation_price = self._gauge(
            "speculation_price_tokens",
            "Accepted tokens per step that a session needs for its speculation to pay at this load.",
            promql="avg by (instance) ($speculation_price_tokens)",
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
            "Seconds of a step that verified proposals.",
            FINE_S,
            promql="histogram_quantile(0.95, sum by (le) (rate($verify_seconds_bucket[5m])))",
        )
        self.ttft_seconds = self._histogram(
            "time_to_first_token_seconds",
            "Seconds from the session's opening to its first token.",
            COARSE_S,
            promql="histogram_quantile(0.95, sum by (le) (rate($time_to_first_token_seconds_bucket[5m])))",
        )
        self.inter_token_seconds = self._histogram(
            "inter_token_seconds",
            "Seconds between committed tokens; a burst of n tokens is n intervals of 1/n of its gap.",
            FINE_S,
            promql="histogram_quantile(0.95, sum by (le) (rate($inter_token_seconds_bucket[5m])))",
        )

        self.device_gap_seconds = self._histogram(
            "device_gap_seconds",
            "Seconds between two decoding steps by the GPU's clock, from the end of one forward pass to the begin of "
            "the next. Tokens are sampled in them; the rest is idle time or hold-off.",
            GAP_S,
            promql="histogram_quantile(0.5, sum by (le) (rate($device_gap_seconds_bucket[5m])))",
        )

    def _make_mask_metrics(self) -> None:
        self.mask_seconds = self._histogram(
            "mask_seconds",
            "Seconds of filling the masks of a step's constraints, on any thread; only of steps with constraints.",
            FINE_S,
            promql="sum(rate($mask_seconds_sum[5m])) / sum(rate($mask_seconds_count[5m]))",
        )
        self.mask_wait_seconds = self._histogram(
            "mask_wait_seconds",
            "Seconds that a step waited for its constraints' masks, or filled them itself after the forward pass.",
            FINE_S,
            promql="sum(rate($mask_wait_seconds_sum[5m])) / sum(rate($mask_seconds_sum[5m]))",
        )

    def _make_payoff_metrics(self) -> None:
        speed_up = "sum(rate($plain_equivalent_seconds_total[5m])) / sum(rate($decode_seconds_total[5m]))"
        self.decode_seconds = self._counter(
            "decode_seconds_total",
            "Seconds of decoding, summed over the sessions of each step: the step's turn and the hold-off before it."
            " Steps with prefill are left out here and in plain_equivalent_seconds.",
            promql=speed_up,
        )
        self.plain_equivalent_seconds = self._counter(
            "plain_equivalent_seconds_total",
            "Seconds that plain decoding of the same batch would have taken for the same tokens: by the last measured "
            "plain step with as many sessions, or, before there is one, by the target's cost model. Divided by "
            "decode_seconds it is the speed-up; below 1 speculation does not pay. A draft on the target's machine "
            "slows plain steps down, too. Plain steps that ran while no draft worked (of requests without "
            "speculation) correct for this; without such steps the figure flatters speculation.",
            promql=speed_up,
        )

    def _make_drafter_metrics(self) -> None:
        self.drafter_proposed = self._counter(
            "drafter_proposed_tokens_total",
            "Tree nodes offered by a drafter or a draft. `ngram` at the target and in a draft service are summed up.",
            _DRAFTER,
            promql="sum by (drafter) (rate($drafter_proposed_tokens_total[5m]))",
        )
        self.drafter_verified = self._counter(
            "drafter_verified_tokens_total",
            "Offered tree nodes that were verified; a node that several drafters offered counts for each.",
            _DRAFTER,
            promql="sum by (drafter) (rate($drafter_verified_tokens_total[5m]))",
        )
        self.drafter_accepted = self._counter(
            "drafter_accepted_tokens_total",
            "Verified tree nodes that were accepted.",
            {**_DRAFTER, **_DEPTH},
            promql="sum by (drafter) (rate($drafter_accepted_tokens_total[5m]))"
            " / sum by (drafter) (rate($drafter_verified_tokens_total[5m]))",
        )
        self.drafter_seconds = self._counter(
            "drafter_seconds_total",
            "Seconds of proposing. For the target's own drafters and draft they are measured, and all sessions of the "
            "step wait for them. Draft services report the time of the nodes on the deepest path, at most a second "
            "each, summed over sessions, for which they may draft side by side and while the target works.",
            _DRAFTER,
            promql="sum by (drafter) (rate($drafter_accepted_tokens_total[5m]))"
            " / sum by (drafter) (rate($drafter_seconds_total[5m]))",
        )
        self.layer_search_seconds = self._counter(
            "layer_search_seconds_total",
            "Seconds of the search for sublayers to leave out (drafter layer_skip), within max_search_share.",
            promql="sum by (instance) (rate($layer_search_seconds_total[5m]))",
        )
        self.layer_matchness = self._gauge(
            "layer_matchness_ratio",
            "Share of recent tokens that the target also finds without the sublayers that are left out.",
            promql="avg by (instance) ($layer_matchness_ratio)",
        )
        self.drafters_dropped = self._counter(
            "drafters_dropped_total",
            "The target's own drafters that failed, did not return, or gained nothing, and are no longer used.",
            _OWN,
            promql="sum by (instance, drafter) ($drafters_dropped_total) > 0",
        )
