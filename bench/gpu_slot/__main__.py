"""Run the steps of ``steps.py`` on this machine's GPU, until none is left or time is up.

    python -m bench.gpu_slot                  # continue where the last slot stopped
    python -m bench.gpu_slot --dry            # the same steps, small, without a GPU
    python -m bench.gpu_slot --again attention --only attention

Each step is a process of its own, so a crash or a hang costs the time of one step. Results are written as they are
found, with all logs in one archive beside them, and printed at the end beside the aims (``aims.py``) and the
predictions (``predicted.py``). The wheels of ``--wheels`` (made by ``python -m bench.gpu_slot.wheels``) are unpacked
first; no network is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.gpu_slot.aims import beside_aims, beside_predictions
from bench.gpu_slot.running import Written, end_left_behind, run_process
from bench.gpu_slot.wheels import DRY, EARLIER

LIMIT_S = 570.0
MOST_ARCHIVE_BYTES = 16 << 20
LEAST_S = 10.0
"""Seconds that must be left for a step to begin."""
# In the order of running.
STEPS = {
    "versions": 60,
    "selftest": 90,
    "graph": 60,
    "greedy": 60,
    "steps": 90,
    "speedup": 240,
    "assisted": 200,
    "exactness": 60,
    "attention": 120,
    "bitwise": 150,
    "draft": 60,
    "loaded": 200,
    "long": 60,
    "together": 150,
    "failover": 120,
    "large": 500,
}
"""Most seconds of each step. Those up to `speedup` fill the first five minutes: it runs, it is right, what it gains."""
LEAST_OF_S = {"steps": 40.0, "speedup": 90.0, "assisted": 90.0, "loaded": 90.0, "together": 60.0, "large": 240.0}
"""Seconds that must be left for steps which find nothing in less; without them the next slot runs the step."""
_MOST_TOLD = 1500
"""Characters per step on the terminal; the file has everything."""

State = dict[str, dict[str, Any]]
RunStep = Callable[[str, float, Callable[[Written], None]], dict[str, Any]]


def run_slot(state: State, names: Sequence[str], run: RunStep, save: Callable[[State], None], limit_s: float) -> State:
    """Run the steps that have not succeeded, in order, and save whenever a step has found something.

    Steps that do not fit into the time are left out. The findings of a failed step stay beside those of its next try.

    Args:
        state: results of earlier slots, by step.
        names: the steps.
        run: runs a step within a number of seconds, passes on what the step has written so far, and returns its
            result, whose ``status`` is ok, failed or timeout.
        save: writes the state to a file.
        limit_s: seconds for all steps.
    """
    end_s = time.monotonic() + limit_s
    for name in names:
        if state.get(name, {}).get("status") == "ok":
            continue
        left_s = end_s - time.monotonic()
        if left_s < LEAST_OF_S.get(name, LEAST_S):
            continue
        kept = _kept(state.get(name, {}))

        def tell(result: Mapping[str, Any], name: str = name, kept: Mapping[str, Any] = kept) -> None:
            state[name] = {**result, **kept}
            save(state)

        tell({"status": "running"})  # if the machine is lost, the file names the step
        began_s = time.monotonic()
        result = run(name, min(left_s, STEPS.get(name, left_s)), lambda written: tell({"status": "running", **written}))
        kept = {} if result["status"] == "ok" else kept
        tell({**result, "seconds": round(time.monotonic() - began_s, 1)}, kept=kept)
    return state


def _kept(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Findings of the latest try of a step that found something."""
    found = {"gpu": entry.get("gpu"), "found": entry["found"]} if entry.get("found") else entry.get("earlier")
    return {"earlier": found} if found else {}


def archive(logs: Path, target: Path, most_bytes: int = MOST_ARCHIVE_BYTES) -> None:
    """Pack a folder's logs into one file, without the largest ones where it would exceed `most_bytes`."""
    paths = sorted(logs.glob("*"), key=lambda path: path.stat().st_size)
    while True:
        with tarfile.open(target, "w:xz") as together:
            for path in paths:
                together.add(path, path.name)
        if target.stat().st_size <= most_bytes or not paths:
            return
        paths.pop()


def unpack(wheels: Path, folder: Path) -> None:
    """Unpack an archive of ``bench.gpu_slot.wheels``, or a folder of wheels, into ``folder``, for PYTHONPATH.

    Raises ``FileNotFoundError`` where there is neither, before any step fails for lack of packages.
    """
    if wheels.is_file():
        with tarfile.open(wheels) as archive:
            archive.extractall(folder, filter="data")
        return
    found = sorted(wheels.glob("*.whl"))
    if not found:
        raise FileNotFoundError(f"{wheels} is no archive, and no folder of wheels")
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive_of_one:
            archive_of_one.extractall(folder)


def distributions() -> list[dict[str, str]]:
    """Installed distributions as pip lists them, for ``bench.gpu_slot.wheels``."""
    return [{"name": each.name, "version": each.version} for each in metadata.distributions()]


def told(name: str, result: Mapping[str, Any]) -> str:
    """A step's result for the terminal: its findings, and the end of its output if it did not succeed."""
    lines = [f"{name}: {result['status']}, {json.dumps(result.get('found'))}"[:_MOST_TOLD]]
    if output := result.get("output"):
        lines.append(output[-_MOST_TOLD:])
    return "\n".join(lines)


def found_so_far(out: Path, earlier: Path, dry: bool) -> State:
    """The results of ``out`` if it exists, else those of ``earlier``, else none.

    Dry slots and slots on a GPU ignore each other's results.
    """
    found: State = next((json.loads(path.read_text()) for path in (out, earlier) if path.exists()), {})
    return found if found.get("machine", {}).get("dry", dry) == dry else {}


def main() -> int:
    """Run the slot; the exit code is 1 unless all steps have succeeded."""
    began_s = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="run small steps on the CPU, with interpreted kernels")
    parser.add_argument("--only", nargs="*", choices=list(STEPS), default=list(STEPS))
    parser.add_argument(
        "--again", nargs="*", choices=list(STEPS), default=[], help="steps whose results are discarded first"
    )
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--out", type=Path, help=f"default: {EARLIER}, or {DRY} of a dry slot")
    parser.add_argument(
        "--earlier", type=Path, default=EARLIER, help="results to continue from where --out does not exist"
    )
    parser.add_argument("--wheels", type=Path, help="archive or folder of wheels, which precede all other packages")
    options = parser.parse_args()
    out: Path = options.out or (DRY if options.dry else EARLIER)
    state = found_so_far(out, options.earlier, options.dry)
    state["machine"] = {"status": "ok", "dry": options.dry, "found": {"distributions": distributions()}}
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
    environment.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched, and attempts without a network take long
    logs = Path(tempfile.mkdtemp(prefix="slot-logs-"))
    if options.dry:
        environment["TRITON_INTERPRET"] = "1"
    else:
        end_left_behind()  # processes of a killed slot would share the GPU

    def save(state: State) -> None:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = out.with_suffix(".tmp")
        temporary.write_text(json.dumps(state, indent=1))
        temporary.replace(out)

    def run(name: str, timeout_s: float, tell: Callable[[Written], None]) -> dict[str, Any]:
        print(f"{name}: at most {timeout_s:.0f} s", flush=True)
        result = run_process(name, timeout_s, options.dry, environment, tell, logs)
        archive(logs, out.with_suffix(".logs.tar.xz"))
        print(told(name, result), flush=True)
        return result

    run_slot(state, options.only, run, save, options.limit_s - (time.monotonic() - began_s))
    if not options.dry:
        print("\n".join([*beside_aims(state), *beside_predictions(state)]), flush=True)
    left = [name for name in options.only if state.get(name, {}).get("status") != "ok"]
    print(f"left: {', '.join(left) or 'nothing'}", flush=True)
    return int(bool(left))


if __name__ == "__main__":
    raise SystemExit(main())
