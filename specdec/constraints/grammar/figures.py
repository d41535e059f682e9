"""Counts of compiled and refused grammars, for metrics."""

from __future__ import annotations

import threading
from collections import Counter

from google.rpc import code_pb2

from specdec.constraints.grammar.failure import GrammarError

_REASONS = {code_pb2.RESOURCE_EXHAUSTED: "busy", code_pb2.INTERNAL: "fault"}


class GrammarFigures:
    """Running totals of one compiler. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compile_s: list[float] = []
        self.num_queries = 0
        """Constraints that sessions asked for."""
        self.num_hits = 0
        """Queries that found their grammar cached or already being compiled."""
        self.refusals: Counter[str] = Counter()
        """Sessions refused or ended for their constraint, by reason."""

    def asked(self, *, is_known: bool) -> None:
        """A constraint was looked up."""
        with self._lock:
            self.num_queries += 1
            self.num_hits += is_known

    def compiled(self, elapsed_s: float) -> None:
        """A compilation ended, with a grammar or an error, after `elapsed_s` seconds."""
        with self._lock:
            self._compile_s.append(elapsed_s)

    def refused(self, error: GrammarError) -> None:
        """A session was refused, or ended."""
        with self._lock:
            self.refusals[reason_of(error)] += 1

    def take_compile_s(self) -> list[float]:
        """Seconds of each compilation since the last call."""
        with self._lock:
            found, self._compile_s = self._compile_s, []
        return found


def reason_of(error: GrammarError) -> str:
    """One of invalid, too_complex, output (not allowed by the constraint), busy (queue full) and fault."""
    if error.code in _REASONS:
        return _REASONS[error.code]
    if error.field.startswith("open."):
        return "output"
    return "too_complex" if str(error).startswith(("is too ", "cannot be ")) else "invalid"
