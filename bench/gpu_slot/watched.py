"""A small run of every kind of kernel for compute-sanitizer: ``python -m bench.gpu_slot.watched cuda``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import torch

from bench.gpu_slot import models
from bench.gpu_slot.determinism import adjusting_rows
from bench.gpu_slot.models import BLOCK_SIZE, Found, StepSetup
from specdec.engine.cuda.buckets import advance, empty_batch, fill
from specdec.engine.cuda.cuts import device_cuts
from specdec.engine.cuda.sampling import launch_top, row_parameters
from specdec.engine.drawing.adjustments import Adjustments

_ERROR_CODE = "9"
_USUAL_FOLDER = "/usr/local/cuda/bin"
_UNKNOWN = "Device not supported"
"""Output of compute-sanitizer for devices that it cannot watch, such as those of some virtual machines."""


def sanitizer(place: StepSetup) -> Found:
    """Run small steps under compute-sanitizer, which fails reads and writes outside of tensors.

    Where it is not installed, or cannot watch the device, the steps run without it, and ``watched`` is false.
    """
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), _USUAL_FOLDER]))
    watch = [] if place.dry or tool is None else [tool, "--error-exitcode", _ERROR_CODE]
    done = _run(watch, place)
    if watch and _UNKNOWN in done.stdout + done.stderr:
        watch, done = [], _run([], place)
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-1000:])
    return {"watched": bool(watch), "output": done.stdout[-1000:].splitlines()}


def _run(watch: list[str], place: StepSetup) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*watch, sys.executable, "-m", __name__, place.device.type],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # so that each tensor has bounds of its own
        check=False,
    )


@torch.inference_mode()
def main(device: str) -> None:
    """Run the kernels on a device: cpu (interpreted) or cuda."""
    place = StepSetup(torch.device(device), dry=True)
    for row_invariant in (False, True):
        model = models.make("8b", place, 64, row_invariant=row_invariant)
        batch = model.rows(16, 5)
        logits = model.decoder(batch, model.cache)
        adjustments = Adjustments(5, logits.shape[1], place.device)
        adjustments.fill(adjusting_rows(5))
        logits = adjustments.adjusted(logits, 0)
        scores = device_cuts(logits, [0.7] * 5, ([7] * 5, [0.9] * 5, [-4.0] * 5))
        drawn = launch_top(scores, row_parameters([1.0] * 5, list(range(10))).to(place.device), 4)
        adjustments.count(drawn)
        spare = model.cache.num_blocks - 1
        padded = empty_batch((8, 4), place.device, spare, BLOCK_SIZE)
        fill(padded, batch, spare, BLOCK_SIZE)
        model.decoder(padded, model.cache)
        positions = torch.full((5,), 16, dtype=torch.int32, device=place.device)
        following = empty_batch((5, 4), place.device, spare, BLOCK_SIZE)
        advance(following, 0, drawn, positions, torch.ones_like(positions), model.cache)
        model.decoder(following, model.cache)
    place.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
