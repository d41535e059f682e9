"""Turn events into metrics; label children are looked up once, not per token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prometheus_client import Counter

from specdec.coordinator.links.link_events import LinkState
from specdec.coordinator.links.replica_link import ReplicaLink
from specdec.coordinator.sessions.session import Request, Session
from specdec.store.guarded import OperationObserver, StateObserver
from specdec.telemetry import CoordinatorMetrics, CoordinatorPickerMetrics
from specdec.telemetry.coordinator_metrics import FALLBACK_CAUSES
from specdec.v1 import common_pb2 as pb

_JOURNAL_OPERATIONS = frozenset({"begin", "append", "renew", "end", "load", "abort"})
_ROLES = ("target", "draft")


class Observer:
    """All of the coordinator's metrics are updated here."""

    def __init__(self, metrics: CoordinatorMetrics, picker: CoordinatorPickerMetrics | None = None) -> None:
        self.metrics = metrics
        self._picker = picker
        names = {value: name.removeprefix("ORIGIN_").lower() for name, value in pb.Origin.items() if value}
        self._tokens = {value: metrics.tokens.labels(name) for value, name in names.items()}
        self._verify, self._plain, self._prefill = (
            metrics.steps.labels(kind) for kind in ("verify", "plain", "prefill")
        )
        self._turn = _Turn()
        self._proposed = _Depths(metrics.proposed_tokens)
        self._accepted = _Depths(metrics.accepted_tokens)
        self._links: Sequence[ReplicaLink] = ()
        self._relayed_s: dict[str, float] = {}
        """Monotonic time of the first proposal relayed since the last verdict, by session id."""

    def first_token(self, request: Request, now_s: float) -> None:
        """A request has its first output."""
        self.metrics.ttft_seconds.observe(now_s - request.arrived_s)

    def tokens(self, origins: Sequence[pb.Origin.ValueType], now_s: float, previous_s: float | None) -> None:
        """Tokens of a choice go out at `now_s`; those before went at `previous_s`."""
        for origin in origins:
            self._turn.inc(self._tokens.get(origin) or self.metrics.tokens.labels("unspecified"))
        if previous_s is not None:
            interval_s = (now_s - previous_s) / len(origins)
            for _ in origins:
                self.metrics.inter_token_seconds.observe(interval_s)

    def verdict(self, session: Session, verdict: pb.Verdict, num_kept: int, is_first: bool, now_s: float) -> None:
        """A target step reported its verdict."""
        metrics, turn = self.metrics, self._turn
        relayed_s = self._relayed_s.pop(session.session_id, None)
        verified = verdict.verified_by_depth
        if verified:
            turn.inc(self._verify)
            self._proposed.add(sum(num > 0 for num in verified), turn)
            self._accepted.add(min(verdict.num_accepted, num_kept), turn)
            if relayed_s is not None:
                metrics.verify_latency_seconds.observe(now_s - relayed_s)
        else:
            turn.inc(self._prefill if is_first else self._plain)
        if is_first:
            self._count_sessions()
        if verdict.hit:
            turn.inc(metrics.hits)
        if verdict.num_wasted:
            metrics.wasted_tokens.inc(verdict.num_wasted)
        if verdict.num_cached_tokens:
            metrics.cached_tokens.inc(verdict.num_cached_tokens)

    def proposal(self, session: Session, now_s: float, answer_s: float | None, *, is_direct: bool) -> None:
        """A draft proposed, `answer_s` after a commit that waited for it; None: no commit waited."""
        if answer_s is not None:
            self.metrics.draft_latency_seconds.labels("direct" if is_direct else "relayed").observe(answer_s)
        if not is_direct:
            self._relayed_s.setdefault(session.session_id, now_s)

    def linked(self, draft: str, session: Session, state: pb.LinkState) -> None:
        """A draft has joined a session at its target, or has left it there, or cannot join it."""
        self.metrics.link_changes.labels("joined" if state.is_direct else "left").inc()

    def draft_dropped(self, cause: str) -> None:
        """A session goes on without its draft, for a time or for good."""
        self.metrics.draft_fallbacks.labels(cause if cause in FALLBACK_CAUSES else "other").inc()

    def draft_hedged(self, num_open: int) -> None:
        """A session is opened at a second draft; `num_open` sessions have one now."""
        self.metrics.draft_hedges.inc()
        self.metrics.draft_hedges_open.set(num_open)

    def draft_hedge_ended(self, num_open: int, *, is_won: bool) -> None:
        """A session has one draft again: the second one if `is_won`."""
        if is_won:
            self.metrics.draft_hedges_won.inc()
        self.metrics.draft_hedges_open.set(num_open)

    def session_reopened(self, role: str) -> None:
        """A session is opened again at a replica, the same or another one."""
        self.metrics.session_reopens.labels(role).inc()

    def stream_reconnected(self, role: str) -> None:
        """A stream to a replica is up again."""
        self.metrics.stream_reconnects.labels(role).inc()

    def mismatch(self) -> None:
        """A verdict did not continue the delivered tokens."""
        self.metrics.mismatches.inc()

    def session_ended(self, session: Session) -> None:
        """A choice ended, with or without an error."""
        self._relayed_s.pop(session.session_id, None)
        self.metrics.outside_seconds.observe(session.tally.to_proto().outside_ms / 1e3)

    def request_ended(self, outcome: str, duration_s: float | None) -> None:
        """A stream ended; the outcome is a gRPC code's name.

        `duration_s` is None for a refused request, whose short time would distort the distribution.
        """
        self.metrics.requests.labels(outcome).inc()
        if duration_s is not None:
            self.metrics.e2e_seconds.observe(duration_s)
        self._count_sessions()

    def replicas(self, links: Sequence[ReplicaLink]) -> None:
        """Replicas changed their states."""
        for role in _ROLES:
            of_role = [link for link in links if link.role == role]
            for state in LinkState:
                self.metrics.replicas.labels(role, str(state)).set(sum(link.state is state for link in of_role))
        self._links = links
        self._count_sessions()

    def admission(self, num_running: int, num_waiting: int) -> None:
        """The numbers of running and waiting requests changed."""
        self.metrics.running.set(num_running)
        self.metrics.queue_length.set(num_waiting)
        if self._picker is not None:
            self._picker.running.set(num_running)
            self._picker.waiting.set(num_waiting)

    def target_load(self, targets: Sequence[ReplicaLink]) -> None:
        """A target reported its load."""
        if self._picker is None:
            return
        loads = [link.load for link in targets if link.load is not None]
        num_blocks = sum(load.kv_blocks_total for load in loads)
        num_used = sum(load.kv_blocks_used for load in loads)
        self._picker.kv_use.set(num_used / num_blocks if num_blocks else 0.0)

    def of_store(self, is_shared: bool) -> tuple[OperationObserver | None, StateObserver | None]:
        """Callbacks for the store's operations and state; none for a store in this process, which never fails."""
        self.metrics.store_up.set(1)
        return (self.store_operation, self.store_changed) if is_shared else (None, None)

    def store_operation(self, operation: str, seconds: float, is_ok: bool) -> None:
        """An operation of the shared store ended or failed."""
        metrics = self.metrics
        metrics.store_operation_seconds.labels(operation).observe(seconds)
        if not is_ok:
            metrics.store_errors.labels(operation).inc()
        if operation in _JOURNAL_OPERATIONS:
            metrics.journal_seconds.observe(seconds)
            if not is_ok:
                metrics.journal_errors.inc()

    def store_changed(self, is_up: bool) -> None:
        """The shared store went down or came back."""
        self.metrics.store_up.set(is_up)

    def _count_sessions(self) -> None:
        for role in _ROLES:
            self.metrics.sessions.labels(role).set(sum(len(link.sessions) for link in self._links if link.role == role))


class _Turn:
    """Counts of one turn of the event loop; the counters, which have locks, are updated once at its end."""

    def __init__(self) -> None:
        self._counts: dict[Counter, int] = {}

    def inc(self, counter: Counter) -> None:
        """Count one more."""
        counts = self._counts
        if not counts:
            asyncio.get_running_loop().call_soon(self._flush)
        counts[counter] = counts.get(counter, 0) + 1

    def _flush(self) -> None:
        for counter, count in self._counts.items():
            counter.inc(count)
        self._counts.clear()


class _Depths:
    """A counter's children by depth, each made once."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._children: list[Counter] = []

    def add(self, depth: int, turn: _Turn) -> None:
        """Count depths 1 to `depth`."""
        while len(self._children) < depth:
            self._children.append(self._counter.labels(str(len(self._children) + 1)))
        for child in self._children[:depth]:
            turn.inc(child)
