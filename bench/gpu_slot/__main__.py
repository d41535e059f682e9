"""Run the steps of ``steps.py`` on the GPU that is here, until none is left or time is up.

    python -m bench.gpu_slot                  # go on where the last slot stopped
    python -m bench.gpu_slot --dry            # the same steps, small, without a GPU
    python -m bench.gpu_slot --again attention --only attention

Each step is a process of its own: one that crashes or hangs costs its own time only. What it found is written at once,
and told again at the end, beside what is aimed at (``aims.py``). What ``--wheels`` names (made by
``python -m bench.gpu_slot.wheels``) is unpacked first; no network is needed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.gpu_slot.aims import beside_aims

LIMIT_S = 570.0
EARLIER = Path("bench/results/gpu-slot.json")
LEAST_S = 10.0
"""No step is begun with less time than this."""
# In this order, with the seconds that a step may take.
STEPS = {
    "versions": 120,
    "exactness": 90,
    "attention": 120,
    "sanitizer": 120,
    "bitwise": 120,
    "graph": 90,
    "products": 60,
    "steps": 180,
    "draft": 90,
    "served": 120,
    "failover": 120,
    "gaps": 150,
    "trace": 60,
    "inflated": 400,
    "loaded": 300,
    "inflated_32b": 500,
}
_MOST_OUTPUT = 4000
_MOST_TOLD = 1500
"""Characters per step on the terminal, whose end may be all that comes back; the file has everything."""
_LEAVING_S = 5.0
"""For a step that was killed to be gone; one that the driver holds may never be."""

State = dict[str, dict[str, Any]]
RunStep = Callable[[str, float], dict[str, Any]]


def run_slot(state: State, names: Sequence[str], run: RunStep, save: Callable[[State], None], limit_s: float) -> State:
    """Run what has not succeeded, in order, saving after each step; what does not fit into the time is left.

    Args:
        state: results by step: of earlier slots.
        names: of the steps.
        run: runs a step within some seconds; returns its result, whose ``status`` is ok, failed or timeout.
        save: keeps the state.
        limit_s: for all.
    """
    end_s = time.monotonic() + limit_s
    for name in names:
        if state.get(name, {}).get("status") == "ok":
            continue
        left_s = end_s - time.monotonic()
        if left_s < LEAST_S:
            break
        state[name] = {"status": "running"}
        save(state)  # a machine that is taken away shows which step it was
        began_s = time.monotonic()
        state[name] = run(name, min(left_s, STEPS.get(name, left_s)))
        state[name]["seconds"] = round(time.monotonic() - began_s, 1)
        save(state)
    return state


def run_process(name: str, timeout_s: float, dry: bool, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run one step as a process; whatever happens to it is a result."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file, tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "bench.gpu_slot.steps", name, "--out", file.name, *(["--dry"] if dry else [])]
        # To a file, and not to a pipe, whose end whatever a step has left behind would keep open.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=dict(environment),
            start_new_session=True,
        )  # fmt: skip
        try:
            status = "ok" if process.wait(timeout_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timeout"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the step started, too
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LEAVING_S)
        log.seek(max(0, log.seek(0, os.SEEK_END) - _MOST_OUTPUT))
        output = log.read().decode(errors="replace")
        found = Path(file.name).read_text()
    result: dict[str, Any] = {"status": status, "found": _parsed(found)}
    if status != "ok":
        result["output"] = output
    return result


def _parsed(text: str) -> Any:
    """What a step wrote; None where it was stopped before or while it did."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def unpack(wheels: Path, folder: Path) -> None:
    """Unpack an archive of ``bench.gpu_slot.wheels``, or a folder of wheels, which are zip files, for PYTHONPATH."""
    if wheels.is_file():
        with tarfile.open(wheels) as archive:
            archive.extractall(folder, filter="data")
        return
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive_of_one:
            archive_of_one.extractall(folder)


def distributions() -> list[dict[str, str]]:
    """What is installed beside what is carried, as pip lists it: for ``bench.gpu_slot.wheels``."""
    return [{"name": each.name, "version": each.version} for each in metadata.distributions()]


def found_so_far(out: Path, earlier: Path) -> State:
    """The results of ``out`` if it is there, else those of ``earlier``, else none."""
    found: State = next((json.loads(path.read_text()) for path in (out, earlier) if path.exists()), {})
    return found


def main() -> int:
    """Run the slot; the exit code is 1 while a step has not succeeded."""
    began_s = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="small, on the CPU, kernels interpreted")
    parser.add_argument("--only", nargs="*", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--again", nargs="*", choices=list(STEPS), default=[], help="forget what these found")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--out", type=Path, default=EARLIER)
    parser.add_argument("--earlier", type=Path, default=EARLIER, help="what to go on from, where --out is not there")
    parser.add_argument("--wheels", type=Path, help="to unpack and put before all others: an archive or a folder")
    options = parser.parse_args()
    state = found_so_far(options.out, options.earlier)
    state["machine"] = {"status": "ok", "found": {"distributions": distributions()}}
    for name in options.again:
        state.pop(name, None)
    environment = dict(os.environ)
    paths = [os.getcwd(), *filter(None, [environment.get("PYTHONPATH")])]
    if options.wheels:
        folder = Path(tempfile.mkdtemp(prefix="wheels-"))
        unpack(options.wheels, folder)
        paths.insert(1, str(folder))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment.pop("TRITON_INTERPRET", None)
    environment.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched; without a network to try takes its time
    if options.dry:
        environment["TRITON_INTERPRET"] = "1"

    def save(state: State) -> None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        temporary = options.out.with_suffix(".tmp")
        temporary.write_text(json.dumps(state, indent=1))
        temporary.replace(options.out)

    def run(name: str, timeout_s: float) -> dict[str, Any]:
        print(f"{name}: at most {timeout_s:.0f} s", flush=True)
        result = run_process(name, timeout_s, options.dry, environment)
        print(json.dumps({name: result})[:_MOST_TOLD], flush=True)
        return result

    run_slot(state, options.only, run, save, options.limit_s - (time.monotonic() - began_s))
    if not options.dry:
        print("\n".join(beside_aims(state)), flush=True)
    left = [name for name in options.only if state.get(name, {}).get("status") != "ok"]
    print(f"left: {', '.join(left) or 'nothing'}", flush=True)
    return int(bool(left))


if __name__ == "__main__":
    raise SystemExit(main())
