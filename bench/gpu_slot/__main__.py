"""Run the steps of ``steps.py`` on the GPU that is here, until none is left or time is up.

    python -m bench.gpu_slot                  # go on where the last slot stopped
    python -m bench.gpu_slot --dry            # the same steps, small, without a GPU
    python -m bench.gpu_slot --again attention --only attention

Each step is a process of its own: one that crashes or hangs costs its own time only. What it found is written at once.
Wheels in ``--wheels`` (made by ``python -m bench.gpu_slot.wheels``) are unpacked first; no network is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT_S = 570.0
LEAST_S = 10.0
"""No step is begun with less time than this."""
# In this order, with the seconds that a step may take.
STEPS = {
    "versions": 60,
    "exactness": 90,
    "attention": 120,
    "sanitizer": 60,
    "bitwise": 120,
    "graph": 90,
    "products": 60,
    "steps": 180,
    "draft": 90,
    "served": 240,
    "trace": 60,
    "inflated": 400,
    "loaded": 300,
    "inflated_32b": 500,
}
_MOST_OUTPUT = 4000

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
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "bench.gpu_slot.steps", name, "--out", file.name, *(["--dry"] if dry else [])]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(environment),
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout_s)
            status = "ok" if process.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # services that the step started, too
            output, _ = process.communicate()
            status = "timeout"
        found = Path(file.name).read_text()
    result: dict[str, Any] = {"status": status, "found": json.loads(found) if found else None}
    if status != "ok":
        result["output"] = output[-_MOST_OUTPUT:]
    return result


def unpack(wheels: Path, folder: Path) -> None:
    """Unpack wheels, which are zip files, into a folder for PYTHONPATH."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


def main() -> int:
    """Run the slot; the exit code is 1 while a step has not succeeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="small, on the CPU, kernels interpreted")
    parser.add_argument("--only", nargs="*", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--again", nargs="*", choices=list(STEPS), default=[], help="forget what these found")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--out", type=Path, default=Path("bench/results/gpu-slot.json"))
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to unpack and put before all others")
    options = parser.parse_args()
    state: State = json.loads(options.out.read_text()) if options.out.exists() else {}
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
        print(json.dumps({name: result}), flush=True)
        return result

    run_slot(state, options.only, run, save, options.limit_s)
    left = [name for name in options.only if state.get(name, {}).get("status") != "ok"]
    print(f"left: {', '.join(left) or 'nothing'}", flush=True)
    return int(bool(left))


if __name__ == "__main__":
    raise SystemExit(main())
