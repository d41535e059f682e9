"""One of several coordinator processes: `python -m specdec.coordinator.child_main INDEX`.

`CoordinatorProcess` starts it. It reads its instructions from standard input. It prints a line when it serves, and then
one a second. The argument is only for people who list processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
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
BEAT_LINE = b"beat\n"
BEAT_S = 1.0
"""Seconds between two lines that show that a serving process's event loop runs."""


class ChildInstructions(TypedDict):
    """The supervisor's instructions. Secrets are passed here, as others can read flags and environment."""

    index: int
    """Number of this process, from 0."""
    settings: dict[str, Any]
    """A CoordinatorSettings as JSON."""
    metrics_dir: str | None
    """Folder for its metrics, which the supervisor's page sums up; None: no disk has room for them."""
    parent_pid: int
    """The supervisor's process id: the process ends with it."""


def main() -> int:
    """Serve until a signal, the supervisor's end or a failure; returns the exit code."""
    instructions: ChildInstructions = json.load(sys.stdin)
    # Draining without a supervisor would keep the port from the next one.
    die_with_parent(instructions["parent_pid"], signal.SIGKILL)
    settings = CoordinatorSettings.model_validate(instructions["settings"])
    enable_multiprocess_metrics(instructions["metrics_dir"], str(instructions["index"]))
    setup_logging(f"coordinator-{instructions['index']}", settings.log_level, settings.log_format)
    gc.freeze()  # modules live for ever; collections, which pause all streams, need not walk them
    return asyncio.run(run_coordinator(settings, shares_port=True, on_serving=_tell_serving))


def _tell_serving() -> None:
    """Tell the supervisor that this process serves, and from now on that its event loop runs."""
    os.set_blocking(sys.stdout.fileno(), False)
    _beat(asyncio.get_running_loop(), SERVING_LINE)


def _beat(loop: asyncio.AbstractEventLoop, line: bytes = BEAT_LINE) -> None:
    with contextlib.suppress(BrokenPipeError, BlockingIOError):
        os.write(sys.stdout.fileno(), line)
    loop.call_later(BEAT_S, _beat, loop)


if __name__ == "__main__":
    sys.exit(main())
