"""Checkpoints that are quantized already: GPTQ, AWQ, compressed-tensors, bitsandbytes and what else transformers loads.

transformers reads them where the package of their format is installed, and its modules compute with them on CUDA, as
the engine's own decoders take weights that are numbers.
"""

from typing import Any

import torch
from transformers import PreTrainedConfig

from specdec.engine.errors import ModelLoadError
from specdec.engine.settings import EngineSettings


def format_of(config: PreTrainedConfig) -> str:
    """The name of the format that a checkpoint's config tells, as transformers spells it; "": none."""
    described: Any = getattr(config, "quantization_config", None)
    if described is None:
        return ""
    method = described.get("quant_method") if isinstance(described, dict) else getattr(described, "quant_method", None)
    return str(getattr(method, "value", method) or "unknown")


def check_format(config: PreTrainedConfig, settings: EngineSettings, device: torch.device) -> str:
    """The checkpoint's format; "" for one of plain numbers.

    Raises ``ModelLoadError`` where such a checkpoint cannot be used.
    """
    name = format_of(config)
    if not name:
        return name
    if device.type != "cuda":
        raise ModelLoadError(
            f"{settings.model} is quantized ({name}), which is for CUDA: on the CPU give the original checkpoint and "
            "weight_quantization"
        )
    if settings.tensor_parallel_size > 1:
        raise ModelLoadError(f"tensor_parallel_size: {settings.model} is quantized ({name}), which is for one rank")
    if settings.load_format == "dummy":
        raise ModelLoadError(f"load_format: dummy makes no weights for a quantized checkpoint ({name})")
    if settings.deterministic:
        raise ModelLoadError(
            f"deterministic: {settings.model} is quantized ({name}), and its kernels go by the number of rows"
        )
    return name
