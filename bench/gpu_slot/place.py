"""A step's process: ``python -m bench.gpu_slot.place MODULE STEP FOLDER SECONDS [--dry]``, and the device that it uses.

A dry slot's device is the simulated GPU of the tests, and its models are tiny.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from bench.shaped import SHAPES, random_settings
from specdec.engine.model.runner import ModelRunner
from specdec.service.process import die_with_parent

Found = dict[str, Any]
T = TypeVar("T")
WRONG = "wrong: "
"""Beginning of the names of figures that must be 0; otherwise their step fails at its end."""
_TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """Size of a step, folder of its findings, and models on its device."""

    dry: bool
    folder: Path

    def keep(self, found: Found) -> None:
        """Write the findings so far, which remain if the step fails or runs out of time."""
        (self.folder / "unfinished").write_text(json.dumps(found))
        (self.folder / "unfinished").replace(self.folder / "found.json")  # the slot reads it meanwhile

    def sized(self, real: T, dry: T) -> T:
        """One of two values."""
        return dry if self.dry else real

    def runner(self, shape: str, max_len: int, more: Found | None = None, **settings: Any) -> ModelRunner:
        """A model of a shape of ``bench.shaped``, and ``more`` of its config. Raises RuntimeError if the device's
        kernels are not used, or no steps captured."""
        sizes = {**self.sized(SHAPES[shape], _TINY), **(more or {})}
        dtype, spare = self.sized(("bfloat16", 160), ("float32", 8))
        defaults = {"device": "cuda:0", "max_model_len": max_len, "num_blocks": max_len // 16 + spare, "dtype": dtype}
        with tempfile.TemporaryDirectory() as folder:
            runner = ModelRunner.load(random_settings(sizes, Path(folder), **{**defaults, **settings}))
        runner.warmup()
        if not runner.num_graphs or "triton" not in runner.numerics_id:
            raise RuntimeError(f"{runner.numerics_id} with {runner.num_graphs} captured steps")
        return runner

    def median_ms(self, run: Callable[[], object]) -> float:
        """Median milliseconds of a call with the work that it launches."""
        times = []
        for _ in range(self.sized(23, 2)):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began_s)
        return round(statistics.median(times[self.sized(3, 1) :]) * 1e3, 4)


@contextlib.contextmanager
def _simulated() -> Any:
    """The simulated GPU, with few captured steps."""
    few = {"cuda.buckets": ("ROW_BUCKETS", (1, 4)), "drawing.device": ("ROUND_BUCKETS", (2, 3)),
           "model.runner": ("_WARMUP_ROWS", (2,))}  # fmt: skip
    for module, (name, counts) in few.items():
        setattr(importlib.import_module(f"specdec.engine.{module}"), name, counts)
    with importlib.import_module("tests.support.fake_cuda.install").fake_cuda():
        yield


def main() -> int:
    """Run one step and write its findings; 1 if a figure is wrong."""
    module, name, folder, stack_after_s, *dry = sys.argv[1:]
    faulthandler.dump_traceback_later(float(stack_after_s))  # by a thread of C, also while the driver hangs
    die_with_parent(os.getppid())  # a killed slot leaves nothing on the GPU
    place = Place(bool(dry), Path(folder))
    is_served = module == "served"  # such a step leaves the GPU to its services
    with torch.inference_mode(), _simulated() if place.dry and not is_served else contextlib.nullcontext():
        found: Found = getattr(importlib.import_module(f"bench.gpu_slot.{module}"), name)(place)
        place.keep(found)
    return int(any(value for figure, value in found.items() if figure.startswith(WRONG)))


if __name__ == "__main__":
    raise SystemExit(main())
