"""Assignment of one machine's devices to the engines."""

from __future__ import annotations

import glob
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specdec.engine.checkpoints.folder import tensor_bytes
from specdec.engine.errors import ModelLoadError

_ENCODER = re.compile(r"(^|\.)(vision|visual|audio|image_encoder|vit)[._]|(^|\.)vision_model(\.|$)")
"""Names of weights that no text model has (`specdec.engine.checkpoints.wrappers`)."""


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """The device of one engine; with several ranks, their first one."""

    device: str
    num_ranks: int = 1
    kv_bytes: int | None = None
    """Bytes of KV cache per rank; set only for engines that share a GPU, which would race for its memory."""

    @property
    def gpus(self) -> range:
        """Numbers of its GPUs; none on the CPU."""
        kind, _, first = self.device.partition(":")
        return range(int(first), int(first) + self.num_ranks) if kind == "cuda" else range(0)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The devices of all targets and drafts."""

    targets: tuple[EnginePlace, ...]
    drafts: tuple[EnginePlace, ...]

    @property
    def is_cuda(self) -> bool:
        """Whether the engines are on GPUs."""
        return any(place.gpus for place in (*self.targets, *self.drafts))


# Shares of the memory that weights and engines leave free on a shared GPU. The rest is for fragments.
TARGET_KV_SHARE = 0.75
DRAFT_KV_SHARE = 0.18
ENGINE_BYTES = (600 + 512 + 768) << 20
"""Bytes of an engine on a GPU beside weights and keys: CUDA's context and libraries, captured graphs, and the largest
step with its logits and their sampling. Chosen, not measured."""
_MOST_ASKING_S = 60.0
"""Seconds until a GPU reports its free memory; importing torch and setting up the GPU takes some."""


def device_kind(wish: str) -> str:
    """Resolve `auto` to `cpu` or `cuda`; return any other wish unchanged."""
    return ("cuda" if count_gpus() else "cpu") if wish == "auto" else wish


def plan_devices(
    device: str, num_gpus: int, target_ranks: Sequence[int] = (1,), draft_ranks: Sequence[int] = (1,)
) -> DevicePlan:
    """Return each engine's device; memory of shared GPUs is not divided yet (see `divide_memory`).

    Targets choose before drafts. Each engine takes neighbouring GPUs, one per rank, with the fewest other engines.

    Args:
        device: auto, cpu or cuda.
        num_gpus: GPUs that can be used.
        target_ranks: ranks of each target.
        draft_ranks: ranks of each draft.

    Raises:
        ValueError: cuda without a GPU, an engine with more ranks than GPUs, or an unknown device.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {device!r} is none of auto, cpu, cuda")
    if device == "cuda" and num_gpus == 0:
        raise ValueError("device cuda: no GPU was found")
    if device == "cpu" or num_gpus == 0:
        return DevicePlan(
            tuple(EnginePlace("cpu", ranks) for ranks in target_ranks),
            tuple(EnginePlace("cpu", ranks) for ranks in draft_ranks),
        )
    engines_on = [0] * num_gpus
    return DevicePlan(
        tuple(_take_gpus(engines_on, ranks) for ranks in target_ranks),
        tuple(_take_gpus(engines_on, ranks) for ranks in draft_ranks),
    )


def _take_gpus(engines_on: list[int], num_ranks: int) -> EnginePlace:
    if num_ranks > len(engines_on):
        raise ValueError(f"tensor_parallel_size {num_ranks}: ranks need as many GPUs, and there are {len(engines_on)}")
    starts = range(len(engines_on) - num_ranks + 1)
    first = min(starts, key=lambda start: (max(engines_on[start : start + num_ranks]), start))
    for gpu in range(first, first + num_ranks):
        engines_on[gpu] += 1
    return EnginePlace(f"cuda:{first}", num_ranks)


def divide_memory(
    plan: DevicePlan, free_bytes: Callable[[int], int], target_bytes: int, draft_bytes: int
) -> DevicePlan:
    """Return the plan with KV budgets for engines that share a GPU, because all take memory at the same time.

    Args:
        plan: what `plan_devices` returned.
        free_bytes: gives the free memory of a GPU by its number; called for shared GPUs only.
        target_bytes: weights of one target, all its ranks together.
        draft_bytes: weights of one draft.

    Raises:
        ValueError: the weights and what their engines need beside do not fit.
    """
    engines = [(place, target_bytes, TARGET_KV_SHARE) for place in plan.targets]
    engines += [(place, draft_bytes, DRAFT_KV_SHARE) for place in plan.drafts]
    budgets: dict[int, float] = {}  # of a shared GPU: bytes per unit of share
    for gpu in {gpu for place, _, _ in engines for gpu in place.gpus}:
        here = [engine for engine in engines if gpu in engine[0].gpus]
        if len(here) < 2:
            continue
        free, weights = free_bytes(gpu), sum(num_bytes // place.num_ranks for place, num_bytes, _ in here)
        needed = weights + len(here) * ENGINE_BYTES
        if free <= needed:
            raise ValueError(
                f"GPU {gpu} has {free / 2**30:.1f} GiB free, and weights of {weights / 2**30:.1f} GiB with "
                f"{len(here)} engines need {needed / 2**30:.1f}: use another GPU or smaller models"
            )
        scale = (TARGET_KV_SHARE + DRAFT_KV_SHARE) / sum(share for _, _, share in here)
        budgets[gpu] = (free - needed) * scale
    divided = []
    for place, _, share in engines:
        shared = [budgets[gpu] * share for gpu in place.gpus if gpu in budgets]
        divided.append(replace(place, kv_bytes=int(min(shared))) if shared else place)
    num_targets = len(plan.targets)
    return DevicePlan(tuple(divided[:num_targets]), tuple(divided[num_targets:]))


def count_gpus() -> int:
    """Return the number of usable CUDA devices; imports torch only where a driver is."""
    if not glob.glob("/dev/nvidia[0-9]*"):
        return 0
    import torch

    return torch.cuda.device_count()


def free_gpu_bytes(gpu: int) -> int:
    """Return the free memory of a GPU. Raises ValueError if it cannot be read.

    A child process asks, because a process that has asked keeps some hundred MiB of the GPU, and keeps NVIDIA MPS out
    of it. Where it hangs in the driver, which nothing ends, it is left behind.
    """
    code, failure = (
        f"import torch; print(torch.cuda.mem_get_info({gpu})[0])",
        f"GPU {gpu} did not report its free memory",
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        found, error = child.communicate(timeout=_MOST_ASKING_S)
    except subprocess.TimeoutExpired as expired:
        child.kill()
        remedy = "if NVIDIA MPS runs, end it: echo quit | nvidia-cuda-mps-control"
        raise ValueError(f"{failure} in {_MOST_ASKING_S:g} s; {remedy}") from expired
    if child.returncode:
        reason = error.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        raise ValueError(f"{failure}: {reason[0]}")
    return int(found)


def weights_bytes(model: str) -> int:
    """Return the size of a local model's weights, without those of encoders, which are not read; 0 for a hub id."""
    files = sorted(Path(model).expanduser().glob("*.safetensors"))
    try:
        tensors = [tensor for file in files for tensor in tensor_bytes(file).items()]
    except ModelLoadError as error:
        raise ValueError(str(error)) from error
    return sum(size for name, size in tensors if not _ENCODER.search(name))
