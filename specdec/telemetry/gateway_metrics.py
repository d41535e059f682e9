"""Metrics of a gateway: its own, and those of speculation under the names that vLLM's clients read."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from specdec.telemetry.registry import COARSE_S, MetricDoc, MetricGroup, MetricType

_ROUTE = {"route": "the path as in /openapi.json; other: any other path"}


class GatewayMetrics(MetricGroup):
    """Requests, times and tokens of HTTP clients."""

    _prefix = "gateway"

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.requests = self._counter(
            "requests_total",
            "Requests that were answered, by HTTP status; for a stream the status with which it began.",
            {**_ROUTE, "status": "HTTP status; 499: the client left before an answer began"},
            promql='sum(rate($requests_total{status=~"5.."}[5m])) / sum(rate($requests_total[5m]))',
        )
        self.request_seconds = self._histogram(
            "request_seconds",
            "Seconds from a request's headers to the end of its answer.",
            COARSE_S,
            _ROUTE,
            promql="histogram_quantile(0.95, sum by (le, route) (rate($request_seconds_bucket[5m])))",
        )
        self.running = self._gauge(
            "requests_running", "Requests that run, except health and metrics.", promql="sum($requests_running)"
        )
        self.held = self._gauge(
            "requests_held",
            "Requests that wait for a model that is not served (hold_s): autoscalers start the model by it.",
            {"model": "the name in the setting models; empty: the model of the setting coordinators"},
            promql="sum by (model) ($requests_held)",
        )
        self.clients_gone = self._counter(
            "clients_gone_total",
            "Requests whose client left before the end.",
            promql="sum(rate($clients_gone_total[5m]))",
        )
        self.stream_errors = self._counter(
            "stream_errors_total",
            "Streams that ended in an error after they had begun.",
            promql="sum(rate($stream_errors_total[5m]))",
        )
        self.failovers = self._counter(
            "failovers_total",
            "Calls that moved to another coordinator, as one did not answer, or not to the end.",
            promql="sum(rate($failovers_total[5m]))",
        )
        self.first_token_seconds = self._histogram(
            "time_to_first_token_seconds",
            "Seconds from the call of a coordinator to its first output.",
            COARSE_S,
            promql="histogram_quantile(0.95, sum by (le) (rate($time_to_first_token_seconds_bucket[5m])))",
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens_total",
            "Prompt tokens of requests that ended well.",
            promql="sum(rate($prompt_tokens_total[5m]))",
        )
        self.output_tokens = self._counter(
            "output_tokens_total",
            "Output tokens of requests that ended well.",
            promql="sum(rate($output_tokens_total[5m]))",
        )


class VllmMetrics(MetricGroup):
    """Speculation of requests that ended well, under vLLM's names: benchmarks read the differences."""

    _prefix = "vllm"

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.drafts = self._counter(
            "num_drafts_total",
            "Steps that verified draft tokens.",
            promql="rate($num_accepted_tokens_total[5m]) / rate($num_drafts_total[5m])",
        )
        self.draft_tokens = self._counter(
            "num_draft_tokens_total",
            "Draft tokens that were verified.",
            promql="rate($num_accepted_tokens_total[5m]) / rate($num_draft_tokens_total[5m])",
        )
        self.accepted_tokens = self._counter(
            "num_accepted_tokens_total",
            "Draft tokens that were accepted.",
            promql="rate($num_accepted_tokens_total[5m])",
        )
        self.accepted_per_position = self._counter(
            "num_accepted_tokens_per_pos_total",
            "Draft tokens that were accepted, by position.",
            {"position": "0, 1, ...: number of draft tokens before it in the step"},
            promql="sum by (position) (rate($num_accepted_tokens_per_pos_total[5m]))",
        )

    def _document(
        self, type_: MetricType, name: str, text: str, labels: Mapping[str, str] | None, promql: str
    ) -> MetricDoc:
        prefix = "vllm:spec_decode_"
        doc = MetricDoc(f"{prefix}{name}", type_, text, labels or {}, promql.replace("$", prefix))
        self.docs.append(doc)
        return doc
