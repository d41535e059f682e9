"""A step as a process of its own, a module: its findings are read when it ends, and its services end with it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

_MOST_OUTPUT = 4000
_STACK_S, _LEAVING_S = 1.0, 5.0
"""Seconds in which a step that hangs prints its stacks, and in which it must leave: a driver may hold it for ever."""
_CUDA_ERRORS = ("CUDA error", "device-side assert", "illegal memory access", "CUBLAS_STATUS")
_MARK = "SPECDEC_SLOT_STEP"
Entry = dict[str, Any]


def run_step(name: str, module: Sequence[str], most_s: float, environment: Mapping[str, str], logs: Path) -> Entry:
    """Run a module with arguments, of which `FOLDER` is replaced by the folder of its findings, in JSON or as JUnit's.

    The entry has `status` (ok, failed, timeout), `found`, and the end of the output unless it is ok. After an error of
    CUDA the step runs again with launches that wait, which names the kernel. ``logs`` is the folder for its output and
    its services' logs.
    """
    mark, status, end_s = f"{name}-{time.time_ns()}", "timeout", time.monotonic() + most_s
    with tempfile.TemporaryDirectory(prefix="slot-") as folder, (logs / f"{name}.txt").open("w+b") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "specdec.service.process", str(os.getpid()), "",
             *(text.replace("FOLDER", folder) for text in module)],
            env={**environment, "TMPDIR": folder, "PYTHONFAULTHANDLER": "1", _MARK: mark},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            status = "failed" if process.wait(most_s) else "ok"
        except subprocess.TimeoutExpired:
            end_left_behind(mark, signal.SIGABRT)  # faulthandler prints stacks, of services as well
            time.sleep(_STACK_S)
        leaving_s = time.monotonic() + _LEAVING_S
        while end_left_behind(mark) and time.monotonic() < leaving_s:  # services would keep the GPU's memory
            process.poll()
        for path in Path(folder).rglob("*.log"):
            shutil.copy(path, logs / f"{name}-{path.parent.name}-{path.name}")
        entry: Entry = {"status": status, "found": _found(Path(folder))}
    if status != "ok":
        entry["output"] = (logs / f"{name}.txt").read_text(errors="replace")[-_MOST_OUTPUT:]
    is_first, left_s = "CUDA_LAUNCH_BLOCKING" not in environment, end_s - time.monotonic()
    if is_first and left_s > _STACK_S and any(word in entry.get("output", "") for word in _CUDA_ERRORS):
        again = run_step(f"{name}-blocking", module, left_s, {**environment, "CUDA_LAUNCH_BLOCKING": "1"}, logs)
        entry["with blocking launches"] = again.get("output", again["status"])
    return entry


def end_left_behind(mark: str = "", number: int = signal.SIGKILL) -> bool:
    """Send a signal to all processes of the step with this mark, or of any step; whether there are any."""
    found = False
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if any(each.startswith(f"{_MARK}={mark}".encode()) for each in path.read_bytes().split(b"\0")):
                os.kill(int(path.parent.name), number)
                found = True
    return found


def _found(folder: Path) -> Entry:
    """Values of JSON, and of properties of tests, which are numbers or texts."""
    found: Entry = {}
    with contextlib.suppress(ValueError, ElementTree.ParseError):
        for path in folder.glob("*.json"):
            found |= json.loads(path.read_text())
        for each in (each for path in folder.glob("*.xml") for each in ElementTree.parse(path).iter("property")):
            value = each.get("value", "")
            found[each.get("name", "")] = float(value) if re.fullmatch(r"-?[\d.]+(e-?\d+)?", value) else value
    return found
