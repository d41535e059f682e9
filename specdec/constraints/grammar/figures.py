"""What compiling grammars took and came to: counted by whoever knows it, and read by whoever exports it."""

from __future__ import annotations

import threading
from collections import Counter

from google.rpc import code_pb2

from specdec.constraints.grammar.failure import GrammarError

_REASONS = {code_pb2.RESOURCE_EXHAUSTED: "busy", code_pb2.INTERNAL: "fault"}


class GrammarFigures:
    """Running totals of one compiler. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._compile_s: list[float] = []
        self.num_queries = 0
        """Constraints asked for."""
        self.num_hits = 0
        """Of these, those that had been asked for before and are kept; grammars that are still compiled, too."""
        self.refusals: Counter[str] = Counter()
        """Sessions refused or ended for their constraint, by reason."""

    def asked(self, *, is_known: bool) -> None:
        """A constraint was looked up."""
        with self._lock:
            self.num_queries += 1
            self.num_hits += is_known

    def compiled(self, elapsed_s: float) -> None:
        """A grammar was compiled, or was found not to be one, in this time."""
        with self._lock:
            self._compile_s.append(elapsed_s)

    def refused(self, error: GrammarError) -> None:
        """A session was refused, or ended."""
        with self._lock:
            self.refusals[reason_of(error)] += 1

    def take_compile_s(self) -> list[float]:
        """Times of what was compiled since the last call."""
        with self._lock:
            found, self._compile_s = self._compile_s, []
        return found


def reason_of(error: GrammarError) -> str:
    """invalid, too_complex (it would take too much), output (not what it allows), busy (others wait), or fault."""
    if error.code in _REASONS:
        return _REASONS[error.code]
    if error.field.startswith("open."):
        return "output"
    return "too_complex" if str(error).startswith(("is too ", "cannot be ")) else "invalid"
