"""One service as a child process, with its log."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil

MODULES = {
    "target": "specdec.target_service",
    "draft": "specdec.draft_service",
    "coordinator": "specdec.coordinator",
    "gateway": "specdec.gateway",
}
_END_LINES = 50
"""Lines at the log's end among which the error that ended a service is looked for."""
_END_BYTES = 1 << 18
"""Bytes at the log's end in which these lines are."""
_ERROR = re.compile(r"\[(error|critical) *\]|\"level\": ?\"(error|critical)\"|^[\w.]*(Error|Exception)\b")
"""An error in either log format, or the last line of a traceback."""
_WARNING = re.compile(r"\[warning *\]|\"level\": ?\"warning\"")
"""A warning in either log format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """Command line, variables and cores of a service."""

    name: str
    """Name in messages and of the log, for example target or target-1."""
    role: str
    """target, draft, coordinator or gateway."""
    module: str
    """The module that `python -m` runs."""
    address: str
    """host:port of its server."""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beyond this process's environment."""
    cores: tuple[int, ...] = ()
    """Cores of the process; empty: all."""
    gpus: tuple[int, ...] = ()
    """Numbers of its GPUs."""
    speaks_http: bool = False
    """Whether health is asked at /health instead of over gRPC."""


class ServiceProcess:
    """A service's process. It dies with the thread that called `start`."""

    def __init__(self, spec: ServiceSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        self.told_to_end = False
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start_bytes = 0
        """Position in the log at the last start."""

    def start(self) -> None:
        """Start it in its own session, which a terminal's Ctrl-C does not reach; append to its log."""
        command = [sys.executable, "-m", "specdec.service.process", str(os.getpid())]
        command += [",".join(map(str, self.spec.cores)), self.spec.module, *self.spec.arguments]
        with self._open_log() as log:
            self._log_start_bytes = log.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.spec.environment},
                start_new_session=True,
            )
        self.told_to_end = False  # Not before: another thread may still read it for the previous process.

    def _open_log(self) -> BinaryIO:
        """Its log, or nothing to write to: a service that runs without a log is better than none."""
        try:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)  # cleaners of TMPDIR remove it after days
            return self.log_path.open("ab")
        except OSError:
            return open(os.devnull, "ab")

    @property
    def pid(self) -> int | None:
        """Its process id, once started."""
        return self._process.pid if self._process else None

    @property
    def exit_code(self) -> int | None:
        """Its exit code (negative: killed by that signal), or None while it runs or was never started."""
        return self._process.poll() if self._process else None

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def describe_end(self) -> str:
        """Return how it ended, such as `was killed by SIGKILL`; it must have ended."""
        code = self.exit_code
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"

    def terminate(self) -> None:
        """Ask it to drain and leave."""
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        """Send a signal to its process, not to its children; no-op after its end."""
        if self._process is not None and self._process.poll() is None:
            self.told_to_end |= number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it and its children; return when it has ended."""
        if self._process is None:
            return
        self.told_to_end = True
        group = self._process.pid
        # The number of a service that has ended may be another process's since, unless its children still have it.
        if self._process.poll() is None or not psutil.pid_exists(group):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        self._process.wait()

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it ended in time."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_error_line(self, *, or_warning: bool = False) -> str:
        """Return the last error (or warning) that it logged near the end since its start, else the last line, or ""."""
        try:
            with self.log_path.open("rb") as log:
                end_bytes = log.seek(0, os.SEEK_END)
                start_bytes = self._log_start_bytes if self._log_start_bytes <= end_bytes else 0  # it was emptied
                log.seek(max(start_bytes, end_bytes - _END_BYTES))
                lines = log.read(_END_BYTES).decode("utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        lines = [line.strip() for line in lines[-_END_LINES:] if line.strip()]
        errors = [line for line in lines if _ERROR.search(line) or (or_warning and _WARNING.search(line))]
        return (errors or lines or [""])[-1]

    def last_log_lines(self, count: int = 15) -> Sequence[str]:
        """Return the end of its log."""
        try:
            return self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
        except OSError:
            return []
