"""Metrics of a draft's steps, commits and proposals."""

from __future__ import annotations

from specdec.constraints.grammar.compiler import GrammarCompiler
from specdec.engine.engine import Engine
from specdec.engine.outputs import EngineStats, StepOutput
from specdec.replica.worker.engine_gauges import EngineGauges
from specdec.telemetry import DraftMetrics, Tallies
from specdec.v1 import common_pb2 as pb
from specdec.wire.message_sizes import microseconds


class DraftRecorder:
    """Updates a draft's metrics, with one call per step, commit and proposal.

    Counts of commits and proposals are written with the next step or with the gauges.
    """

    def __init__(self, metrics: DraftMetrics) -> None:
        self._metrics = metrics
        self._engine = EngineGauges(metrics)
        self._tallies = Tallies()
        self._found = metrics.committed_tokens.labels("found")
        self._missing = metrics.committed_tokens.labels("missing")
        self._main_tokens = metrics.tokens.labels("main")

    def serves(self, identity: pb.ModelIdentity) -> None:
        """Export the loaded model's info."""
        self._engine.serves(identity)

    def load(self, stats: EngineStats, num_sessions: int) -> None:
        """Export the gauges; called a few times a second."""
        self._tallies.write()
        self._engine.observe(stats, num_sessions)

    def grammars(self, grammars: GrammarCompiler | None) -> None:
        """Export the compiler's counts; called a few times a second."""
        if grammars is not None:
            self._engine.observe_grammars(grammars)

    def opened(self) -> None:
        """A session was opened."""
        self._metrics.opened.inc()

    def closed(self) -> None:
        """A session ended."""
        self._metrics.requests.labels("closed").inc()

    def step(self, output: StepOutput, num_drafted: int, elapsed_s: float) -> None:
        """A step of the engine drafted `num_drafted` tokens; `elapsed_s` per token of a path."""
        self._engine.observe_step(output, "draft" if num_drafted else "prefill", elapsed_s, self._tallies)
        self._tallies.count(self._metrics.drafted_tokens, num_drafted)
        self._tallies.write()

    def commit(self, num_found: int, num_new: int, num_dropped: int) -> None:
        """A commit of `num_new` tokens, of which the tree held `num_found`; it lost `num_dropped` nodes."""
        self._tallies.count(self._found, num_found)
        self._tallies.count(self._missing, num_new - num_found)
        if num_dropped:
            self._tallies.observe(self._metrics.rollback_tokens, num_dropped)

    def stale_commit(self) -> None:
        """A commit had no new tokens."""
        self._metrics.stale_proposals.inc()

    def commit_handled(self, elapsed_s: float) -> None:
        """A commit was handled."""
        self._tallies.observe(self._metrics.loop_seconds, elapsed_s)

    def mismatch(self) -> None:
        """A commit left a gap, or contradicted an earlier one."""
        self._metrics.mismatches.inc()

    def proposal(self, num_tokens: int, num_new: int, waited_s: float | None) -> None:
        """A proposal was sent. `waited_s`: seconds since the commit, if this is the first answer to it."""
        self._tallies.count(self._metrics.proposals)
        self._tallies.count(self._main_tokens, num_new)
        self._tallies.observe(self._metrics.proposal_tokens, num_tokens)
        if waited_s is not None:
            self._tallies.observe(self._metrics.draft_seconds, waited_s)


def load_report(engine: Engine, num_sessions: int, max_sessions: int, step_s: float) -> pb.LoadReport:
    """A draft's load; `step_s`: seconds of its last step."""
    stats = engine.stats()
    return pb.LoadReport(
        num_running=stats.running,
        num_waiting=stats.waiting,
        kv_blocks_used=stats.blocks_used,
        kv_blocks_total=stats.blocks_total,
        num_sessions=num_sessions,
        max_sessions=max_sessions,
        num_waiting_tokens=engine.num_waiting_tokens(),
        step_us=microseconds(step_s),
    )
