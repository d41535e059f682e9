"""Checkpoints with weights of 8-bit floating-point numbers and scales, read as the plain weights that they stand for.

A weight ``name`` of E4M3 or E5M2 has scales ``name_scale`` (compressed-tensors, FBGEMM, ModelOpt, AutoFP8) or
``name_scale_inv`` (DeepSeek, Qwen3), by which its numbers are multiplied: one per tensor, output or block. Scales of
activations are not used, as activations stay in the model's dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

from specdec.engine.checkpoints.folder import tensor_types, weight_files
from specdec.engine.errors import ModelLoadError

_NUMBERS = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = ("_scale_inv", "_scale")
_INTEGERS = ("I8", "U8")


def fp8_config(config: PreTrainedConfig) -> tuple[PreTrainedConfig, tuple[int, int]] | None:
    """The config without its format, and the sizes of a block of a weight, if it is one of these formats.

    Sizes of 0: no weight has scales per block.
    """
    described = _described(config)
    method = str(described.get("quant_method", ""))
    groups = [group.get("weights") or {} for group in (described.get("config_groups") or {}).values()]
    is_fp8 = {
        "fp8": True,
        "fbgemm_fp8": True,
        "modelopt": described.get("quant_algo") == "FP8",
        "compressed-tensors": bool(groups) and all((g.get("type"), g.get("num_bits")) == ("float", 8) for g in groups),
    }
    if not is_fp8.get(method, False):
        return None
    if (described.get("transform_config") or {}).get("config_groups"):
        raise ModelLoadError(
            "model: its quantization_config has a transform_config: rotations of activations are not implemented; "
            "give the original model"
        )
    plain = copy.deepcopy(config)
    del plain.quantization_config
    sizes = [described.get("weight_block_size"), *(group.get("block_structure") for group in groups)]
    given: Any = next((each for each in sizes if each), (0, 0))
    if not (isinstance(given, list | tuple) and len(given) == 2 and all(type(n) is int and n >= 0 for n in given)):
        raise ModelLoadError(f"model: its config's quantization_config names blocks of {given}, not of two sizes")
    return plain, (given[0], given[1])


def read_fp8(directory: Path, block: tuple[int, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of a folder, on the CPU: weights of 8 bits as plain ones in ``dtype``, others as they are stored.

    Raises ``ModelLoadError`` for a weight without scales, or with scales that do not fit it.
    """
    found: dict[str, torch.Tensor] = {}
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                found[name] = tensors.get_tensor(name)
    for name in [name for name, tensor in found.items() if tensor.dtype in _NUMBERS]:
        scales = next((found.pop(name + end) for end in _SCALES if name + end in found), None)
        if scales is None:
            raise ModelLoadError(f"model: {directory} has {name} in 8 bits and no {name}_scale; download it again")
        found[name] = _plain(name, found[name], scales, block).to(dtype)
    return found


def check_plain(directory: Path) -> None:
    """Check that a folder whose config.json names no format has plain weights. Raises ``ModelLoadError``.

    transformers takes numbers without their scales for the weights, without a word.
    """
    kinds = {name: kind for file in weight_files(directory) for name, kind in tensor_types(file).items()}
    for name, kind in kinds.items():
        has_scales = any(name + end in kinds for end in _SCALES)
        if name.endswith("weight") and (kind in _INTEGERS or (kind.startswith("F8_") and has_scales)):
            raise ModelLoadError(
                f"model: {directory} has {name} in 8 bits ({kind}), and its config.json has no quantization_config, "
                "which says how they are meant; add it"
            )


def _described(config: PreTrainedConfig) -> Mapping[str, Any]:
    described: Any = getattr(config, "quantization_config", None)
    if described is not None and not isinstance(described, dict):
        described = described.to_dict()
    return described or {}


def _plain(name: str, numbers: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Numbers ``[..., N, K]`` times their scales, in float32."""
    if not scales.dtype.is_floating_point:
        raise ModelLoadError(f"model: {name} has scales of {scales.dtype}, which is no floating-point type")
    scales, wide = scales.float(), numbers.float()
    if scales.numel() == 1:
        return wide.mul_(scales.view(()))
    if numbers.dim() < 2:
        raise ModelLoadError(f"model: {name} has {scales.numel()} scales and {numbers.dim()} dimensions")
    outputs, inputs = numbers.shape[-2:]
    leading = list(numbers.shape[:-2])
    if list(scales.shape) in ([*leading, outputs], [*leading, outputs, 1]):
        return wide.mul_(scales.reshape(*leading, outputs, 1))
    if all(block) and list(scales.shape) == [*leading, -(-outputs // block[0]), -(-inputs // block[1])]:
        for start in range(0, outputs, block[0]):
            own = scales[..., start // block[0], :].repeat_interleave(block[1], -1)[..., :inputs]
            wide[..., start : start + block[0], :] *= own.unsqueeze(-2)
        return wide
    raise ModelLoadError(
        f"model: {name} of shape {list(numbers.shape)} has scales of shape {list(scales.shape)}: neither one, nor one "
        f"per output, nor one per block of {block[0]} x {block[1]}"
    )
