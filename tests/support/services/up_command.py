"""`specdec up` as a process, with its output and its services."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from specdec.commands.up import service_process
from tests.support.services.tiny_pair import ModelPair

PATIENCE_S = 120.0


class UpCommand:
    """A running `specdec up`, whose output a thread reads, so that it never waits for the test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._has_new = threading.Condition()
        self._has_ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._has_new:
                self.lines.append(line.rstrip("\n"))
                self._has_new.notify_all()
        with self._has_new:
            self._has_ended = True
            self._has_new.notify_all()

    def wait_line(self, text: str, after: int = 0) -> str:
        """Wait for the first line with a text, from line number `after` on; returns it."""
        ends_s = time.monotonic() + PATIENCE_S
        with self._has_new:
            while True:
                found = next((line for line in self.lines[after:] if text in line), None)
                if found is not None:
                    return found
                left_s = ends_s - time.monotonic()
                assert left_s > 0, f"no line with {text!r}: {self.lines}"
                assert not self._has_ended, f"it ended without a line with {text!r}: {self.lines}"
                self._has_new.wait(left_s)

    def wait_end(self) -> int:
        """Wait for the end; returns the exit code, and `lines` has the whole output."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    @property
    def address(self) -> str:
        """Address of the coordinator."""
        return self.wait_line("Ready at").split()[2].rstrip(".")

    def children(self) -> list[psutil.Process]:
        """All descendants of the process."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def service(self, module: str) -> psutil.Process:
        """The process of a service, by its module."""
        (found,) = (child for child in psutil.Process(self.process.pid).children() if module in _command_line(child))
        return found


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # it has ended, and may be a zombie
        return []


def start_command(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start `specdec` with pipes of texts, forked from a template where there is one, as are its services."""
    # Tests in the background of a shell ignore SIGINT, and children would inherit that.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        maker: Any = service_process  # whose subprocess the fork server replaces
        started: subprocess.Popen[str] = maker.subprocess.Popen(
            [sys.executable, "-m", "specdec.commands.main", *arguments], stderr=subprocess.PIPE, text=True, **options
        )
        return started
    finally:
        signal.signal(signal.SIGINT, inherited)


@contextmanager
def running_up(
    pair: ModelPair, more: Sequence[str] = (), variables: Mapping[str, str] | None = None, *, gateway: bool = False
) -> Iterator[UpCommand]:
    """Run `specdec up`, with a gateway if `gateway`; yields it once it is ready."""
    more = more if gateway else (*more, "--no-gateway")
    arguments = ["up", "--target", str(pair.target), "--draft", str(pair.draft), "--device", "cpu", "--free-ports"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "SPECDEC_UP_PLACEMENT": "apart", **(variables or {})}
    started = start_command(*arguments, *more, env=environment)
    up = UpCommand(started)
    try:
        up.wait_line("Ready at")
        yield up
    finally:
        started.kill()
        up.wait_end()
