"""Which service gets which device, when one machine runs them all."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A device per role; KV budgets are set only where both share one GPU and would race for its memory."""

    target: str
    draft: str
    target_kv_bytes: int | None = None
    draft_kv_bytes: int | None = None


# Of what the weights leave free on a shared GPU. The rest is for activations, graphs and CUDA itself.
TARGET_KV_SHARE = 0.65
DRAFT_KV_SHARE = 0.15


def device_kind(wish: str) -> str:
    """`cpu` or `cuda`: what `auto` comes to here, and any other wish as it is."""
    return ("cuda" if count_gpus() else "cpu") if wish == "auto" else wish


def plan_devices(device: str, num_gpus: int) -> DevicePlan:
    """Return each role's device; memory of a shared GPU is not divided yet (see `divide_memory`).

    Args:
        device: auto, cpu or cuda.
        num_gpus: GPUs that can be used; with two or more, target and draft have one each.

    Raises:
        ValueError: cuda without a GPU, or an unknown device.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device {device!r} is none of auto, cpu, cuda")
    if device == "cuda" and num_gpus == 0:
        raise ValueError("device cuda: no GPU was found")
    if device == "cpu" or num_gpus == 0:
        return DevicePlan("cpu", "cpu")
    return DevicePlan("cuda:0", "cuda:1" if num_gpus > 1 else "cuda:0")


def divide_memory(plan: DevicePlan, free_bytes: int, weights_bytes: int) -> DevicePlan:
    """Return the plan with KV budgets when both roles share one GPU, as both take memory at the same time.

    Raises:
        ValueError: The weights alone do not fit.
    """
    if plan.target != plan.draft or plan.target == "cpu":
        return plan
    left = free_bytes - weights_bytes
    if left <= 0:
        raise ValueError(f"weights of {weights_bytes / 2**30:.1f} GiB on a GPU with {free_bytes / 2**30:.1f} GiB free")
    return DevicePlan(plan.target, plan.draft, int(left * TARGET_KV_SHARE), int(left * DRAFT_KV_SHARE))


def count_gpus() -> int:
    """Return the number of usable CUDA devices; imports torch only where a driver is."""
    if not glob.glob("/dev/nvidia[0-9]*"):
        return 0
    import torch

    return torch.cuda.device_count()


def free_gpu_bytes(device: str) -> int:
    """Return the free memory of a CUDA device."""
    import torch

    free, _total = torch.cuda.mem_get_info(device)
    return free


def weights_bytes(model: str) -> int:
    """Return the size of a local model's weights; 0 for a hub id, whose size is not known here."""
    return sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
