"""A step as a process of its own: its findings are read while it runs, and its child processes end with it.

A step that runs out of time prints the stacks of its threads, and so do the services that it has started. A step that
meets an error of CUDA runs once more with blocking launches, which name the kernel. Logs of all are kept in one folder.
"""

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
_MOST_LOG_BYTES = 256 << 10
_POLL_S = 1.0
_LEAVING_S = 5.0
"""Seconds to wait for a killed step to end; one that the driver holds may never end."""
_STACK_S = 4.0
"""Seconds before a step's end at which it prints its stacks, and for which services may print theirs."""
_CUDA_ERRORS = ("CUDA error", "device-side assert", "illegal memory access", "CUBLAS_STATUS")
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
    logs: Path | None = None,
) -> dict[str, Any]:
    """Run one step as a process; a crash and a timeout are results, too.

    Args:
        name: the step.
        timeout_s: seconds before the step is killed, with a second try.
        dry: whether the step gets ``--dry``.
        environment: the step's environment variables.
        on_written: gets the content of the step's file whenever it changes.
        logs: folder that gets the logs of the step and of its services; None: they are not kept.
    """
    began_s = time.monotonic()
    result = _run_once(name, timeout_s, dry, environment, on_written, logs)
    left_s = timeout_s - (time.monotonic() - began_s)
    is_cudas = result["status"] == "failed" and any(word in result["output"] for word in _CUDA_ERRORS)
    if is_cudas and left_s > _STACK_S:
        blocking = {**environment, "CUDA_LAUNCH_BLOCKING": "1"}
        again = _run_once(name, left_s, dry, blocking, lambda written: None, logs)
        result["with blocking launches"] = again.get("output", again["status"])
    return result


def _run_once(
    name: str,
    timeout_s: float,
    dry: bool,
    environment: Mapping[str, str],
    on_written: Callable[[Written], None],
    logs: Path | None,
) -> dict[str, Any]:
    mark = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="slot-") as folder, tempfile.TemporaryFile() as log:
        file = Path(folder) / "found.json"
        stack_s = max(timeout_s / 2, timeout_s - _STACK_S)
        command = [sys.executable, "-m", "bench.gpu_slot.steps", name, "--out", str(file), *(["--dry"] if dry else [])]
        command.append(f"--stack-after-s={stack_s:g}")
        environment = {**environment, "TMPDIR": folder, "PYTHONFAULTHANDLER": "1"}
        # A file, because processes that a step leaves behind would keep a pipe open.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env={**environment, _MARK: mark},
        )  # fmt: skip
        status = _waited(process, timeout_s, file, on_written)
        if status == "timeout":
            end_left_behind(mark, signal.SIGABRT, process.pid)  # faulthandler of each service prints its stacks
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        end_left_behind(mark)  # services have sessions of their own, and would keep the GPU's memory
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVING_S)
        log.seek(max(0, log.seek(0, os.SEEK_END) - _MOST_OUTPUT))
        output = log.read().decode(errors="replace")
        written = _read(file) or {"found": None}
        if logs is not None:
            keep_logs(Path(folder), logs, name, output)
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


def keep_logs(folder: Path, logs: Path, name: str, output: str) -> None:
    """Copy the ends of a step's output and of its services' logs into one folder."""
    logs.mkdir(parents=True, exist_ok=True)
    (logs / f"{name}.txt").write_text(output)
    for path in sorted(folder.rglob("*.log")):
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_LOG_BYTES))
            (logs / f"{name}-{path.parent.name}-{path.name}").write_bytes(file.read())


def end_left_behind(mark: str = "", number: int = signal.SIGKILL, spared: int = 0) -> None:
    """Send every process of the step with this mark a signal, SIGKILL to new ones as well; of any step if there is no
    mark. `spared`: id of a process that gets none."""
    line = f"{_MARK}={mark}".encode()
    for _ in range(_MOST_ROUNDS):
        found = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
                if int(path.parent.name) != spared and any(
                    each.startswith(line) for each in path.read_bytes().split(b"\0")
                ):
                    os.kill(int(path.parent.name), number)
                    found = True
        if number != signal.SIGKILL:
            time.sleep(_STACK_S / 4)
            return
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
