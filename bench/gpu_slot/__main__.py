"""Ten minutes on a GPU: run the steps in order of importance until time is up, from where the last slot stopped.

    python -m bench.gpu_slot                  # needs torch for CUDA, and no network
    python -m bench.gpu_slot --dry            # the same steps, small, without a GPU
    python -m bench.gpu_slot --only graph     # again, whatever an earlier slot found

What the machine lacks is told before the first step, and ends the slot. Each step is a process of its own, so a crash
or a hang costs the time of one step. Results are written as they are found, with all logs in one archive beside them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.gpu_slot.aims import AIMS, figures
from bench.gpu_slot.machine import lacking, machine
from bench.gpu_slot.running import Entry, end_left_behind, run_step

LIMIT_S, MOST_ARCHIVE_BYTES, _MOST_TOLD, _MOST_DRY_S = 570.0, 16 << 20, 1500, 1800.0
_REAL, _DRY = Path("bench/results/gpu-slot.json"), Path("dist/gpu-slot-dry.json")


class Step(NamedTuple):
    """One step: most seconds, a module with arguments, seconds that must be left for it to begin, and GiB of a GPU."""

    most_s: float
    module: str
    least_s: float = 10.0
    least_gib: int = 0


_PYTEST = "pytest -c /dev/null --rootdir=. --noconftest -p no:cacheprovider -vv -s --junitxml=FOLDER/found.xml"
_TEST = f"{_PYTEST} tests/gpu/test_device"
_BENCH = "bench --repeats 1 --no-check --results FOLDER --device cuda --max-tokens 256 --pair gpu-8b --only"
_TIMES = "bench.shaped --results FOLDER --shapes"
STEPS = {  # up to `assisted` the first five minutes: it runs, it is right, what it gains
    "graph": Step(60, f"{_TEST}_steps.py -k replay"),
    "greedy": Step(60, f"{_TEST}_services.py -k transformers"),
    "steps": Step(
        90, f"{_TIMES} llama-1b llama-8b --deterministic llama-8b --contexts 8 1024 4096 --rows 1 8 64", 40.0
    ),
    "speedup": Step(240, f"{_BENCH} decode --batch 1 --prompts 4", 90.0, 26),
    "assisted": Step(200, f"{_BENCH} systems --systems transformers --batch 1 --prompts 1 --peer-tokens 5", 90.0, 44),
    "exactness": Step(60, f"{_TEST}_steps.py -k controls"),
    "attention": Step(120, f"{_TEST}_steps.py -k attention"),
    "selftest": Step(90, f"{_TEST}_steps.py -k dtype"),
    "bitwise": Step(150, f"{_TEST}_steps.py -k bits"),
    "draft": Step(60, f"{_TEST}_steps.py -k drafted"),
    "loaded": Step(200, f"{_BENCH} decode --batch 8,32 --prompts 1", 90.0, 26),
    "long": Step(60, f"{_TIMES} llama-8b --contexts 32768+31x500 32x500"),
    "together": Step(150, f"{_BENCH} decode --batch 1 --prompts 2 --placement together", 60.0, 26),
    "failover": Step(120, f"{_TEST}_services.py -k killed"),
    "large": Step(500, f"{_BENCH} decode --batch 1 --prompts 1 --pair gpu-32b", 240.0, 71),
}
_SMALLER = {
    "--device cuda": "--device cpu", "-tokens 256": "-tokens 16", "gpu-8b": "shipped", "gpu-32b": "shipped",
    "8,32": "2", "llama-1b llama-8b": "tiny", "llama-8b": "tiny --dtype float32", "32768+31x500 32x500": "60+3x8 4x8",
    "8 1024 4096": "8 40", "1 8 64": "1 4",
}  # fmt: skip
"""What a dry slot replaces in the steps."""


def module_of(name: str, *, dry: bool) -> list[str]:
    """A step's module and arguments; of a dry slot what needs a GPU runs on the simulated one."""
    module = STEPS[name].module
    for text, smaller in _SMALLER.items() if dry else ():
        module = module.replace(text, smaller)
    is_played = dry and not module.startswith("bench --")
    return [*(["tests.support.fake_cuda.runners"] if is_played else []), *module.split()]


def run_slot(
    state: dict[str, Entry],
    names: Sequence[str],
    run: Callable[[str, float], Entry],
    save: Callable[[], None],
    limit_s: float,
) -> None:
    """Run the steps that have not succeeded and fit into the time, in order, each within a number of seconds; save
    before and after each. Findings of a failed step stay beside those of its next try, as `earlier`."""
    end_s = time.monotonic() + limit_s
    for name in names:
        before, left_s = state.get(name, {}), end_s - time.monotonic()
        if before.get("status") == "ok" or left_s < STEPS[name].least_s:
            continue
        earlier = {key: before.get(key) for key in ("gpu", "found")} if before.get("found") else before.get("earlier")
        state[name] = {"status": "running", "earlier": earlier}  # names the step if the machine is lost
        save()
        entry = run(name, min(left_s, STEPS[name].most_s))
        seconds = round(left_s - (end_s - time.monotonic()), 1)
        state[name] = {**entry, "seconds": seconds, "earlier": None if entry["status"] == "ok" else earlier}
        save()


def archive(logs: Path, target: Path, most_bytes: int = MOST_ARCHIVE_BYTES) -> None:
    """Pack the ends of a folder's logs into one file of at most `most_bytes`; each log has the same share."""
    paths = sorted(logs.glob("*"))
    with tarfile.open(target, "w:xz") as together:
        for path in paths:
            share = most_bytes // len(paths) - 2048  # a header, and padding
            path.write_bytes(path.read_bytes()[-share:])
            together.add(path, path.name)


def found_so_far(paths: Sequence[Path], dry: bool) -> dict[str, Entry]:
    """Results of the first file that is there; dry slots and slots on a GPU ignore each other's."""
    found: dict[str, Entry] = next((json.loads(path.read_text()) for path in paths if path.exists()), {})
    return found if found.get("machine", {}).get("dry", dry) == dry else {}


def main() -> int:
    """Run the slot; 1 unless all steps have succeeded, 2 where the machine lacks what they need."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--only", nargs="*", choices=list(STEPS), help="whose earlier results are discarded")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds in all; a dry slot has no limit")
    parser.add_argument("--out", type=Path, help=f"default: {_REAL}, which is continued from, or {_DRY} of a dry slot")
    parser.add_argument("--wheels", type=Path, help="archive of packages, which precede all others")
    options, end_s = parser.parse_args(), time.monotonic()
    out, logs = options.out or (_DRY if options.dry else _REAL), Path(tempfile.mkdtemp(prefix="slot-logs-"))
    state, paths = found_so_far((out, _REAL), options.dry), [os.getcwd()]
    for name in options.only or ():
        state.pop(name, None)
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
    gpu, memory = [*(state["machine"]["gpu"] or "").split(", "), ""][:2]
    out.parent.mkdir(parents=True, exist_ok=True)
    if not options.dry:
        end_left_behind()  # processes of a killed slot would share the GPU

    def save() -> None:
        out.with_suffix(".tmp").write_text(json.dumps(state, indent=1))
        out.with_suffix(".tmp").replace(out)

    def run(name: str, most_s: float) -> Entry:
        print(f"{name}: at most {most_s:.0f} s", flush=True)
        if memory.isdigit() and int(memory) < STEPS[name].least_gib << 10 and not options.dry:
            return {"status": "failed", "found": None, "output": f"needs a GPU of {STEPS[name].least_gib} GiB"}
        most_s = _MOST_DRY_S if options.dry else most_s  # interpreted kernels are slow
        entry = run_step(name, module_of(name, dry=options.dry), most_s, environment, logs)
        archive(logs, out.with_suffix(".logs.tar.xz"))
        entry |= {"gpu": gpu, "found": figures(entry["found"])}
        told = f"{name}: {entry['status']}, {json.dumps(entry['found'])}"[:_MOST_TOLD]
        print(told, entry.get("output", "")[-_MOST_TOLD:], flush=True)
        return entry

    names = options.only or list(STEPS)
    run_slot(state, names, run, save, math.inf if options.dry else options.limit_s + end_s - time.monotonic())
    print("\n".join(aim.told(state.get(aim.step, {})) for aim in AIMS), flush=True)
    left = [name for name in names if state.get(name, {}).get("status") != "ok"]
    print(f"left: {', '.join(left) or 'nothing'}", flush=True)
    return int(bool(left))


if __name__ == "__main__":
    raise SystemExit(main())
