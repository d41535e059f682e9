"""Predictions for a slot's measurements, computed on the slot's machine and kept beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.gpu_slot.models import Found
from bench.predictions import speed_up
from bench.roofline import GPUS, Gpu, ModelSizes, step_s

if TYPE_CHECKING:
    from bench.inflate import Shape

_MODELS = {"1b": "1B", "8b": "8B"}
_GPUS = {"H200": "H200", "H100 80GB HBM3": "H100 SXM", "A100-SXM4-80GB": "A100 80 GB", "NVIDIA L4": "L4",
         "RTX 4090": "RTX 4090", "RTX 3090": "RTX 3090"}  # fmt: skip
"""GPUs of ``bench.roofline`` by a part of the driver's name."""
_HEAD_DIM = 64
"""Elements of a head of the shipped pair, and so of its inflated models."""


def gpu_named(name: str) -> Gpu | None:
    """A GPU by its driver's name; None where ``bench.roofline`` does not know it. "NVIDIA L40S" is no L4."""
    known = [gpu for part, gpu in _GPUS.items() if part in name and not name.partition(part)[2][:1].isalnum()]
    return GPUS[known[0]] if known else None


def predicted_steps(gpu_name: str) -> Found:
    """Milliseconds of steps at context 1024, under the names of the measured figures. Takes one or two seconds."""
    gpu = gpu_named(gpu_name)
    if gpu is None:
        return {}
    return {
        f"{name}: {rows} rows at 1024, graph ms": round(step_s(model, rows, gpu) * 1000, 3)
        for name, model in _MODELS.items()
        for rows in (1, 8, 64)
    }


def predicted_speed_ups(gpu_name: str, target: Shape, draft: Shape, decoded: list[dict[str, Any]]) -> Found:
    """Speed-ups of single streams by temperature, from the acceptance rate of the first draft token.

    ``decoded``: rows of ``bench.decode``.
    """
    gpu = gpu_named(gpu_name)
    if gpu is None:
        return {}
    found: Found = {}
    for row in decoded:
        if row["batch"] == 1 and row["acceptance_by_depth"]:
            acceptance = row["acceptance_by_depth"][0]
            ratio, length = speed_up(model_of(draft), model_of(target), 1, gpu, acceptance)
            found[f"{row['temperature']:g}"] = {"accepted": acceptance, "speed-up": round(ratio, 2), "drafted": length}
    return found


def model_of(shape: Shape) -> ModelSizes:
    """An inflated model by its sizes."""
    return ModelSizes(
        hidden=shape.hidden_size,
        intermediate=shape.intermediate_size,
        layers=shape.num_layers,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=_HEAD_DIM,
        vocab=shape.vocab_size,
    )
