"""One of several coordinator processes: `python -m specdec.coordinator.processes.child_main INDEX`.

Started by `CoordinatorProcess`. Reads its instructions from standard input, and says on standard output that it serves.
The argument is for people who list processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import Any, TypedDict

from specdec.config import CoordinatorSettings
from specdec.coordinator.service import run_coordinator
from specdec.service.process import die_with_parent
from specdec.telemetry import enable_multiprocess_metrics, setup_logging

SERVING_LINE = b"serving\n"


class ChildInstructions(TypedDict):
    """What the supervisor tells. Secrets go this way, and not by flags or environment, which others can read."""

    index: int
    """Which of the processes this is, from 0."""
    settings: dict[str, Any]
    """Of a CoordinatorSettings, as JSON has them."""
    metrics_dir: str
    """Where its counts go, which the supervisor's page sums up."""
    parent_pid: int
    """The supervisor's: the process ends with it."""


def main() -> int:
    """Serve until a signal, the supervisor's end or a failure; returns the exit code."""
    instructions: ChildInstructions = json.load(sys.stdin)
    # Draining without a supervisor would keep the port from the next one.
    die_with_parent(instructions["parent_pid"], signal.SIGKILL)
    settings = CoordinatorSettings.model_validate(instructions["settings"])
    enable_multiprocess_metrics(instructions["metrics_dir"], str(instructions["index"]))
    setup_logging(f"coordinator-{instructions['index']}", settings.log_level, settings.log_format)
    return asyncio.run(run_coordinator(settings, shares_port=True, on_serving=_tell_serving))


def _tell_serving() -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), SERVING_LINE)


if __name__ == "__main__":
    sys.exit(main())
