"""Starts and ends the processes of a machine's ranks."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Literal

import structlog

from specdec.replica.ranks.rank_child import RankInstructions
from specdec.service.process import import_path

_PASSED: tuple[Literal["socket_fd", "store_fd", "pulse_fd"], ...] = ("socket_fd", "store_fd", "pulse_fd")
_LAUNCHER_ONLY = ("PROMETHEUS_MULTIPROC_DIR",)  # metrics are rank 0's


class RankProcesses:
    """The ranks that this process has started. They end with the thread that starts them."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, instructions: RankInstructions) -> subprocess.Popen[bytes]:
        """Start a rank."""
        environment = {**os.environ, "PYTHONPATH": import_path()}
        for name in _LAUNCHER_ONLY:
            environment.pop(name, None)
        process = subprocess.Popen(
            [sys.executable, "-m", "specdec.replica.ranks.rank_child"],
            stdin=subprocess.PIPE,
            pass_fds=[fd for fd in (instructions[each] for each in _PASSED) if fd is not None],
            env=environment,
        )
        self._processes.append(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
            stdin.write(json.dumps(instructions).encode())
        log = structlog.get_logger(__name__)
        log.info("rank_started", rank=instructions["rank"], pid=process.pid, cores=instructions["cores"])
        return process

    def stop(self, wait_s: float) -> None:
        """Wait for the ranks, and kill those that do not end in time."""
        deadline_s = time.monotonic() + wait_s
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def share_cores(cores: Sequence[int], count: int) -> list[tuple[int, ...]] | None:
    """Divide cores into ``count`` runs of nearly equal length; None if there are fewer cores."""
    if len(cores) < count:
        return None
    bounds = [len(cores) * number // count for number in range(count + 1)]
    return [tuple(cores[low:high]) for low, high in itertools.pairwise(bounds)]
