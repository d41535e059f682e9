"""Quantized checkpoints: GPTQ, AWQ, compressed-tensors, bitsandbytes and other formats that transformers loads, and
that are not read as plain weights (``fp8_files.py``).

transformers loads them if the format's package is installed. Its modules compute with them, on CUDA only, as the
engine's own decoders need plain weights.
"""

from typing import Any

import torch
from transformers import PreTrainedConfig

from specdec.engine.errors import ModelLoadError
from specdec.engine.settings import EngineSettings


def format_of(config: PreTrainedConfig) -> str:
    """The format in a checkpoint's config, as transformers spells it; "" if none."""
    described: Any = getattr(config, "quantization_config", None)
    if described is None:
        return ""
    method = described.get("quant_method") if isinstance(described, dict) else getattr(described, "quant_method", None)
    return str(getattr(method, "value", method) or "unknown")


def check_format(config: PreTrainedConfig, settings: EngineSettings, device: torch.device) -> str:
    """The checkpoint's format; "" for plain weights.

    Raises ``ModelLoadError`` if the settings or the device do not allow the format.
    """
    name = format_of(config)
    if not name:
        return name
    if device.type != "cuda":
        raise ModelLoadError(
            f"model: {settings.model} is quantized ({name}) and needs CUDA; on a CPU set the original model and "
            "weight_quantization"
        )
    if settings.tensor_parallel_size > 1:
        raise ModelLoadError(f"tensor_parallel_size: {settings.model} is quantized ({name}); set 1")
    if settings.load_format == "dummy":
        raise ModelLoadError(f"load_format: dummy does not support a quantized checkpoint ({name})")
    if settings.deterministic:
        raise ModelLoadError(
            f"deterministic: {settings.model} is quantized ({name}), and its kernels are not row-invariant; set false"
        )
    return name
