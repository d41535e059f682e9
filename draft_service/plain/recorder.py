"""Metrics of a draft without a model."""

from __future__ import annotations

from specdec.drafting.endpoints.ledger import Ledger
from specdec.telemetry import DraftMetrics
from specdec.v1 import common_pb2 as pb

_DIGEST_DIGITS = 12


class PlainRecorder:
    """Updates a draft's metrics, except those of steps, caches and grammars."""

    def __init__(self, metrics: DraftMetrics) -> None:
        self._metrics = metrics
        self._spent = (0, 0, 0.0)

    def serves(self, identity: pb.ModelIdentity) -> None:
        """Export the model's info, once the target has answered."""
        self._metrics.info.labels(
            model=identity.name,
            numerics_id="",
            device="",
            dtype="",
            tokenizer=identity.tokenizer_digest[:_DIGEST_DIGITS],
        ).set(1)

    def opened(self) -> None:
        """A session was opened."""
        self._metrics.opened.inc()

    def closed(self) -> None:
        """A session ended."""
        self._metrics.requests.labels("closed").inc()

    def load(self, num_sessions: int, ledger: Ledger | None) -> None:
        """Export the number of sessions and what the endpoint has spent since the last call."""
        metrics = self._metrics
        metrics.sessions.set(num_sessions)
        if ledger is None:
            return
        spent, before = ledger.spent, self._spent
        self._spent = spent.num_prompt_tokens, spent.num_completion_tokens, spent.cost
        metrics.api_tokens.labels("prompt").inc(self._spent[0] - before[0])
        metrics.api_tokens.labels("completion").inc(self._spent[1] - before[1])
        metrics.api_cost.inc(max(0.0, self._spent[2] - before[2]))

    def mismatch(self) -> None:
        """A commit left a gap, or contradicted an earlier one."""
        self._metrics.mismatches.inc()

    def offered(self, drafter: str, num_nodes: int) -> None:
        """A drafter offered a tree."""
        self._metrics.drafter_offered.labels(drafter).inc(num_nodes)

    def dropped(self, drafter: str) -> None:
        """A drafter failed and was dropped."""
        self._metrics.drafters_dropped.labels(drafter).inc()

    def api_fault(self, kind: str) -> None:
        """A call of an endpoint failed. Thread-safe."""
        self._metrics.api_faults.labels(kind).inc()

    def proposal(self, num_nodes: int, waited_s: float | None) -> None:
        """A proposal was sent. `waited_s`: seconds since the commit, if this is the first answer to it."""
        self._metrics.proposals.inc()
        self._metrics.proposal_tokens.observe(num_nodes)
        if waited_s is not None:
            self._metrics.draft_seconds.observe(waited_s)
