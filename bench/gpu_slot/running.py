"""A step as a process of its own: its findings are read while it runs, and its child processes end with it."""

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
"""Seconds to wait for a killed step to end; one that the driver holds may never end."""
_MARK = "SPECDEC_SLOT_STEP"
_MOST_ROUNDS = 10

Written = dict[str, Any]
"""Content of a step's file: ``found``, and ``gpu``, the GPU's name."""


def run_process(
    name: str,
    timeout_s: float,
    dry: bool,
    environment: Mapping[str, str],
    on_written: Callable[[Written], None] = lambda written: None,
) -> dict[str, Any]:
    """Run one step as a process; a crash and a timeout are results, too.

    Args:
        name: the step.
        timeout_s: seconds before the step is killed.
        dry: whether the step gets ``--dry``.
        environment: the step's environment variables.
        on_written: gets the content of the step's file whenever it changes.
    """
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "bench.gpu_slot.steps", name, "--out", str(file), *(["--dry"] if dry else [])]
        # A file, because processes that a step leaves behind would keep a pipe open.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env={**environment, _MARK: mark},
        )  # fmt: skip
        status = _waited(process, timeout_s, file, on_written)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        end_left_behind(mark)  # services have sessions of their own, and would keep the GPU's memory
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
    """Wait for a step's end or timeout; returns ok, failed or timeout."""
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
    """Kill every process of the step with this mark, new ones included; of any step if there is no mark."""
    line = f"{_MARK}={mark}".encode()
    for _ in range(_MOST_ROUNDS):
        found = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                if any(each.startswith(line) for each in path.read_bytes().split(b"\0")):
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(_POLL_S / 20)


def _read(file: Path) -> Written | None:
    """Content of a step's file; None where the step has not written it."""
    try:
        written: Written = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return written
