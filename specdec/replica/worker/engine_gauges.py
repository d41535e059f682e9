"""Export an engine's totals and gauges as metrics."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

from specdec.constraints.grammar.compiler import GrammarCompiler
from specdec.engine.outputs import EngineStats, StepOutput
from specdec.telemetry import DraftMetrics, Tallies, TargetMetrics
from specdec.v1 import common_pb2 as pb

_DIGEST_DIGITS = 12


class EngineGauges:
    """Turns snapshots of EngineStats into gauges, and their growth into counters."""

    def __init__(self, metrics: TargetMetrics | DraftMetrics) -> None:
        self._metrics = metrics
        self._last: dict[str, int] = {}
        self._of_kind: dict[str, tuple[Counter, Histogram]] = {}
        """Series by kind of step, looked up once."""

    def serves(self, identity: pb.ModelIdentity) -> None:
        """Export the loaded model's identity."""
        self._metrics.info.labels(
            model=identity.name,
            numerics_id=identity.numerics_id,
            device=identity.device,
            dtype=identity.dtype,
            tokenizer=identity.tokenizer_digest[:_DIGEST_DIGITS],
        ).set(1)

    def observe(self, stats: EngineStats, num_sessions: int) -> None:
        """Export a snapshot. Cost: some ten metric updates."""
        metrics = self._metrics
        metrics.sessions.set(num_sessions)
        metrics.running.set(stats.running)
        metrics.queue_length.set(stats.waiting)
        metrics.kv_blocks_used.set(stats.blocks_used)
        metrics.kv_blocks_cached.set(stats.blocks_cached)
        metrics.kv_blocks.set(stats.blocks_total)
        self._count(metrics.prefix_cache_queries, "queries", stats.prefix_query_tokens)
        self._count(metrics.prefix_cache_hits, "hits", stats.prefix_hit_tokens)
        self._count(metrics.preemptions, "preemptions", stats.preemptions)
        self._count(metrics.rollbacks, "rollbacks", stats.rollbacks)
        metrics.captured_graphs.set(stats.num_graphs)
        self._count(metrics.memory_faults, "memory faults", stats.memory_faults)

    def observe_grammars(self, grammars: GrammarCompiler) -> None:
        """Export the compilations and cache queries since the last call."""
        metrics, figures = self._metrics, grammars.figures
        metrics.grammars_cached.set(grammars.num_cached)
        for elapsed_s in figures.take_compile_s():
            metrics.grammar_compile_seconds.observe(elapsed_s)
        self._count(metrics.grammar_cache_queries, "grammar queries", figures.num_queries)
        self._count(metrics.grammar_cache_hits, "grammar hits", figures.num_hits)
        for reason, total in list(figures.refusals.items()):
            self._count(metrics.grammar_refusals.labels(reason), f"refusals {reason}", total)

    def observe_step(self, output: StepOutput, kind: str, elapsed_s: float, tallies: Tallies) -> None:
        """Count one step in `tallies`."""
        metrics = self._metrics
        if (of_kind := self._of_kind.get(kind)) is None:
            of_kind = self._of_kind[kind] = metrics.steps.labels(kind), metrics.step_seconds.labels(kind)
        tallies.count(of_kind[0])
        tallies.observe(of_kind[1], elapsed_s)
        tallies.observe(metrics.step_tokens, output.num_tokens)
        tallies.observe(metrics.step_sequences, len(output.items))

    def _count(self, counter: Counter, name: str, total: int) -> None:
        counter.inc(total - self._last.get(name, 0))
        self._last[name] = total
