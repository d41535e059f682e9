"""Checks in a separate process that a grammar compiles within bounds: compiling may kill the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from specdec.constraints.grammar.source import TokenizerArguments

_CHILD = "specdec.constraints.grammar.checker_child"


class GrammarChecker:
    """One checking process, started at the first question and after each death. For one thread, which outlives it.

    Cost: starting takes as long as Python and the tokenizer (0.1 s and more); a question takes 2 ms plus the
    compilation.
    """

    def __init__(self, tokenizer: TokenizerArguments) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[str] | None = None

    def fault_of(self, text: str) -> str:
        """The error text for a client; empty if the grammar compiles."""
        for _ in range(2):
            process = self._started()
            try:
                answer = self._ask(process, text)
            except OSError:
                answer = ""
            if answer:
                return str(json.loads(answer)["error"])
            self.close()
        return "cannot be checked: the checking process died"

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._write(self._process, {"parent_pid": os.getpid(), "tokenizer": self._tokenizer})
        return self._process

    def _ask(self, process: subprocess.Popen[str], text: str) -> str:
        self._write(process, text)
        assert process.stdout is not None
        return process.stdout.readline()

    @staticmethod
    def _write(process: subprocess.Popen[str], value: object) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(value) + "\n")
        process.stdin.flush()
