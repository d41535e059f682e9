"""Prometheus metrics of the plugin, in a registry of its own: vLLM's processes serve none of a worker's."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from specdec_vllm.rows import RowSession


class PluginMetrics:
    """What was proposed, accepted and waited for."""

    def __init__(self, port: int | None) -> None:
        """Serve on `port` from now on; None: nowhere."""
        self.registry = registry = CollectorRegistry()
        self.proposed = Counter("specdec_vllm_proposed_tokens", "Tokens proposed to vLLM.", registry=registry)
        self.accepted = Counter("specdec_vllm_accepted_tokens", "Accepted ones of them.", registry=registry)
        self.rows = Counter(
            "specdec_vllm_rows", "Rows of steps, by whether they had a proposal.", ["proposed"], registry=registry
        )
        self.waited = Counter("specdec_vllm_wait_seconds", "Seconds that steps waited for drafts.", registry=registry)
        self.faults = Counter("specdec_vllm_faults", "Steps without proposals by a fault.", registry=registry)
        self.drafts_ready = Gauge("specdec_vllm_drafts_ready", "Drafts that can be used.", registry=registry)
        self.sessions = Gauge("specdec_vllm_sessions", "Requests that drafts may know.", registry=registry)
        if port is not None:
            start_http_server(port, registry=registry)

    def step(
        self, sessions: Sequence[RowSession], sampled: Sequence[Sequence[int]], proposals: Sequence[Sequence[int]]
    ) -> None:
        """A step committed `sampled` tokens of each row, and `proposals` are verified next."""
        for session, tokens, proposed in zip(sessions, sampled, proposals, strict=True):
            if tokens:
                # All tokens but the last were proposed.
                self.accepted.inc(min(session.num_proposed, len(tokens) - 1))
                self.proposed.inc(len(proposed))
                self.rows.labels("yes" if proposed else "no").inc()
            session.num_proposed = len(proposed)
