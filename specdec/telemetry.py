"""Structured logs, and the metrics of each service.

Every metric is named specdec_<service>_..., is defined here and only here, and is exported by the process
that constructs its group. A target or draft is two processes, so their metrics go through prometheus_client's
multiprocess files (`enable_multiprocess_metrics`), and /metrics merges them (`scrape_registry`).
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import prometheus_client.values
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

_MULTIPROCESS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
# Seconds. Steps of small models, and hops between processes, take well under 10 ms.
_FINE_S = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05,
    0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
_COARSE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKENS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
_BATCH_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def setup_logging(service: str, level: str = "info", log_format: str = "json") -> None:
    """Sends logs, those of libraries too, to standard error: one JSON object a line, or coloured text.

    Every line carries time, level, event and service; ids and figures are fields, never parts of the event.
    """
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_service(service),
    ]
    if log_format == "json":
        # Without local variables: they hold prompts and keys.
        tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        final: list[Any] = [
            structlog.processors.ExceptionRenderer(tracebacks),
            structlog.processors.JSONRenderer(),
        ]
    else:
        final = [
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
        ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.processors.StackInfoRenderer(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _add_service(service: str) -> Any:
    def processor(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        event.setdefault("service", service)
        return event

    return processor


def enable_multiprocess_metrics(directory: str) -> None:
    """Metrics made from now on, here and in processes started from here, go to files in `directory`."""
    os.environ[_MULTIPROCESS_VARIABLE] = directory
    prometheus_client.values.ValueClass = prometheus_client.values.get_value_class()


def scrape_registry(own: CollectorRegistry) -> CollectorRegistry:
    """What /metrics shows: in multiprocess mode the files of all processes, else the process's registry."""
    if _MULTIPROCESS_VARIABLE not in os.environ:
        return own
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return registry


class _Group:
    """Makes metrics with one prefix in one registry."""

    _prefix: str

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"specdec_{self._prefix}_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        # Only one process sets a gauge; in the files of the others it is zero, so that the sum is its value.
        return Gauge(
            f"specdec_{self._prefix}_{name}",
            text,
            labels,
            registry=self._registry,
            multiprocess_mode="livesum",
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"specdec_{self._prefix}_{name}", text, labels, registry=self._registry, buckets=buckets)


class CoordinatorMetrics(_Group):
    """What clients see: requests, tokens, latency, admission, speculation as it reached them."""

    _prefix = "coordinator"

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.requests = self._counter("requests_total", "Requests that ended, by gRPC code.", "outcome")
        self.admission_rejects = self._counter("admission_rejects_total", "Requests not admitted.", "cause")
        self.running = self._gauge("requests_running", "Requests that run.")
        self.queue_length = self._gauge("queue_length", "Requests that wait for a place.")
        self.queue_seconds = self._histogram("queue_seconds", "Wait for a place.", _COARSE_S)
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of admitted requests.")
        self.cached_tokens = self._counter("cached_tokens_total", "Prompt tokens found in a prefix cache.")
        self.tokens = self._counter("tokens_total", "Output tokens sent to clients, by origin.", "origin")
        self.ttft_seconds = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token.", _COARSE_S
        )
        self.inter_token_seconds = self._histogram(
            "inter_token_seconds",
            "Time between tokens of a choice; a burst of n tokens is n intervals of 1/n of its gap.",
            _FINE_S,
        )
        self.e2e_seconds = self._histogram("request_seconds", "From arrival to the end of the stream.", _COARSE_S)
        self.outside_seconds = self._histogram(
            "outside_seconds",
            "Decoding time of a request in which no step ran and none waited for a draft.",
            _COARSE_S,
        )
        self.proposed_tokens = self._counter(
            "proposed_tokens_total", "Steps that verified a draft token at this depth.", "depth"
        )
        self.accepted_tokens = self._counter("accepted_tokens_total", "Draft tokens accepted at this depth.", "depth")
        self.steps = self._counter("steps_total", "Verdicts received, by kind (verify, plain, prefill).", "kind")
        self.hits = self._counter("hits_total", "Steps that had a usable proposal at hand when they were formed.")
        self.wasted_tokens = self._counter("wasted_tokens_total", "Draft tokens that verdicts made worthless.")
        self.draft_latency_seconds = self._histogram(
            "draft_latency_seconds", "From a commit to the first proposal after it.", _FINE_S
        )
        self.verify_latency_seconds = self._histogram(
            "verify_latency_seconds", "From relaying a proposal to the verdict that used it.", _FINE_S
        )
        self.draft_fallbacks = self._counter(
            "draft_fallbacks_total", "Sessions that went on without their draft, by cause.", "cause"
        )
        self.sessions = self._gauge("sessions", "Open sessions, by role of the replica.", "role")
        self.session_reopens = self._counter(
            "session_reopens_total", "Sessions opened again under a higher epoch, by role.", "role"
        )
        self.stream_reconnects = self._counter(
            "stream_reconnects_total", "Streams to replicas opened again, by role.", "role"
        )
        self.replicas = self._gauge("replicas", "Replicas, by role and state.", "role", "state")
        self.journal_seconds = self._histogram("journal_seconds", "Time of one write to the journal.", _FINE_S)
        self.journal_errors = self._counter("journal_errors_total", "Writes to the journal that failed.")
        self.mismatches = self._counter(
            "token_mismatches_total", "Verdicts whose overlap differed from what was delivered."
        )


class _EngineMetrics(_Group):
    """What targets and drafts have in common: steps, KV cache, sessions."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.steps = self._counter("steps_total", "Steps, by kind of their rows.", "kind")
        self.step_seconds = self._histogram("step_seconds", "Time of a step, sampling included.", _FINE_S, "kind")
        self.step_tokens = self._histogram("step_tokens", "Rows of a step.", _BATCH_TOKENS)
        self.step_sequences = self._histogram("step_sequences", "Sequences of a step.", _TOKENS)
        self.sessions = self._gauge("sessions", "Sessions that are held, orphaned ones too.")
        self.running = self._gauge("sessions_running", "Sessions that take part in steps.")
        self.queue_length = self._gauge("queue_length", "Sessions that wait for their first step.")
        self.requests = self._counter("requests_total", "Sessions that ended, by outcome.", "outcome")
        self.opened = self._counter("sessions_opened_total", "Sessions opened, reopened ones too.")
        self.kv_blocks_used = self._gauge("kv_blocks_used", "KV blocks in use.")
        self.kv_blocks_cached = self._gauge("kv_blocks_cached", "Free KV blocks that hold a cached prefix.")
        self.kv_blocks = self._gauge("kv_blocks", "KV blocks in all.")
        self.prefix_cache_queries = self._counter("prefix_cache_queries_total", "Tokens looked up.")
        self.prefix_cache_hits = self._counter("prefix_cache_hits_total", "Tokens found in the prefix cache.")
        self.preemptions = self._counter("preemptions_total", "Sequences whose blocks were taken away.")
        self.rollbacks = self._counter("rollbacks_total", "Times a sequence forgot tokens.")
        self.rollback_tokens = self._histogram("rollback_tokens", "Tokens that a rollback forgot.", _TOKENS)
        self.stale_proposals = self._counter("stale_proposals_total", "Proposals or commits that came too late.")
        self.mismatches = self._counter("token_mismatches_total", "Tokens of the peer that differed from own ones.")
        self.loop_seconds = self._histogram("loop_seconds", "Time of a turn of the loop outside steps.", _FINE_S)
        self.info = self._gauge("info", "1, with what is served as labels.", "model", "numerics_id", "device", "dtype")


class TargetMetrics(_EngineMetrics):
    """Verification and plain decoding."""

    _prefix = "target"

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.tokens = self._counter("tokens_total", "Committed tokens, by origin.", "origin")
        self.proposed_tokens = self._counter(
            "proposed_tokens_total", "Steps of a session that verified a node at this depth.", "depth"
        )
        self.accepted_tokens = self._counter("accepted_tokens_total", "Accepted nodes at this depth.", "depth")
        self.verified_nodes = self._counter("verified_nodes_total", "Tree nodes verified.")
        self.wasted_tokens = self._counter("wasted_tokens_total", "Tree nodes thrown away, verified or not.")
        self.hits = self._counter("hits_total", "Steps of a session with a usable proposal at hand.")
        self.misses = self._counter("misses_total", "Steps of a session without one.")
        self.committed_per_verify = self._histogram(
            "committed_tokens", "Tokens committed by a step of a session that verified a proposal.", _TOKENS
        )
        self.hold_off_seconds = self._histogram("hold_off_seconds", "Time a step waited for a draft.", _FINE_S)
        self.verify_seconds = self._histogram("verify_seconds", "Time of a step that verified proposals.", _FINE_S)
        self.ttft_seconds = self._histogram(
            "time_to_first_token_seconds", "From the session's opening to its first token.", _COARSE_S
        )
        self.inter_token_seconds = self._histogram(
            "inter_token_seconds",
            "Time between committed tokens; a burst of n is n intervals of 1/n.",
            _FINE_S,
        )
        self.draft_credit = self._gauge("draft_credit", "Draft tokens per session worth proposing at this load.")


class DraftMetrics(_EngineMetrics):
    """Drafting."""

    _prefix = "draft"

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.proposals = self._counter("proposals_total", "Proposals sent.")
        self.tokens = self._counter("tokens_total", "Draft tokens sent, by kind (main, outcome).", "kind")
        self.drafted_tokens = self._counter("drafted_tokens_total", "Draft tokens computed, sent or not.")
        self.proposal_tokens = self._histogram("proposal_tokens", "Nodes of a proposal.", _TOKENS)
        self.committed_tokens = self._counter(
            "committed_tokens_total",
            "Committed tokens, by whether the draft had them (found, missing).",
            "found",
        )
        self.draft_seconds = self._histogram(
            "draft_seconds", "From the arrival of a commit to the first proposal after it.", _FINE_S
        )


class RelayMetrics(_Group):
    """The servicer process of a target or draft: its streams."""

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        self._prefix = service
        super().__init__(registry)
        self.streams = self._gauge("open_streams", "Open streams of coordinators.")
        self.stream_ends = self._counter("streams_total", "Streams that ended, by outcome.", "outcome")
        self.messages = self._counter("messages_total", "Messages relayed, by direction (in, out).", "direction")
        self.message_bytes = self._counter("message_bytes_total", "Bytes relayed, by direction.", "direction")
