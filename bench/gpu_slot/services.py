"""Steps that run all services by a command, whose report is kept."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from bench.gpu_slot.models import Found, StepSetup

if TYPE_CHECKING:
    from bench.inflate import Shape

_BESIDE_BYTES = 8 << 30
"""Bytes of GPU memory beside weights: KV caches, captured steps and libraries of both services."""
_MOST_KEPT = 6000
"""Characters kept of a command's output."""


def selftest(place: StepSetup) -> Found:
    """Numerics ids of the shipped target as an engine loads it, in each dtype, fast and deterministic.

    Raises AssertionError where the GPU's decoder failed its self-test and is not used; the log has the error.
    """
    from specdec.commands.up.plan import shipped_model
    from specdec.engine.model.runner import ModelRunner
    from specdec.engine.settings import EngineSettings

    found: Found = {}
    dtypes: tuple[Literal["float32", "float16", "bfloat16"], ...] = ("float32", "float16", "bfloat16")
    for dtype in dtypes[:1] if place.dry else dtypes:
        for is_deterministic in (False, True):
            settings = EngineSettings(
                model=shipped_model("target"),
                device=str(place.device),
                dtype=dtype,
                deterministic=is_deterministic,
                num_blocks=64,
            )
            runner = ModelRunner.load(settings)
            found[f"{dtype}{', deterministic' if is_deterministic else ''}"] = runner.numerics_id
            place.keep(found)
            if not place.dry and "decoder" not in runner.numerics_id:
                raise AssertionError(found)
    return found


def served(place: StepSetup) -> Found:
    """The demo: the shipped pair behind all three services, compared with plain decoding."""
    return _told("specdec.commands.main", "demo")


def failover(place: StepSetup) -> Found:
    """See ``streams.failover``, which needs more packages than what comes before it."""
    from bench.gpu_slot import streams

    return streams.failover(place)


def gaps(place: StepSetup) -> Found:
    """See ``streams.gaps``."""
    from bench.gpu_slot import streams

    return streams.gaps(place)


def inflated(place: StepSetup) -> Found:
    """An inflated pair served with and without speculation, beside transformers: speeds, and differing tokens.

    Its 17 GiB of weights are written to disk first.
    """
    only = ["--only", "systems", "--systems", "transformers", "--batch", "1", "--prompts", "2", "--peer-tokens", "5"]
    return _bench(place, "gpu-8b", 2, *only)


def loaded(place: StepSetup) -> Found:
    """The inflated 8B pair with several streams at once, and the times between the target's steps."""
    return _bench(place, "gpu-8b", 1, "--only", "decode", "--batch", "2" if place.dry else "1,8,32", "--prompts", "2")


def inflated_32b(place: StepSetup) -> Found:
    """An inflated pair whose target has 32 B parameters, one stream; 62 GiB are written to disk first."""
    return _bench(place, "gpu-32b", 1, "--only", "decode", "--batch", "1", "--prompts", "1")


def _bench(place: StepSetup, pair: str, num_copies: int, *arguments: str) -> Found:
    """The report of ``bench``, and the predictions for its pair, of which the GPU holds ``num_copies`` at once.

    Raises ``MemoryError`` before anything is made where they do not fit.
    """
    if not place.dry:
        _check_fits(pair, num_copies, torch.cuda.get_device_properties(place.device).total_memory)
    where = ["--pair", "shipped", "--device", "cpu"] if place.dry else ["--pair", pair, "--device", "cuda"]
    sizes = ["--repeats", "1", "--max-tokens", "16" if place.dry else "96", "--temperature", "0,1"]
    with tempfile.TemporaryDirectory() as folder:
        found = _told("bench", *where, *sizes, *arguments, "--no-check", "--results", folder)
        (results,) = Path(folder).glob("*.json")
        found["results"] = json.loads(results.read_text())
    decoded = found["results"].get("decode")
    if decoded and not place.dry:
        from bench.gpu_slot.predicted import predicted_speed_ups

        target, draft = _shapes(pair)
        found["predicted"] = predicted_speed_ups(torch.cuda.get_device_name(place.device), target, draft, decoded)
    return found


def _shapes(pair: str) -> tuple[Shape, Shape]:
    from bench.pairs import DRAFTS, PAIRS, TARGETS

    target, draft = PAIRS[pair]
    return TARGETS[target], DRAFTS[draft]


def _check_fits(pair: str, num_copies: int, memory_bytes: int) -> None:
    from bench.checkpoints import inflated_bytes
    from specdec.commands.up.plan import shipped_model

    shapes = zip(("target", "draft"), _shapes(pair), strict=True)
    weights = sum(inflated_bytes(Path(shipped_model(role)), shape) for role, shape in shapes) * num_copies
    if weights + _BESIDE_BYTES > memory_bytes:
        needed, there = (weights + _BESIDE_BYTES) / 2**30, memory_bytes / 2**30
        raise MemoryError(f"{pair} needs {needed:.0f} GiB of a GPU, and this one has {there:.0f}")


def _told(module: str, *arguments: str) -> Found:
    """The output of a command, which is also printed line by line, so that a step that times out has shown it.

    Raises RuntimeError where the command fails.
    """
    command = [sys.executable, "-m", module, *arguments]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    if process.returncode:
        raise RuntimeError(f"{module} ended with {process.returncode}")
    return {"output": "\n".join(lines)[-_MOST_KEPT:].splitlines()}
