"""Linear layers whose rows do not depend on their company, put in the place of a model's own.

``nn.Linear`` picks other kernels for other row counts, so the same row gets other bits alone than in a batch.
Here the weight is packed once and every output is one sum in a fixed order. The same holds for activations:
ATen computes the last few elements of a tensor by another ``exp`` than the rest.
"""

from typing import Protocol

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

_ACTIVATION_MODULES = ("GELU", "SiLU", "Sigmoid", "Mish", "Laplace", "Softplus", "Hardswish", "Swish")
_VECTOR_MULTIPLE = 64  # ATen's vectorised loops take at most this many elements at a time


class PackedWeight(Protocol):
    """A weight in a kernel's own layout."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Take contiguous float32 rows ``[T, K]``, return ``[T, N]``."""


class WeightPacker(Protocol):
    """Packs a weight ``[N, K]`` and a bias ``[N]`` for a kernel."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
        """Return the packed weight; the originals are not kept."""


class PackedLinear(nn.Module):
    """Stands for ``nn.Linear`` or transformers' ``Conv1D``."""

    def __init__(self, packed: PackedWeight, in_features: int, out_features: int) -> None:
        super().__init__()
        self.packed = packed
        self.in_features = in_features
        self.out_features = out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ weight.T + bias`` over the last dimension."""
        rows = x.reshape(-1, self.in_features).contiguous()
        return self.packed(rows).view(*x.shape[:-1], self.out_features)


class WholeVectorActivation(nn.Module):
    """Pads an element-wise module's input to whole vectors, so that no element falls to a scalar tail."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The inner module's result, element by element."""
        missing = -x.numel() % _VECTOR_MULTIPLE
        if not missing and x.is_contiguous():
            result: torch.Tensor = self.inner(x)
            return result
        padded = nn.functional.pad(x.reshape(-1), (0, missing))
        result = self.inner(padded)
        return result[: x.numel()].view(x.shape)


class OneDnnWeight:
    """A weight packed by oneDNN for 8 rows; a row's bits depend on neither other rows nor threads."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, num_threads: int) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 8)
        self._bias = None if bias is None else bias.detach().clone()
        self._num_threads = num_threads

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``PackedWeight``. Only this call uses more than one ATen thread."""
        if rows.shape[0] == 0:
            return rows.new_empty(0, self._weight.shape[0])
        threads = torch.get_num_threads()
        if threads != self._num_threads:
            torch.set_num_threads(self._num_threads)
        try:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        finally:
            if threads != self._num_threads:
                torch.set_num_threads(threads)
        return out


def make_modules_row_invariant(model: nn.Module, pack: WeightPacker) -> None:
    """Replace all linear layers and activations of a float32 CPU model, in place.

    Weights are packed one by one and the originals dropped, so that memory peaks one weight above the model's
    size. A weight shared with an embedding is packed apart.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if _is_replaceable(child):
                places.setdefault(id(child), []).append((parent, name))
    for uses in places.values():  # holds parents only: a replaced module's weight is freed at once
        new = _replacement(getattr(*uses[0]), pack)
        for parent, name in uses:
            setattr(parent, name, new)


def _is_replaceable(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, Conv1D) or _is_activation(module)


def _is_activation(module: nn.Module) -> bool:
    if not any(word in type(module).__name__ for word in _ACTIVATION_MODULES):
        return False
    return next(module.parameters(), None) is None and next(module.children(), None) is None


def _replacement(module: nn.Module, pack: WeightPacker) -> nn.Module:
    if isinstance(module, nn.Linear):
        return PackedLinear(pack(module.weight.detach(), module.bias), module.in_features, module.out_features)
    if isinstance(module, Conv1D):
        packed = pack(module.weight.detach().t().contiguous(), module.bias)
        return PackedLinear(packed, module.weight.shape[0], module.weight.shape[1])
    return WholeVectorActivation(module)
