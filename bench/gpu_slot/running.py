"""A step as a process of its own: its findings are read while it runs, and its services end with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_MOST_OUTPUT, _MOST_LOG_BYTES = 4000, 256 << 10
_POLL_S, _LEAVING_S = 1.0, 5.0
"""Seconds between two looks at a step, and for which a killed one is awaited: the driver may hold it for ever."""
_STACK_S = 4.0
"""Seconds before a step's end at which its stacks are printed, and for which services may print theirs."""
_CUDA_ERRORS = ("CUDA error", "device-side assert", "illegal memory access", "CUBLAS_STATUS")
_MARK = "SPECDEC_SLOT_STEP"
_MOST_ROUNDS = 20
Entry = dict[str, Any]
Commands = Callable[[Path, float], Sequence[str]]
"""A step's command, by the folder of its findings, a file in JSON, and the seconds until it prints stacks."""


def run_step(
    name: str, command: Commands, most_s: float, environment: Mapping[str, str], logs: Path, tell: Callable[[Any], None]
) -> Entry:
    """Run a step; its entry has `status` (ok, failed, timeout), `found`, and the end of its output unless it is ok.

    After an error of CUDA it runs again with launches that wait, which names the kernel. ``tell`` gets what it has
    found whenever that changes; ``logs`` is the folder for its output and the ends of its services' logs.
    """
    end_s = time.monotonic() + most_s
    entry = _run_once(name, command, most_s, environment, logs, tell)
    left_s = end_s - time.monotonic()
    if left_s > _STACK_S and any(word in entry.get("output", "") for word in _CUDA_ERRORS):
        environment = {**environment, "CUDA_LAUNCH_BLOCKING": "1"}
        again = _run_once(f"{name}-blocking", command, left_s, environment, logs, lambda found: None)
        entry["with blocking launches"] = again.get("output", again["status"])
    return entry


def _run_once(
    name: str, command: Commands, most_s: float, environment: Mapping[str, str], logs: Path, tell: Callable[[Any], None]
) -> Entry:
    mark, status, told, end_s = f"{name}-{time.time_ns()}", "timeout", None, time.monotonic() + most_s
    with tempfile.TemporaryDirectory(prefix="slot-") as folder, (logs / f"{name}.txt").open("w+b") as log:
        environment = {**environment, "TMPDIR": folder, "PYTHONFAULTHANDLER": "1", _MARK: mark}
        process = subprocess.Popen(
            command(Path(folder), max(most_s / 2, most_s - _STACK_S)),
            env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        while status == "timeout" and (left_s := end_s - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = "failed" if process.wait(min(left_s, _POLL_S)) else "ok"
            if (found := _read(Path(folder))) != told:
                tell(told := found)
        if status == "timeout":
            end_left_behind(mark, signal.SIGABRT)  # faulthandler prints stacks, of services as well
            time.sleep(_STACK_S / 4)
        for _ in range(_MOST_ROUNDS):  # services have sessions of their own, and would keep the GPU's memory
            if not end_left_behind(mark):
                break
            time.sleep(_POLL_S / 20)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVING_S)
        for path in Path(folder).rglob("*.log"):
            (logs / f"{name}-{path.parent.name}-{path.name}").write_bytes(_end(path, _MOST_LOG_BYTES))
        said = {} if status == "ok" else {"output": _end(logs / f"{name}.txt", _MOST_OUTPUT).decode(errors="replace")}
        return {"status": status, "found": _read(Path(folder)), **said}


def end_left_behind(mark: str = "", number: int = signal.SIGKILL) -> bool:
    """Send a signal to all processes of the step with this mark, or of any step; whether there are any."""
    found = False
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if any(each.startswith(f"{_MARK}={mark}".encode()) for each in path.read_bytes().split(b"\0")):
                os.kill(int(path.parent.name), number)
                found = True
    return found


def _end(path: Path, most_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - most_bytes))
        return file.read()


def _read(folder: Path) -> Any:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        return json.loads(next(folder.glob("*.json")).read_text())
