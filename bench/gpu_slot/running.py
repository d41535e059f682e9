"""A step as a process of its own: what it finds is seen as it finds it, and what it has started ends with it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_MOST_OUTPUT = 4000
_POLL_S = 1.0
_LEAVING_S = 5.0
"""For a step that was killed to be gone; one that the driver holds may never be."""
_MARK = "SPECDEC_SLOT_STEP"
_MOST_ROUNDS = 10

Written = dict[str, Any]
"""What a step has written: ``found``, and ``gpu``, its name."""


def run_process(
    name: str,
    timeout_s: float,
    dry: bool,
    environment: Mapping[str, str],
    on_written: Callable[[Written], None] = lambda written: None,
) -> dict[str, Any]:
    """Run one step as a process; whatever happens to it is a result.

    Args:
        name: of the step.
        timeout_s: then it is killed.
        dry: as ``steps`` takes it.
        environment: of the step.
        on_written: gets what the step has written so far, whenever that is something else.
    """
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "bench.gpu_slot.steps", name, "--out", str(file), *(["--dry"] if dry else [])]
        # To a file, and not to a pipe, whose end whatever a step has left behind would keep open.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env={**environment, _MARK: mark},
        )  # fmt: skip
        status = _waited(process, timeout_s, file, on_written)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        end_left_behind(mark)  # services are in sessions of their own, and would keep the GPU's memory
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVING_S)
        log.seek(max(0, log.seek(0, os.SEEK_END) - _MOST_OUTPUT))
        output = log.read().decode(errors="replace")
        written = _read(file) or {"found": None}
    result: dict[str, Any] = {"status": status, **written}
    if status != "ok":
        result["output"] = output
    return result


def _waited(
    process: subprocess.Popen[bytes], timeout_s: float, file: Path, on_written: Callable[[Written], None]
) -> str:
    """The status of a step at its end, or when its time is up."""
    end_s, told = time.monotonic() + timeout_s, None
    while (left_s := end_s - time.monotonic()) > 0:
        try:
            return "ok" if process.wait(min(left_s, _POLL_S)) == 0 else "failed"
        except subprocess.TimeoutExpired:
            written = _read(file)
            if written is not None and written != told:
                told = written
                on_written(written)
    return "timeout"


def end_left_behind(mark: str = "") -> None:
    """Kill every process of a step, and what these start meanwhile; of any step, if none is named."""
    line = f"{_MARK}={mark}".encode()
    for _ in range(_MOST_ROUNDS):
        found = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is somebody else's
                if any(each.startswith(line) for each in path.read_bytes().split(b"\0")):
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(_POLL_S / 20)


def _read(file: Path) -> Written | None:
    """What a step wrote; None where it was stopped before it did."""
    try:
        written: Written = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return written
