"""Weight-only quantization: rounds linear weights to few bits before packing.

A quantized model is a float32 model whose weights are multiples of a scale. The self-test's dense reference, the order
of sums and row invariance take it as such. The kernels' formats hold these weights exactly, in a quarter of the memory
or less (``specdec.engine.native.packing``). fp8 is the same for models of 16 bits on a GPU, in half of the memory
(``specdec.engine.checkpoints.fp8``).

For quantized checkpoints see ``specdec.engine.checkpoints.formats``.
"""

from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specdec.engine.checkpoints.fp8 import round_to_fp8
from specdec.engine.errors import ModelLoadError
from specdec.engine.native.packing import INT4_GROUP

WeightQuantization = Literal["none", "int8", "int4", "fp8"]
_INT8_STEPS = 127
_INT4_STEPS = -8  # steps of the weight of largest magnitude; the other sign has 7
_INT8_SCALE_BITS = 8  # low bits of a scale that are zero, so that its multiples are exact
_INT4_SCALE_BITS = 16  # a scale is a bfloat16


@torch.no_grad()
def quantize_linear_weights(model: PreTrainedModel, quantization: WeightQuantization) -> None:
    """Round the weights of all linear layers in place. With int4 the output layer is rounded to int8, as no later layer
    evens out its errors. Embeddings stay unrounded, even if tied to the output layer.

    Raises ``ModelLoadError`` for weights that are not finite.
    """
    if quantization == "none":
        return
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if type(module) not in (nn.Linear, Conv1D):
            continue
        rounded = _ROUND_TO[quantization]
        if quantization == "int4" and module is head:
            rounded = round_to_int8
        weight: torch.Tensor = module.weight
        if not bool(weight.isfinite().all()):
            raise ModelLoadError(f"weight_quantization: {name} has weights that are not finite")
        result = rounded(weight.T).T.contiguous() if isinstance(module, Conv1D) else rounded(weight)
        module.weight = nn.Parameter(result, requires_grad=False)


def round_to_int8(weight: torch.Tensor) -> torch.Tensor:
    """Weights ``[N, K]`` rounded to -127 .. 127 times a scale of 16 significant bits per output."""
    scales = _rounded_bits(weight.abs().amax(dim=1, keepdim=True) / _INT8_STEPS, _INT8_SCALE_BITS)
    return _steps(weight, scales).clamp_(-_INT8_STEPS, _INT8_STEPS) * scales


def round_to_int4(weight: torch.Tensor) -> torch.Tensor:
    """Weights ``[N, K]`` rounded to -8 .. 7 times a bfloat16 scale per output and 32 inputs."""
    num_outputs, depth = weight.shape
    padded = nn.functional.pad(weight, (0, -depth % INT4_GROUP)).reshape(num_outputs, -1, INT4_GROUP)
    largest = padded.gather(2, padded.abs().argmax(dim=2, keepdim=True))
    scales = _rounded_bits(largest / _INT4_STEPS, _INT4_SCALE_BITS)
    rounded = _steps(padded, scales).clamp_(_INT4_STEPS, -_INT4_STEPS - 1) * scales
    return rounded.view(num_outputs, -1)[:, :depth].contiguous()


def _steps(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (weight / scales.where(scales != 0, 1)).round_()


def _rounded_bits(scales: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Scales with `num_bits` low bits of zero, rounded half up in magnitude."""
    bits = scales.contiguous().view(torch.int32)
    half = 1 << (num_bits - 1)
    return ((bits + half) >> num_bits << num_bits).view(torch.float32)


_ROUND_TO = {"int8": round_to_int8, "int4": round_to_int4, "fp8": round_to_fp8}
