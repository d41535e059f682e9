"""Checks in a separate process that a grammar compiles within bounds: compiling may kill the process."""

from __future__ import annotations

from specdec.constraints.grammar.line_process import ChildLost, LineProcess
from specdec.constraints.grammar.source import TokenizerArguments

_CHILD = "specdec.constraints.grammar.checker_child"


class GrammarChecker:
    """One checking process, started at the first question and after it has died or hung. For one thread, which outlives
    it.

    Cost: starting takes as long as Python and the tokenizer (0.1 s and more); a question takes 2 ms plus the
    compilation.
    """

    def __init__(self, tokenizer: TokenizerArguments) -> None:
        self._tokenizer = tokenizer
        self.process: LineProcess | None = None

    def check(self, text: str) -> tuple[str, int]:
        """The error text for a client, empty if the grammar compiles, and the bytes that compiling took."""
        for _ in range(2):
            if self.process is None:
                self.process = LineProcess(_CHILD, {"tokenizer": self._tokenizer})
            try:
                answer = self.process.ask(text)
                return str(answer["error"]), int(answer["num_bytes"])
            except ChildLost:
                self.process = None
        return "cannot be checked: the checking process died", 0

    def close(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is not None:
            process.close()
