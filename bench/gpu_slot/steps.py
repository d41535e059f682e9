"""The steps of a slot. Each is a process: ``python -m bench.gpu_slot.steps NAME --out FILE [--dry]``."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch

from bench.gpu_slot import models
from bench.gpu_slot.attending import attention
from bench.gpu_slot.determinism import bitwise, num_adjusted_that_differ, num_cuts_that_differ
from bench.gpu_slot.models import Found, StepSetup
from bench.gpu_slot.services import assisted, failover, greedy, large, loaded, selftest, speedup, together
from bench.gpu_slot.timing import draft, long, steps
from specdec.engine.cuda.buckets import ROW_BUCKETS
from specdec.engine.cuda.sampling import device_perturbed_top
from specdec.engine.sampling.noise import Purpose, noise_key
from specdec.engine.sampling.perturbed_top import perturbed_top
from specdec.service.process import die_with_parent

_QUERIED = "driver_version,compute_mode,mig.mode.current,clocks.max.sm,power.limit"
_MOST_ASKING_S = 20.0
_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "grpcio", "protobuf", "pydantic", "numpy")


def versions(place: StepSetup) -> Found:
    """Versions of packages, the GPU, its driver and mode, the compiler that Triton needs, MPS, and room on disks."""
    found: Found = {"python": sys.version}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    disks = (Path.home(), Path("/dev/shm"))  # some containers have neither
    found |= {
        "compiler": _told_by(os.environ.get("CC") or "gcc", "--version"),
        "Python.h": (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
        "mps": shutil.which("nvidia-cuda-mps-control"),
        "free GiB": {str(path): shutil.disk_usage(path).free >> 30 for path in disks if path.is_dir()},
        "nvidia-smi": _told_by("nvidia-smi", f"--query-gpu={_QUERIED}", "--format=csv,noheader"),
    }
    if place.device.type == "cuda":
        properties = torch.cuda.get_device_properties(place.device)
        found |= {"gpu": properties.name, "memory_bytes": properties.total_memory}
        found["sms"] = properties.multi_processor_count
    return found


def _told_by(tool: str, *arguments: str) -> str | None:
    """First line of a tool's output; None: it is not there, or fails."""
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=_MOST_ASKING_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), "")


def exactness(place: StepSetup) -> Found:
    """Differences between the device's sampling and the CPU's; raises AssertionError where a token differs."""
    num_rows, vocab_size = (3, 3000) if place.dry else (64, 128256)
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * 3
    temperatures = [(0.0, 0.7, 1.0)[row % 3] for row in range(num_rows)]
    keys = [part for row in range(num_rows) for part in noise_key(row, 0, Purpose.PLAIN, row)]
    expected = perturbed_top(logits, temperatures, keys, 4)
    ids, scores = device_perturbed_top(logits.to(place.device), temperatures, keys, 4)
    found = {
        "tokens": len(ids),
        "tokens_that_differ": sum(a != b for a, b in zip(ids, expected[0], strict=True)),
        "scores_that_differ": sum(a != b for a, b in zip(scores, expected[1], strict=True)),
    }
    found["cuts_that_differ"] = num_cuts_that_differ(place, logits[:8])
    found["adjusted_that_differ"] = num_adjusted_that_differ(place, logits[:8])
    place.keep(found)
    if found["tokens_that_differ"] or found["cuts_that_differ"] or found["adjusted_that_differ"]:
        raise AssertionError(found)
    return found


def graph(place: StepSetup) -> Found:
    """Compare replays of captured steps with eager steps; raises where a bit differs or a replay synchronizes."""
    model = models.make("1b", place, 64 if place.dry else 2048)
    found: Found = {}
    context = 32 if place.dry else 1024
    model.decoder(model.rows(0, context), model.cache)
    replays = models.replays_of(place, model)
    for rows in (1, 2) if place.dry else (1, 7, 8, 64):
        batch = model.rows(context - rows, rows)
        began_s = time.monotonic()
        replays(batch, model.cache)
        found[f"{rows} rows: capture s"] = round(time.monotonic() - began_s, 2)
        if place.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        replayed = replays(batch, model.cache)
        if place.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        same = bool(torch.equal(replayed, model.decoder(batch, model.cache)))
        found[f"{rows} rows: equal bits"] = same
        place.keep(found)
        if not same and rows in ROW_BUCKETS:  # products over padded rows may differ
            raise AssertionError(found)
    if replays.num_graphs == 0:
        raise AssertionError("no step was captured")
    return found


STEPS: dict[str, Callable[[StepSetup], Found]] = {
    step.__name__: step
    for step in (
        versions,
        selftest,
        graph,
        greedy,
        steps,
        speedup,
        assisted,
        exactness,
        attention,
        bitwise,
        draft,
        loaded,
        long,
        together,
        failover,
        large,
    )
}


@torch.inference_mode()
def main() -> int:
    """Run one step and write its findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=list(STEPS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--stack-after-s", type=float, help="seconds after which all threads' stacks are printed")
    options = parser.parse_args()
    if options.stack_after_s:  # a thread of C prints them, also while a call hangs in the driver
        faulthandler.dump_traceback_later(options.stack_after_s)
    if not options.dry and not torch.cuda.is_available():
        raise SystemExit("no CUDA device is here: --dry runs the same steps on the CPU")

    die_with_parent(os.getppid())  # a killed slot leaves nothing on the GPU
    gpu = None if options.dry else torch.cuda.get_device_name()

    def keep(found: Found) -> None:
        unfinished = options.out.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({"gpu": gpu, "found": found}))
        unfinished.replace(options.out)  # atomic, because the slot reads the file meanwhile

    keep(STEPS[options.step](StepSetup(torch.device("cpu" if options.dry else "cuda:0"), options.dry, keep)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
