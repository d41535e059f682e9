"""Ten minutes on a GPU: run the steps in order of importance until time is up, from where the last slot stopped.

    python -m bench.gpu_slot                  # needs torch for CUDA, and no network
    python -m bench.gpu_slot --dry            # the same steps, small, without a GPU
    python -m bench.gpu_slot --again graph --only graph

What the machine lacks is told before the first step, and ends the slot. Each step is a process of its own, so a crash
or a hang costs the time of one step. Results are written as they are found, with all logs in one archive beside them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu_slot.aims import AIMS, figures
from bench.gpu_slot.machine import lacking, machine
from bench.gpu_slot.running import Entry, end_left_behind, run_step

LIMIT_S, MOST_ARCHIVE_BYTES, _MOST_TOLD, _MOST_DRY_S = 570.0, 16 << 20, 1500, 1800.0
_REAL, _DRY = Path("bench/results/gpu-slot.json"), Path("dist/gpu-slot-dry.json")


class Step(NamedTuple):
    """One step: most seconds, its module of this package, or arguments of ``bench``, and what it needs."""

    most_s: float
    where: str
    least_s: float = 10.0
    """Seconds that must be left for it to begin."""
    least_gib: int = 0
    """Memory of a GPU."""


_ONE = "--only decode --batch 1 --prompts"
STEPS = {  # up to `assisted` the first five minutes: it runs, it is right, what it gains
    "graph": Step(60, "engines"),
    "greedy": Step(60, "served"),
    "steps": Step(90, "engines", 40.0),
    "speedup": Step(240, f"--pair gpu-8b {_ONE} 4", 90.0, 26),
    "assisted": Step(200, "--pair gpu-8b --only systems --systems transformers --batch 1 --prompts 1 --peer-tokens 5",
                     90.0, 44),
    "exactness": Step(60, "engines"),
    "attention": Step(120, "engines"),
    "selftest": Step(90, "engines"),
    "bitwise": Step(150, "engines"),
    "draft": Step(60, "engines"),
    "loaded": Step(200, "--pair gpu-8b --only decode --batch 8,32 --prompts 1", 90.0, 26),
    "long": Step(60, "engines"),
    "together": Step(150, f"--pair gpu-8b {_ONE} 2 --placement together", 60.0, 26),
    "failover": Step(120, "served"),
    "large": Step(500, f"--pair gpu-32b {_ONE} 1", 240.0, 71),
}  # fmt: skip


def command_of(name: str, folder: Path, stack_after_s: float, *, dry: bool) -> list[str]:
    """A step's command."""
    where = STEPS[name].where
    if not where.startswith("--"):
        ends = [where, name, str(folder), f"{stack_after_s:g}", *(["--dry"] if dry else [])]
        return [sys.executable, "-m", "bench.gpu_slot.place", *ends]
    size = ["--device", "cuda", "--max-tokens", "256"]
    if dry:
        size = ["--device", "cpu", "--max-tokens", "16", "--pair", "shipped"]
        where = where.replace("8,32", "2")
    ends = ["--repeats", "1", "--no-check", "--results", str(folder)]
    return [sys.executable, "-m", "bench", *where.split(), *size, *ends]


def run_slot(
    state: dict[str, Entry],
    names: Sequence[str],
    run: Callable[[str, float, Callable[[Any], None]], Entry],
    save: Callable[[], None],
    limit_s: float,
) -> None:
    """Run the steps that have not succeeded and fit into the time, in order; save whenever one has found something.

    Findings of a failed step stay beside those of its next try, as `earlier`. ``run`` runs a step within a number of
    seconds, and passes on what the step has found so far.
    """
    end_s = time.monotonic() + limit_s
    for name in names:
        before, left_s = state.get(name, {}), end_s - time.monotonic()
        if before.get("status") == "ok" or left_s < STEPS[name].least_s:
            continue
        earlier = {key: before.get(key) for key in ("gpu", "found")} if before.get("found") else before.get("earlier")
        kept = {"earlier": earlier} if earlier else {}

        def tell(found: Any, name: str = name, kept: Mapping[str, Any] = kept) -> None:
            state[name] = {"status": "running", "found": found, **kept}  # names the step if the machine is lost
            save()

        tell(None)
        began_s = time.monotonic()
        entry = run(name, min(left_s, STEPS[name].most_s), tell)
        state[name] = {
            **entry,
            "seconds": round(time.monotonic() - began_s, 1),
            **({} if entry["status"] == "ok" else kept),
        }
        save()


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


def found_so_far(out: Path, earlier: Path, dry: bool) -> dict[str, Entry]:
    """Results of a file, else of an earlier one; dry slots and slots on a GPU ignore each other's."""
    found: dict[str, Entry] = next((json.loads(path.read_text()) for path in (out, earlier) if path.exists()), {})
    return found if found.get("machine", {}).get("dry", dry) == dry else {}


def main() -> int:
    """Run the slot; 1 unless all steps have succeeded, 2 where the machine lacks what they need."""
    began_s = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", nargs="*", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--again", nargs="*", choices=list(STEPS), default=[], help="steps whose results are discarded")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds in all; a dry slot has no limit")
    parser.add_argument("--out", type=Path, help=f"default: {_REAL}, or {_DRY} of a dry slot")
    parser.add_argument("--earlier", type=Path, default=_REAL, help="results to continue where --out does not exist")
    parser.add_argument("--wheels", type=Path, help="archive of packages, which precede all others")
    options = parser.parse_args()
    out: Path = options.out or (_DRY if options.dry else _REAL)
    state, logs = found_so_far(out, options.earlier, options.dry), Path(tempfile.mkdtemp(prefix="slot-logs-"))
    for name in options.again:
        state.pop(name, None)
    paths = [os.getcwd()]
    if options.wheels:
        paths.append(tempfile.mkdtemp(prefix="wheels-"))
        with tarfile.open(options.wheels) as wheels:
            wheels.extractall(paths[-1], filter="data")
    state["machine"] = machine(paths, dry=options.dry)
    if lacks := lacking(state["machine"]):
        print("This machine lacks", *lacks, sep="\n- ", flush=True)
        return 2
    more = {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]), "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **more, **({"TRITON_INTERPRET": "1"} if options.dry else {})}
    described: list[str] = [*(state["machine"]["gpu"] or "").split(", "), ""]
    gpu, memory = described[0], described[1]
    out.parent.mkdir(parents=True, exist_ok=True)
    if not options.dry:
        end_left_behind()  # processes of a killed slot would share the GPU

    def save() -> None:
        out.with_suffix(".tmp").write_text(json.dumps(state, indent=1))
        out.with_suffix(".tmp").replace(out)

    def run(name: str, most_s: float, tell: Callable[[Any], None]) -> Entry:
        print(f"{name}: at most {most_s:.0f} s", flush=True)
        if memory.isdigit() and int(memory) < STEPS[name].least_gib << 10 and not options.dry:
            return {"status": "failed", "found": None, "output": f"needs a GPU of {STEPS[name].least_gib} GiB"}
        most_s = _MOST_DRY_S if options.dry else most_s  # interpreted kernels are slow
        entry = run_step(name, lambda *to: command_of(name, *to, dry=options.dry), most_s, environment, logs, tell)
        entry = {**entry, "gpu": gpu, "found": figures(entry["found"] or {})}
        archive(logs, out.with_suffix(".logs.tar.xz"))
        print(
            f"{name}: {entry['status']}, {json.dumps(entry['found'])}"[:_MOST_TOLD],
            entry.get("output", "")[-_MOST_TOLD:],
            flush=True,
        )
        return entry

    limit_s = math.inf if options.dry else options.limit_s - (time.monotonic() - began_s)
    run_slot(state, options.only, run, save, limit_s)
    print("\n".join(aim.told(state.get(aim.step, {})) for aim in AIMS), flush=True)
    left = [name for name in options.only if state.get(name, {}).get("status") != "ok"]
    print(f"left: {', '.join(left) or 'nothing'}", flush=True)
    return int(bool(left))


if __name__ == "__main__":
    raise SystemExit(main())
