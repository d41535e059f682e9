"""A child process that answers questions, one JSON line each, and is killed when it hangs or takes too much."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_HUNG_S = 10.0
"""Seconds without an answer and without processor time of the child after which it counts as hung. A child of the
lowest priority on a full machine gets some milliseconds in that time."""
_LOOK_S = 0.25
"""Seconds between two looks at the child's processor time."""
_READ_BYTES = 1 << 16
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class ChildLost(Exception):
    """The child has died, has hung, or has taken too much; its state is lost."""


class TookTooMuch(ChildLost):
    """The child has taken too much processor time."""


class LineProcess:
    """One child, `python -m MODULE`, which first reads a line with `greeting` and its parent's number. For one thread,
    which outlives it: the child dies with the thread."""

    def __init__(self, module: str, greeting: dict[str, Any], *, hung_s: float = _HUNG_S) -> None:
        self._hung_s = hung_s
        self._process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        self._unsent = _line({"parent_pid": os.getpid(), **greeting})

    @property
    def pid(self) -> int:
        """The child's process number."""
        return self._process.pid

    def ask(self, question: object, most_cpu_s: float = float("inf")) -> Any:
        """The child's answer to one question.

        Args:
            question: any JSON value.
            most_cpu_s: seconds of the child's processor time, at most.

        Raises:
            ChildLost: there is no answer; the child is dead now.
        """
        self._unsent += _line(question)
        answer = b""
        began_cpu_s = seen_cpu_s = self._cpu_s()
        active_at_s = time.monotonic()
        while not answer.endswith(b"\n"):
            readable, writable, _ = select.select([self._stdout], [self._stdin] if self._unsent else [], [], _LOOK_S)
            try:
                if writable:
                    self._unsent = self._unsent[os.write(self._stdin, self._unsent[:_READ_BYTES]) :]
                piece = os.read(self._stdout, _READ_BYTES) if readable else None
            except BlockingIOError:
                continue
            except OSError:
                piece = b""
            if piece == b"":
                self._lose("the process died")
            answer += piece or b""
            cpu_s = self._cpu_s()
            if cpu_s > seen_cpu_s or piece or writable:
                seen_cpu_s, active_at_s = cpu_s, time.monotonic()
            if cpu_s - began_cpu_s > most_cpu_s:
                self._lose(f"it took more than {most_cpu_s:.1f} s of processor time", TookTooMuch)
            if time.monotonic() - active_at_s > self._hung_s:
                self._lose(f"the process hung for {self._hung_s:.0f} s")
        return json.loads(answer)

    def close(self) -> None:
        """End the child."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def _lose(self, reason: str, kind: type[ChildLost] = ChildLost) -> None:
        self.close()
        raise kind(reason)

    def _cpu_s(self) -> float:
        """Seconds of processor time of the child and of the children that it has waited for."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return 0.0
        return sum(map(int, text.rpartition(")")[2].split()[11:15])) * _TICK_S


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"
