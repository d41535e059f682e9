"""What a draft exports of its steps, commits and proposals."""

from __future__ import annotations

from specdec.engine.outputs import EngineStats, StepOutput
from specdec.grammar.compiler import GrammarCompiler
from specdec.telemetry import DraftMetrics
from specdec.v1 import common_pb2 as pb
from specdec.worker.engine_gauges import EngineGauges


class DraftRecorder:
    """Updates a draft's metrics; one call per step, one per commit, one per proposal."""

    def __init__(self, metrics: DraftMetrics) -> None:
        self._metrics = metrics
        self._engine = EngineGauges(metrics)

    def serves(self, identity: pb.ModelIdentity) -> None:
        """The model is loaded."""
        self._engine.serves(identity)

    def load(self, stats: EngineStats, num_sessions: int) -> None:
        """Gauges, a few times a second."""
        self._engine.observe(stats, num_sessions)

    def grammars(self, grammars: GrammarCompiler | None) -> None:
        """What was compiled, a few times a second."""
        if grammars is not None:
            self._engine.observe_grammars(grammars)

    def opened(self) -> None:
        """A session was opened."""
        self._metrics.opened.inc()

    def closed(self) -> None:
        """A session ended."""
        self._metrics.requests.labels("closed").inc()

    def step(self, output: StepOutput, num_drafted: int, elapsed_s: float) -> None:
        """One step of the engine, which drafted this many tokens; `elapsed_s` for each token of a path."""
        self._engine.observe_step(output, "draft" if num_drafted else "prefill", elapsed_s)
        self._metrics.drafted_tokens.inc(num_drafted)

    def commit(self, num_found: int, num_new: int, num_dropped: int) -> None:
        """A commit of `num_new` tokens of which the chain held `num_found`; `num_dropped` of it were wrong."""
        self._metrics.committed_tokens.labels("found").inc(num_found)
        self._metrics.committed_tokens.labels("missing").inc(num_new - num_found)
        if num_dropped:
            self._metrics.rollback_tokens.observe(num_dropped)

    def stale_commit(self) -> None:
        """A commit told nothing new."""
        self._metrics.stale_proposals.inc()

    def commit_handled(self, elapsed_s: float) -> None:
        """A commit was followed, whatever it told."""
        self._metrics.loop_seconds.observe(elapsed_s)

    def mismatch(self) -> None:
        """A commit left a gap, or contradicted an earlier one."""
        self._metrics.mismatches.inc()

    def proposal(self, num_tokens: int, num_new: int, waited_s: float | None) -> None:
        """A proposal left; `waited_s` after the commit that it is the first answer to."""
        self._metrics.proposals.inc()
        self._metrics.tokens.labels("main").inc(num_new)
        self._metrics.proposal_tokens.observe(num_tokens)
        if waited_s is not None:
            self._metrics.draft_seconds.observe(waited_s)
